"""A full disk, wherever it strikes: the path, the room and the way on are named, and nothing is left over."""

import ctypes
import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.learning import checkpoint
from paceline.learning.checkpoint import list_checkpoints, tidy
from paceline.report.run_directory import RunDirectory
from paceline.runs.disk import resume_command, writing
from tests.loop_helpers import comparable_metrics

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000


def limit_file_size(count: int):
    """Returns a `prepare` after which no file can grow beyond `count` bytes: EFBIG, without being root."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))


def enter_namespace() -> None:
    """Lets this process mount what only it sees."""
    user, group = os.getuid(), os.getgid()
    assert ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [60_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (200, 1_500, 2_500, 4_000, 20_000))],
)
def test_full_disk_is_explained_where_files_cannot_grow(size, whole, train, start, tmp_path):
    """Fails at other files for each size: the recipe, the metrics, the samples, the weights, the moments."""
    command = train("run", prepare=limit_file_size(size))
    code = command.wait()
    text = command.text()
    run = tmp_path / "run"
    if not run.exists():
        assert code == 2 and "File too large" in text and "choose a folder that can be written to" in text
        return
    assert code == 1 and "Traceback" not in text, text
    assert "could not be written to" in text and "are free. Make room" in text
    assert text.endswith(f"with: paceline train --resume {run}\n"), text
    assert not [path for path in run.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]
    again = start("train", "--resume", str(run))
    assert again.wait() == 0, again.text()
    assert comparable_metrics(run) == comparable_metrics(whole)


def test_full_disk_message_names_the_room_a_checkpoint_needs(train, tmp_path):
    def fill_the_disk() -> None:
        checkpoint.save_tensors = no_space

    command = train("run", "checkpoint.every=4", prepare=fill_the_disk)
    assert command.wait() == 1
    text = command.text()
    assert f"the checkpoint of step 4 could not be written to {tmp_path}/run/checkpoints: [Errno 28]" in text
    assert "It needs 2" in text and " kB there; " in text and "lower checkpoint.keep" in text
    assert "continue from the beginning (there is no checkpoint yet)" in text


def test_full_disk_in_the_middle_of_a_line_leaves_a_resumable_run(whole, train, start, tmp_path):
    """Half a record of metrics is on the disk when it is full; it costs that step, and says so."""

    def prepare() -> None:
        real = RunDirectory.append_metrics

        def append(self, record):
            if record["step"] == 4:
                with self.metrics_path.open("a") as file:
                    file.write('{"step": 4, "kind": "tra')
                no_space()
            real(self, record)

        RunDirectory.append_metrics = append

    command = train("run", prepare=prepare)
    assert command.wait() == 1
    assert "the metrics could not be written to" in command.text()
    assert "continue from step_000002 with" in command.text()
    again = start("train", "--resume", str(tmp_path / "run"))
    assert again.wait() == 0, again.text()
    assert comparable_metrics(tmp_path / "run") == comparable_metrics(whole)


def test_resume_on_a_full_disk_is_refused_with_the_way_out(whole, start, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "checkpoints/step_000006/state.json").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    command = start("train", "--resume", str(run), prepare=limit_file_size(1_000))
    assert command.wait() == 1 and "Make room" in command.text() and "Traceback" not in command.text()
    assert (run / "metrics.jsonl").read_bytes() == before and not (run / "metrics.jsonl.tmp").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a mount of its own")
def test_full_disk_of_640_kb_leaves_a_resumable_run(start, policy, tmp_path):
    """A file system of 640 kB in a namespace of its own; it grows, and the run continues."""
    disk = tmp_path / "disk"
    disk.mkdir()
    probe = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", str(disk)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")

    def prepare() -> None:
        enter_namespace()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "none", str(disk)], check=True)
        try:
            main()
        except SystemExit as end:
            print(f"ended with {end.code}")
        left = sorted(path.name for path in (disk / "run/checkpoints").iterdir())
        print(f"left: {left}")
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        sys.argv = ["paceline", "train", "--resume", str(disk / "run")]

    command = start(
        *["train", f"policy.path={policy}", f"run.root={disk}", "run.name=run", "run.steps=4"],
        *["checkpoint.every=1", "checkpoint.keep=5", "task.eval_problems=2", "rollout.max_tokens=4"],
        *["eval.max_tokens=4", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"],
        prepare=prepare,
    )
    assert command.wait() == 0, command.text()
    text = command.text()
    assert "ended with 1" in text and "No space left on device" in text and "resuming" in text
    # What could not be written is named in the message, and gone from the disk.
    left = next(line for line in text.splitlines() if line.startswith("left:"))
    assert "step_000001" in left and ".partial" not in left


def test_writing_explains_only_errors_of_the_file_system(tmp_path):
    from safetensors import SafetensorError

    from paceline.learning.sentinel import TrainingFailed

    with pytest.raises(SafetensorError), writing(tmp_path, "x", tmp_path):
        raise SafetensorError("a tensor of another kind")
    with pytest.raises(TrainingFailed, match="Make room"), writing(tmp_path, "x", tmp_path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    with (
        pytest.raises(TrainingFailed, match="Put that right, then continue"),
        writing(tmp_path, "x", tmp_path),
    ):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_resume_command_is_quoted_for_a_shell():
    assert resume_command(Path("runs/a b[1]")) == "paceline train --resume 'runs/a b[1]'"


@pytest.mark.parametrize("moment", ["old aside", "new in place", "new lost", "writing"])
def test_replaced_folder_is_whole_after_any_kill(moment, tmp_path):
    """A folder that is replaced is there after any kill: the old one, or the new one once it is whole."""

    def make(name: str, content: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(content)

    if moment in ("old aside", "new lost"):
        make(".old_best", "old")
    if moment in ("old aside", "writing"):
        make(".partial_best", "new")
    if moment == "new in place":
        make(".old_best", "old")
        make("best", "new")
    if moment == "writing":
        make("best", "old")
    make(".removed_step_000002", "old")
    tidy(tmp_path)
    expected = {"old aside": "new", "new in place": "new", "new lost": "old", "writing": "old"}[moment]
    assert (tmp_path / "best/file").read_text() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_checkpoints_are_only_folders_that_a_run_wrote(tmp_path):
    """A copy made by hand is neither resumed from nor removed."""
    for name in (
        "step_000002",
        "step_000010",
        "step_1000000",
        "step_000010_copy",
        "step_x",
        "step_000003.corrupt",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000011").write_text("a file")
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step_000002",
        "step_000010",
        "step_1000000",
    ]
