"""One process per run: the second is refused with the holder's name, and a crash needs no cleaning up."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.config import ConfigError, load_config
from paceline.report.run_directory import RunDirectory
from paceline.runs import lock as module
from paceline.runs.lock import Holder, LockLost, RunIsHeld, RunLock
from tests.length_reward import hold
from tests.loop_helpers import comparable_metrics
from tests.runs.conftest import signal_self_in

HOLD = """
import sys, time
from pathlib import Path
from paceline.runs.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(module, "WATCH_SECONDS", 60.0)  # a holder that lives beats within that
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.1)


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes records that this process writes from now on look like another host's."""

    def use(boot: str) -> None:
        monkeypatch.setattr(module, "_boot_id", lambda: boot)

    return use


def hold_in_process(folder: Path, *before: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [*before, sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_run_lock_names_its_holder_and_forgets_a_killed_one(tmp_path):
    holder = hold_in_process(tmp_path)
    with pytest.raises(RunIsHeld, match=rf"held by process {holder.pid} on this host \(`-c .*since 20"):
        RunLock(tmp_path)
    holder.kill()
    holder.wait()
    said: list[str] = []
    RunLock(tmp_path, said.append).release()
    assert not said, "nothing to wait for, which would be said, and nothing to remove"
    assert (tmp_path / "run.lock").read_bytes() == b""


def test_run_lock_sees_a_holder_in_another_pid_namespace(tmp_path):
    namespace = ["unshare", "-Urpf", "--kill-child"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "true"], capture_output=True).returncode
    ):
        pytest.skip("no namespaces here")
    holder = hold_in_process(tmp_path, *namespace)
    try:
        with pytest.raises(RunIsHeld, match="process 1 of another container on this host"):
            RunLock(tmp_path)
    finally:
        holder.kill()
        holder.wait()


def has_ended(pid: int) -> bool:
    """Whether a child has ended, which can still be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_run_lock_admits_one_of_two_simultaneous_resumes(tmp_path, start, whole):
    """Both resume; one of them trains, the other is told so, and every step is there once."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)

    def prepare() -> None:
        hold(tmp_path / "go on")

    both = [start("train", "--resume", str(run), "run.steps=9", prepare=prepare) for _ in range(2)]
    deadline = time.monotonic() + 300
    while not any(has_ended(command.pid) for command in both) and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go on").touch()  # the winner had not finished when the other came
    assert sorted(command.wait() for command in both) == [0, 2]
    loser, winner = sorted(both, key=lambda command: -command.code)
    assert f"is held by process {winner.pid} on this host" in loser.text() and "Traceback" not in loser.text()
    steps = [m["step"] for m in comparable_metrics(run) if m["kind"] == "train"]
    assert steps == list(range(1, 10))


@pytest.mark.slow
def test_run_directory_admits_one_of_two_new_runs_of_one_name(tmp_path, train):
    both = [train("run", "run.steps=1") for _ in range(2)]
    assert sorted(command.wait() for command in both) == [0, 2]
    loser = max(both, key=lambda command: command.code)
    assert "run exists. Continue it with --resume" in loser.text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".new")] == []


def test_run_directory_names_differ_within_the_same_second(tmp_path, monkeypatch):
    config = load_config(None, [f"run.root={tmp_path}"])
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    made = [RunDirectory.create(config, "recipe").path.name for _ in range(3)]
    assert made == ["recipe-now", "recipe-now-2", "recipe-now-3"]


def test_export_needs_no_lock_and_no_write_access(tmp_path, start, whole):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    lock = RunLock(run)
    try:
        for path in (run, *run.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        command = start("export", str(run), str(tmp_path / "out"))
        assert command.wait() == 0, command.text()
    finally:
        for path in (run, *run.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        lock.release()


def test_export_moves_nothing_aside(tmp_path, start, whole):
    """The checkpoint may be one that the run is removing at this moment."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "checkpoints/step_000006/state.json").unlink()
    command = start("export", str(run), str(tmp_path / "out"))
    assert command.wait() == 0 and "step_000006 is damaged" in command.text().replace("\n", " ")
    assert (run / "checkpoints/step_000006").is_dir()


def test_forked_child_does_not_hold_its_parents_lock(tmp_path):
    """flock is shared with forked children, and lasts as long as the last of them."""
    lock = RunLock(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"alive")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(reading, 5)
        lock.release()
        RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_run_lock_sees_a_live_holder_on_another_host_without_shared_locks(
    tmp_path, quick, elsewhere, monkeypatch
):
    """As on a file system that keeps locks to the host: there is a record, and it changes."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    elsewhere("host-b")
    other = RunLock(tmp_path)
    elsewhere("host-a")
    said: list[str] = []
    with pytest.raises(RunIsHeld, match="held by process .* on host "):
        RunLock(tmp_path, said.append)
    assert "watching for 60 s whether that process still lives" in said[0]
    other.check()  # its record was left alone
    other.release()
    RunLock(tmp_path).release()


@pytest.mark.slow
def test_run_lock_waits_once_for_a_dead_holder_on_another_host(tmp_path, quick, elsewhere, monkeypatch):
    monkeypatch.setattr(module, "WATCH_SECONDS", 1.0)
    elsewhere("host-b")
    other = RunLock(tmp_path)
    record = (tmp_path / "run.lock").read_bytes()
    other.release()
    (tmp_path / "run.lock").write_bytes(record)  # as if it had been killed
    elsewhere("host-a")
    before = time.monotonic()
    RunLock(tmp_path, lambda text: None).release()
    assert time.monotonic() - before >= 1.0


@pytest.mark.parametrize(
    "number",
    [errno.ENOLCK, *(pytest.param(n, marks=pytest.mark.slow) for n in (errno.ENOSYS, errno.EOPNOTSUPP))],
)
def test_run_lock_works_on_a_file_system_without_locks(tmp_path, quick, monkeypatch, number):
    def no_flock(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    said: list[str] = []
    first = RunLock(tmp_path, said.append)
    assert "has no locks" in said[0]
    with pytest.raises(RunIsHeld):
        RunLock(tmp_path, said.append)
    first.check()
    first.release()
    RunLock(tmp_path, said.append).release()


@pytest.mark.parametrize("how", ["removed", "replaced", "taken over"])
def test_holder_that_lost_the_lock_stops_writing(how, tmp_path):
    lock = RunLock(tmp_path)
    if how == "taken over":
        other = json.loads((tmp_path / "run.lock").read_text()) | {"token": "another", "pid": 7}
        (tmp_path / "run.lock").write_text(json.dumps(other))
    else:
        (tmp_path / "run.lock").unlink()
        if how == "replaced":
            RunLock(tmp_path)
    expected = "taken over by process 7" if how == "taken over" else "removed or replaced"
    with pytest.raises(LockLost, match=expected):
        lock.check()


@pytest.mark.slow
def test_run_with_a_removed_directory_ends_with_the_reason(tmp_path, train):
    def prepare() -> None:
        real = RunDirectory.append_metrics

        def remove(self, record):
            real(self, record)
            if record["step"] == 2:
                shutil.rmtree(self.path)

        RunDirectory.append_metrics = remove

    command = train("run", prepare=prepare)
    assert command.wait() == 1
    assert "run.lock was removed" in command.text() and "Traceback" not in command.text()


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"[" * 100_000, b"{}", b'{"pid": 1}', b"x" * 1_000_000, b"\xff"]
)
def test_run_lock_can_be_taken_whatever_its_file_contains(content, tmp_path):
    (tmp_path / "run.lock").write_bytes(content)
    RunLock(tmp_path).release()


def test_run_lock_record_cannot_inject_into_the_terminal_or_other_files(tmp_path):
    record = vars(Holder.this_process()) | {"command": "\x1b[2J\nerror", "boot": "elsewhere"}
    assert "\x1b" not in str(Holder.parse(json.dumps(record).encode()))
    assert Holder.parse(json.dumps(record | {"pid": "1"}).encode()) is None
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic"):
        RunLock(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "run.lock").unlink()
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(ConfigError, match="not a plain file"):
        RunLock(tmp_path)


@pytest.mark.slow
def test_killed_run_resumes_at_once(tmp_path, train, start, whole):
    command = train("run", prepare=signal_self_in(RunDirectory, "append_metrics", signal.SIGKILL, 4))
    assert command.wait() == -signal.SIGKILL
    assert Holder.parse((tmp_path / "run/run.lock").read_bytes()).pid == command.pid, (
        "a record without a lock"
    )
    again = start("train", "--resume", str(tmp_path / "run"))
    assert again.wait() == 0, again.text()
    assert comparable_metrics(tmp_path / "run") == comparable_metrics(whole)
