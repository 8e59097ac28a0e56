"""The certificate of a real server, vLLM's own on the CPU: it passes as it is, and fails where it speculates.

vLLM's CPU build verifies proposals at a temperature that is never written (docs/vllm.md); our worker cures
that, a server of vLLM's own has it.
"""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from paceline.certify.certificate import Certificate
from paceline.certify.foreign_run import Foreign, certify_foreign
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.policy.tokenizer import load_tokenizer
from tests.peers.test_vllm import VENV
from tests.peers.test_vllm import pytestmark as vllm_marks
from tests.ports import free_port

pytestmark = vllm_marks

START_SECONDS = 600
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}


@contextmanager
def vllm_server(log: Path, speculative: dict | None = None) -> Iterator[str]:
    """Serves the built-in policy with vLLM on a free port; nothing of its process group outlives this."""
    port = free_port()
    options = ["--model", str(BUILTIN_POLICY), "--host", "127.0.0.1", "--port", str(port)]
    options += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16", "--block-size", "32"]
    options += ["--kv-cache-memory-bytes", str(64 << 20), "--generation-config", "vllm"]
    if speculative:
        options += ["--speculative-config", json.dumps(speculative)]
    settings = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(VENV / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", *options]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment | settings, start_new_session=True
        )
        try:
            _wait_until_it_serves(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_it_serves(process: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError):  # no server listens yet, or it is slow
            urllib.request.urlopen(f"{url}/v1/models", timeout=60).close()
            return
        time.sleep(1)
    pytest.fail(f"vLLM does not serve; its log ends with\n{log.read_text()[-3000:]}", pytrace=False)


def certificate(url: str) -> Certificate:
    what = Foreign(str(BUILTIN_POLICY), (), "default", endpoint=url)
    prompts = [(5, 9, 7, 4, 22, 8), (6, 13, 30, 8, 9, 4, 17), (7, 7, 12)]
    policy, tokenizer = load_policy(BUILTIN_POLICY, torch.float32), load_tokenizer(BUILTIN_POLICY)
    return certify_foreign(what, policy, prompts, tokenizer, quick=True, samples=100)


def test_vllm_server_passes_without_speculation(tmp_path):
    with vllm_server(tmp_path / "log") as url:
        found = certificate(url)
    assert found.passed, found.table()


def test_vllm_server_fails_where_its_cpu_build_speculates(tmp_path):
    with vllm_server(tmp_path / "log", NGRAM) as url:
        found = certificate(url)
    assert not found.passed, found.table()
