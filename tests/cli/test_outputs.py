"""Where commands write: refused before the work where it cannot be, with option, path and the way out."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.bench import _write_text
from paceline.cli.certify import _conclude
from paceline.cli.saving import OutputFile, refuse_unwritable_folder
from paceline.config import ConfigError
from paceline.files import replace_file
from paceline.report.run_directory import RunDirectory
from tests.loop_helpers import tiny_overrides
from tests.report.made_run import make_run

# As root everything can be written but these: nothing can be made in /proc, nor below a file.
UNWRITABLE = ["/proc/x", "file/x"]


@pytest.fixture
def no_work(monkeypatch, tmp_path):
    """Fails where training or generating begins; makes `file`."""
    begun = (
        "session.open_session",
        "cli.export.load_policy",
    )
    for work in begun:
        monkeypatch.setattr(f"paceline.{work}", lambda *_, **__: pytest.fail("work was begun"))
    (tmp_path / "file").write_text("")


@pytest.mark.parametrize("out", UNWRITABLE)
@pytest.mark.parametrize(
    "name, command",
    [
        ("--out", ["drafter", "train", "builtin", "--out", "OUT"]),
        ("OUT", ["drafter", "export", "builtin-eagle", "OUT"]),
        ("OUT", ["export", "POLICY", "OUT"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_unwritable_folder_is_refused_before_the_work(name, command, out, policy, no_work, refused, tmp_path):
    before = sorted(tmp_path.iterdir())
    places = {"OUT": out, "POLICY": str(policy)}
    message = refused(*(places.get(argument, argument) for argument in command))
    assert f"error: {name} {out}: " in message and "choose a folder" in message and "Errno" not in message
    assert sorted(tmp_path.iterdir()) == before


def test_refuse_unwritable_folder_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "a/b/c", Path("a/b"), Path("a/../b"), Path(), tmp_path):
        refuse_unwritable_folder("--out", folder)
    with pytest.raises(ConfigError, match="File name too long; choose a folder"):
        refuse_unwritable_folder("--out", tmp_path / "a" / ("x" * 300))
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("kept")
    refuse_unwritable_folder("--out", tmp_path / "used")
    assert [path.name for path in tmp_path.rglob("*")] == ["used", "file"]


def test_refuse_unwritable_file_leaves_nothing_behind(tmp_path):
    OutputFile("--json", tmp_path / "new.json").refuse_unwritable()
    OutputFile("--json", Path("/dev/stdout")).refuse_unwritable()
    (tmp_path / "old.json").write_text("kept")
    OutputFile("--json", tmp_path / "old.json").refuse_unwritable()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    "path, why",
    [
        ("nowhere/x.json", "there is no folder nowhere"),
        (".", "is a folder"),
        ("file/x.json", "there is no folder file"),
        ("/proc/x.json", "cannot be written: No such file or directory"),
    ],
)
def test_unwritable_file_is_named_with_its_option(path, why, tmp_path, refused):
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "file").write_text("")
    message = refused("report", "run", "--out", path)
    assert f"error: --out {path}: {why}; choose another file" in message
    assert ".tmp" not in message and not list(tmp_path.glob("*.tmp"))


def test_report_names_a_page_that_is_a_folder(tmp_path, refused):
    (make_run(tmp_path / "run", steps=1) / "report.html").mkdir()
    assert "error: run/report.html: is a folder; name another file with --out" in refused("report", "run")


def test_report_refuses_to_replace_a_device(tmp_path, refused):
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "device").symlink_to("/dev/null")
    assert "--out device: is not a plain file; choose" in refused("report", "run", "--out", "device")
    assert (tmp_path / "device").is_symlink()


def test_writing_names_the_option_of_a_file_that_fails(tmp_path):
    page = OutputFile("--out", tmp_path / "page.html")
    full = r"--out \S*page.html: cannot be written: No space left"
    with pytest.raises(ConfigError, match=full), page.writing():
        raise OSError(28, "No space left on device", str(page.path))
    with pytest.raises(FileNotFoundError), page.writing():
        (tmp_path / "another").read_text()


@pytest.mark.parametrize("write", ["certificate", "plot", "evaluation"])
def test_writing_to_a_full_disk_names_the_path(write, tmp_path):
    full = Path("/dev/full")
    certificate = SimpleNamespace(table=lambda: "", json=lambda: "{}", passed=True)
    (tmp_path / "evaluations.jsonl").symlink_to(full)
    writes = {
        "certificate": (lambda: _conclude(certificate, full), "--json /dev/full"),
        "plot": (lambda: _write_text("--plot", full, "<svg/>"), "--plot /dev/full"),
        "evaluation": (lambda: RunDirectory(tmp_path).append_evaluation({}), "evaluations.jsonl"),
    }
    begin, named = writes[write]
    with pytest.raises((ConfigError, OSError), match="No space left") as raised:
        begin()
    assert named in str(raised.value)


@pytest.mark.parametrize("path", ["nowhere/x", "folder"])
def test_replace_file_names_the_path_it_could_not_replace(path, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as failed:
        replace_file(tmp_path / path, "text")
    assert failed.value.filename == str(tmp_path / path) and ".tmp" not in str(failed.value)
    assert failed.type in (FileNotFoundError, IsADirectoryError)


@pytest.mark.parametrize("folder", ["run", "run/samples", "run/new"])
def test_rollout_save_refuses_a_run_directory(folder, policy, no_work, refused, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    (run / "samples/step_000001.jsonl").unlink()
    before = sorted(run.rglob("*"))
    message = refused("rollout", *tiny_overrides(policy, tmp_path, "unused"), "--save", folder)
    assert f"error: --save {folder}: {run} is a run directory" in message
    assert "choose a folder outside it" in message and sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "rollout", "--json"],
        ["bench", "step", "--json"],
        ["bench", "step", "--plot"],
        ["bench", "learn", "--json"],
        ["certify", "--json"],
    ],
)
def test_unwritable_file_is_refused_before_measuring(command, monkeypatch, refused):
    for work in ("device.best_device", "bench.step.measure_cells", "certify.run.certify_parts"):
        monkeypatch.setattr(f"paceline.{work}", lambda *_, **__: pytest.fail("it would measure"))
    message = refused(*command, "/nonexistent/x")
    assert f"{command[-1]} /nonexistent/x: there is no folder /nonexistent; choose another file" in message


def test_checkpoint_given_as_a_policy_is_refused_with_its_policys_path(policy, tmp_path, refused):
    (tmp_path / "step_000004").mkdir()
    (tmp_path / "step_000004/policy").symlink_to(policy)
    message = refused("rollout", "policy.path=step_000004")
    assert "step_000004 is a checkpoint of a run; its policy is step_000004/policy" in message
