"""`paceline serve` as a program: it starts, answers, and ends in order."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.ci]


def ask(port: int, path: str, body: dict | None = None) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )


def start(port: int, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "paceline", "serve", *arguments, "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until_ready(process: subprocess.Popen, port: int) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(ask(port, "/health"), timeout=10):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(process.stdout.read())


def children(process: subprocess.Popen) -> list[int]:
    known = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(number) for number in known.split()]


def runs(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def test_serve_answers_and_drains_at_sigterm():
    port = free_port()
    process = start(port, "builtin-countdown", "rollout.max_running=8", "run.device=cpu")
    try:
        wait_until_ready(process, port)
        engine = children(process)
        asked = {"model": "builtin-countdown", "prompt": "1+2=", "max_tokens": 200, "ignore_eos": True}
        with urllib.request.urlopen(ask(port, "/v1/completions", asked | {"stream": True})) as answer:
            first = answer.readline()
            process.send_signal(signal.SIGTERM)
            rest = answer.read()
        assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
        assert process.wait(60) == 0
        assert "builtin-countdown at http://127.0.0.1" in process.stdout.read()
        assert not any(map(runs, engine))
    finally:
        process.kill()


def test_serve_ends_with_its_engine_and_the_engine_with_it():
    port = free_port()
    process = start(port, "builtin", "rollout.speculation.drafters=[]", "run.device=cpu")
    try:
        wait_until_ready(process, port)
        (engine,) = children(process)
        os.kill(engine, signal.SIGKILL)
        assert process.wait(60) == 2 and "the engine's process ended" in process.stdout.read()
    finally:
        process.kill()
    process = start(port, "builtin", "rollout.speculation.drafters=[]", "run.device=cpu")
    try:
        wait_until_ready(process, port)
        (engine,) = children(process)
        process.kill()
        process.wait()
        while runs(engine):
            time.sleep(0.05)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-thing"], "no-such-thing"),
        (["builtin", "--host", "0.0.0.0"], "--key-file"),
        (["builtin", "rollout.max_runing=8"], "max_runing"),
        (["builtin", "run.device=cpu", "rollout.kv_tokens=999999999999"], "kv_tokens"),
    ],
)
def test_serve_says_what_is_wrong(arguments, said):
    process = start(free_port(), *arguments)
    told = process.communicate(timeout=300)[0]
    assert process.returncode == 2 and said in told and "Traceback" not in told
