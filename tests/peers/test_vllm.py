"""Folders written by `save_policy` open in a real vLLM, which then says what our engine says.

vLLM lives in an environment of its own (`scripts/vllm_env.sh` makes it) and is started once, as a subprocess,
for all cases. Its head sizes on a CPU start at 32, hence models slightly larger than those of the other
tests.
"""

import json
import os
import random
import signal
import string
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from paceline.engine.engine import Engine, EngineSettings
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy, save_policy
from paceline.policy.tokenizer import character_tokenizer, load_tokenizer, save_tokenizer
from paceline.types import Completion, FinishReason, Request, SamplingParams
from tests.oracles import SMALL, small_model

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-vllm"
TIMEOUT_SECONDS = 600
MAX_TOKENS = 40
END_TOKENS = [0, 20, 40, 60, 80]  # several, as instruct models have them

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama-biases-llama3": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    # vLLM's Qwen2 ignores `head_dim`: it must be hidden_size / num_attention_heads, as in every Qwen2 there
    # is.
    "qwen2": ("qwen2", {"hidden_size": 192}),
    "qwen2-tied-yarn": (
        "qwen2",
        {"hidden_size": 192, "tie_word_embeddings": True, "rope_parameters": YARN_ROPE},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"hidden_size": 64, "moe_intermediate_size": 64}),
    "qwen3_moe-dense-layer": (
        "qwen3_moe",
        {"hidden_size": 64, "moe_intermediate_size": 64, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
}
BUILTIN = "builtin"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (VENV / ".ready").is_file(),
        reason="there is no vLLM in .venv-vllm; scripts/vllm_env.sh installs it (3 minutes, 3.4 GB)",
    ),
]


def save_small_policy(case: str, folder: Path) -> None:
    """A random model through our hands: transformers -> load_policy -> save_policy, with a tokenizer for its
    vocabulary.
    """
    family, changes = CASES[case]
    original = folder / "transformers"
    small_model(family, head_dim=32, bos_token_id=None, eos_token_id=END_TOKENS, **changes).save_pretrained(
        original
    )
    (original / "generation_config.json").unlink()  # config.json alone must tell vLLM the end tokens
    alphabet = (string.printable + "äöü")[: SMALL["vocab_size"] - 1]
    save_tokenizer(character_tokenizer(alphabet), original)
    save_policy(load_policy(original, torch.float32), folder, tokenizer_from=original)


def make_prompts(case: str, folder: Path) -> list[list[int]]:
    if case == BUILTIN:
        tokenizer = load_tokenizer(folder)
        return [
            tokenizer.encode(text).ids for text in ("a9b8c8=", "a1b2=", "a5b0c7d3=", "a9b9c9d9e9f9=", "a3")
        ]
    rng = random.Random(case)
    return [
        [rng.randrange(1, SMALL["vocab_size"]) for _ in range(length)]
        for length in (1, 2, 7, 16, 17, 40, 100, 200)
    ]


def run_vllm(job: dict, scratch: Path, script: str = "vllm_generate.py") -> dict[str, list[dict]]:
    """One vLLM process for the whole job. Whatever happens, nothing of its process group outlives this
    call.
    """
    job_path, result_path, log_path = scratch / "job.json", scratch / "result.json", scratch / "vllm.log"
    job_path.write_text(json.dumps(job))
    settings = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default it pins itself to cores that others use
        "VLLM_CACHE_ROOT": str(VENV / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))
    } | settings
    command = [VENV / "bin" / "python", Path(__file__).with_name(script), job_path, result_path]
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=environment,
            start_new_session=True,
        )
        try:
            outcome = f"ended with {process.wait(TIMEOUT_SECONDS)}"
        except subprocess.TimeoutExpired:
            outcome = f"was killed after {TIMEOUT_SECONDS} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not result_path.is_file():
        pytest.fail(f"vLLM {outcome}; its log ends with\n{log_path.read_text()[-4000:]}", pytrace=False)
    return json.loads(result_path.read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folders = {case: tmp_path_factory.mktemp(case) for case in CASES}
    for case, folder in folders.items():
        save_small_policy(case, folder)
    return folders | {BUILTIN: BUILTIN_POLICY}


@pytest.fixture(scope="module")
def vllm_answers(folders, tmp_path_factory) -> dict[str, list[dict]]:
    cases = {
        case: {"folder": str(folder), "prompts": make_prompts(case, folder)}
        for case, folder in folders.items()
    }
    return run_vllm({"cases": cases, "max_tokens": MAX_TOKENS}, tmp_path_factory.mktemp("vllm"))


def our_answers(case: str, folder: Path) -> list[Completion]:
    engine = Engine(load_policy(folder, torch.float32), EngineSettings(max_running=4, kv_tokens=2048))
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    prompts = make_prompts(case, folder)
    engine.submit(
        [Request(str(i), tuple(prompt), seed=i, sampling=sampling) for i, prompt in enumerate(prompts)]
    )
    return sorted(engine.completions(), key=lambda completion: int(completion.request.id))


@pytest.mark.parametrize("case", [*CASES, BUILTIN])
def test_vllm_generates_what_we_generate(case, folders, vllm_answers):
    ours, theirs = our_answers(case, folders[case]), vllm_answers[case]
    assert len(ours) == len(theirs)
    tokenizer = load_tokenizer(folders[case])
    for completion, answer in zip(ours, theirs, strict=True):
        assert answer["tokens"] == list(completion.tokens)
        assert answer["finish_reason"] == completion.finish_reason
        assert answer["logprobs"] == pytest.approx(completion.logprobs, abs=1e-3)
        stopped = completion.finish_reason is FinishReason.STOP  # vLLM's text leaves the end token out
        assert answer["text"] == tokenizer.decode(completion.tokens[:-1] if stopped else completion.tokens)
    assert FinishReason.STOP in {completion.finish_reason for completion in ours}, (
        "no prompt of this case reaches an end token"
    )
