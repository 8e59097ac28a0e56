"""Worker processes and what rewards do to them: no score goes astray, and nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.config import RewardConfig, TaskConfig
from paceline.tasks.base import Problem, Response
from paceline.tasks.rewards import output as output_module
from paceline.tasks.rewards.channel import HEADER, MAGIC, Channel, ChannelBroken
from paceline.tasks.rewards.functions import Failed, Target
from paceline.tasks.rewards.pool import WorkerPool
from paceline.tasks.rewards.scoring import Scoring, from_verifier
from paceline.tasks.rewards.worker import Step
from paceline.types import Score
from tests.tasks.test_rewards import EXAMPLES, SLEEP, nothing_is_left, sleepers  # noqa: F401

PROBLEM = Problem("p", "?", "4")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def pool():
    opened = []

    def open_pool(name: str, size: int = 1, time_limit: float = 120.0, memory_gb: float = 0.0) -> WorkerPool:
        opened.append(WorkerPool([Target(f"{EXAMPLES}:{name}", {}, time_limit)], size, memory_gb))
        return opened[-1]

    yield open_pool
    for one in opened:
        one.close()


def call(pool: WorkerPool, *texts: str) -> list:
    futures = [pool.submit(0, [(PROBLEM, Response(text, False))]) for text in texts]
    replies = [future.result(timeout=300) for future in futures]
    return [reply.reason if isinstance(reply, Failed) else reply[0].score for reply in replies]


@pytest.mark.parametrize("name", ["forks", "forks_first", "forks_and_raises", "forks_with_multiprocessing"])
def test_forking_reward_gives_each_response_its_own_score(pool, name):
    texts = ["a" * length for length in range(1, 13)]
    assert call(pool(name), *texts) == [float(len(text)) for text in texts]


def test_child_that_outlives_its_worker_sends_no_reply(pool):
    assert call(pool("forks_and_leaves"), "a", "b") == ["died", "died"]


def test_channel_ignores_messages_of_other_calls_and_senders(pool, monkeypatch):
    """What a child manages to write all the same: right in form, wrong in number or sender."""
    workers = pool("length")
    workers.load_targets()
    worker = workers.state.spare[0]
    ours, theirs = socket.socketpair()
    worker.channel.socket.close()
    worker.channel = Channel(ours)
    forged = Channel(theirs)
    own = worker.process.pid
    messages = ((999, 1, "a child's"), (own, 7, "a late one"), (own, 1, "the answer"))
    for sender, number, score in messages:
        monkeypatch.setattr(os, "getpid", lambda sender=sender: sender)
        forged.send(number, score)
    monkeypatch.undo()
    assert worker.call(0, None, 120.0) == "the answer"


@pytest.mark.parametrize("name", ["closes_everything", "reopens_everything", "writes_into_the_connection"])
def test_broken_connection_does_not_affect_the_next_call(pool, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    workers = pool(name, time_limit=240.0)
    start = time.monotonic()
    assert call(workers, "a", "b") == ["died", "died"]
    assert time.monotonic() - start < 240, "they did not cost their time limit"


def test_endless_message_ends_at_the_time_limit():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(HEADER.pack(MAGIC, 1, os.getpid(), 1000) + b"x")
    start = time.monotonic()
    assert channel.receive(0.2) is None and time.monotonic() - start < 30
    theirs.sendall(b"x" * 2000)
    with pytest.raises(ChannelBroken):
        channel.receive(30)


@pytest.mark.slow
def test_observation_that_is_too_long_is_an_error():
    tool = WorkerPool([Step(f"{EXAMPLES}:long_observation", {}, 200.0)], 1)
    try:
        reply = tool.submit(0, (PROBLEM, ())).result(timeout=300)
        assert isinstance(reply, Failed) and reply.reason == "error" and "returned too much" in reply.message
    finally:
        tool.close()


@LINUX
@pytest.mark.parametrize("text", ["fine", pytest.param("hang", marks=pytest.mark.slow), "die"])
def test_process_that_left_its_session_ends_with_the_worker(pool, text):
    workers = pool("daemonises", time_limit=2.0 if text == "hang" else 60.0)
    expected = {"fine": 1.0, "hang": "timeout", "die": "died"}[text]
    before = set(sleepers())
    assert call(workers, text) == [expected]
    if text == "fine":
        deadline = time.monotonic() + 120
        while not set(sleepers()) - before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(sleepers()) - before, "it may have use for it until the worker ends"
        workers.close()
    deadline = time.monotonic() + 120
    while set(sleepers()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(sleepers()) - before


@LINUX
def test_process_that_left_its_session_ends_with_a_killed_run(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import time\n"
        "from paceline.tasks.base import Problem, Response\n"
        "from paceline.tasks.rewards.functions import Target\n"
        "from paceline.tasks.rewards.pool import WorkerPool\n"
        f"pool = WorkerPool([Target('{EXAMPLES}:daemonises')], 1)\n"
        "pool.submit(0, [(Problem('p', '?', '4'), Response('fine', False))]).result()\n"
        "print('scored', flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    search_path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": search_path, "TEST_SLEEP": f"{SLEEP}1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "scored\n"
    marker = f"sleep\0{SLEEP}1\0".encode()
    assert _becomes(True, marker), "a score may come before what it has left behind"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert _becomes(False, marker)


def _becomes(running: bool, command: bytes) -> bool:
    deadline = time.monotonic() + 60
    while _running(command) != running and time.monotonic() < deadline:
        time.sleep(0.05)
    return _running(command) == running


def _running(command: bytes) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == command:
                return True
        except OSError:
            continue
    return False


def test_worker_output_goes_to_the_log(pool, tmp_path, capfd):
    workers = pool("prints")
    assert call(workers, "one") == [1.0]
    workers.state.output.to_log(tmp_path / "rewards.log")  # as a run does once it has its directory
    assert call(workers, "two") == [1.0]
    workers.close()
    text = (tmp_path / "rewards.log").read_text()
    for line in ("printed about one", "printed about two", "an error line", "past Python", "by a child"):
        assert line in text
    out, err = capfd.readouterr()
    assert "printed" not in out + err and "past Python" not in out + err


def test_worker_output_without_a_run_goes_to_stderr(pool, capfd):
    workers = pool("prints")
    assert call(workers, "one") == [1.0]
    workers.close()
    out, err = capfd.readouterr()
    assert "printed about one" in err and not out


def test_worker_log_does_not_fill_the_disk(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(output_module, "MAX_LOG_BYTES", 1 << 20)
    workers = pool("prints_much")
    workers.state.output.to_log(tmp_path / "rewards.log")
    assert call(workers, "x") == [1.0]
    workers.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 << 20


def test_worker_log_that_cannot_be_written_stops_no_run(pool, tmp_path):
    workers = pool("prints")
    workers.state.output.to_log(tmp_path / "missing/rewards.log")
    assert call(workers, "x") == [1.0]


@LINUX
def test_memory_limit_fails_one_call_and_the_next_works(pool):
    workers = pool("takes_memory", memory_gb=1.0)
    assert call(workers, "much", "little") == ["memory", 1.0]


@pytest.mark.slow
def test_time_limit_excludes_imports_within_a_call(pool, tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(3.0)\nONE = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    workers = pool("imports_slowly", time_limit=2.0)
    # A machine that pauses may spend the two seconds, then once more; an import that counts always would.
    assert any(call(workers, "a", "b") == [1.0, 1.0] for _ in range(4))


def test_time_limit_counts_again_after_an_import(pool, tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\nONE = 1.0\n")
    file = tmp_path / "late.py"
    file.write_text("def hang(response):\n    import slow_to_import, time\n    time.sleep(100)\n")
    workers = WorkerPool([Target(f"{file}:hang", {}, 0.5)], 1)
    try:
        start = time.monotonic()
        assert call(workers, "a") == ["timeout"] and time.monotonic() - start < 80
    finally:
        workers.close()


def test_signals_for_the_run_do_not_end_its_reward_workers(pool):
    assert call(pool("counts_signals"), "a", "b") == [1.0, 1.0]


@pytest.mark.parametrize("text", ["1e308", "-1e308", "1.1e6", "inf", "nan"])
def test_scores_beyond_the_largest_are_failures(pool, text):
    assert call(pool("huge"), text, "1e6") == ["error", 1e6]


def test_scores_of_a_tasks_own_verifier_are_limited_alike():
    run = from_verifier(lambda problem, text, truncated: Score(float(text), False))
    assert isinstance(run([(PROBLEM, Response("1e308", False))]).result(), Failed)
    assert run([(PROBLEM, Response("2", False))]).result()[0].score == 2.0


@pytest.mark.parametrize("key", ["weight", "failed_score"])
def test_reward_weights_beyond_the_largest_are_refused(key):
    with pytest.raises(ValueError, match=key):
        RewardConfig(function="exact", **{key: 1e308})
    with pytest.raises(ValueError, match="reward_memory_gb"):
        TaskConfig(reward_memory_gb=-1)


def test_scoring_without_workers_writes_no_log(tmp_path):
    Scoring([]).log_output(tmp_path / "rewards.log")
    assert not list(tmp_path.iterdir())


def test_function_that_cannot_be_loaded_leaves_no_worker(pool):
    with pytest.raises(ValueError, match="no function 'no_such'"):
        pool("no_such").load_targets()
