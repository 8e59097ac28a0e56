"""A run resumes with the recipe it began with, or not at all."""

import shutil
import subprocess

import pytest

from paceline.config import ConfigError, load_config
from paceline.learning.checkpoint import replace_folder
from paceline.report.run_directory import RunDirectory
from paceline.runs.recipe import check_recipe
from paceline.runs.records import RunRecords


@pytest.fixture
def run(whole, tmp_path) -> RunDirectory:
    shutil.copytree(whole, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def resume(run: RunDirectory) -> None:
    """What `--resume` reads and compares, without the run itself."""
    check_recipe(run, run.checkpoints_path / "step_000006", run.config())


def restore(message: str, run: RunDirectory) -> None:
    """Does what the message says, and sees that it helps."""
    command = message.rpartition("with: ")[2]
    assert command.startswith("cp ")
    subprocess.run(command, shell=True, check=True)
    resume(run)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.9, 0.99])
def test_truncated_recipe_is_refused_and_can_be_restored(run, share):
    content = run.config_path.read_bytes()
    run.config_path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ConfigError, match="cut off|is empty|not readable YAML") as refused:
        resume(run)
    restore(str(refused.value), run)


@pytest.mark.parametrize(
    "section",
    [
        "rollout",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("run", "learning", "report", "checkpoint")),
    ],
)
def test_recipe_that_lost_a_section_is_refused(run, section):
    """Also where the missing keys may change: their defaults were not asked for."""
    lines = run.config_path.read_text().splitlines(keepends=True)
    start = lines.index(f"{section}:\n")
    end = next(i for i, line in enumerate(lines) if i > start and not line.startswith(" "))
    run.config_path.write_text("".join(lines[:start] + lines[end:]))
    with pytest.raises(ConfigError, match=rf"has lost the keys {section}\.") as refused:
        resume(run)
    restore(str(refused.value), run)


def test_edited_recipe_is_refused(run):
    # The learner's, not that of the head that drafts, which lies deeper.
    run.config_path.write_text(run.config_path.read_text().replace("\n  lr: 0.001", "\n  lr: 0.5"))
    with pytest.raises(ConfigError, match=r"learning.lr: 0.001 -> 0.5") as refused:
        resume(run)
    restore(str(refused.value), run)


def test_recipe_with_a_key_of_an_earlier_version_resumes(run):
    """`step_tokens` said 0 in every recipe; a resumed run writes its own without it."""
    saved = run.checkpoints_path / "step_000006" / "config.yaml"
    for path in (run.config_path, saved):
        text = path.read_text()
        path.write_text(text.replace("\n    shape: chain\n", "\n    shape: chain\n    step_tokens: 0\n"))
        assert path.read_text() != text
    resume(run)
    run.write_config(run.config())
    assert "step_tokens" not in run.config_path.read_text()
    resume(run)


def test_recipe_keys_that_may_change_can_be_edited(run):
    run.config_path.write_text(run.config_path.read_text().replace("steps: 6", "steps: 9"))
    resume(run)


def test_train_command_refuses_a_truncated_recipe_in_one_line(run, start):
    content = run.config_path.read_bytes()
    run.config_path.write_bytes(content[: len(content) // 2])
    command = start("train", "--resume", str(run.path))
    assert command.wait() == 2
    (line,) = command.text().splitlines()
    assert line.startswith("error: ") and "was cut off" in line and "Restore it with: cp " in line


def test_removed_key_does_not_count_as_lost(run):
    """A resumed run's recipe is written anew; its checkpoint has the one of the version that saved it."""
    saved = run.checkpoints_path / "step_000006/config.yaml"
    saved.write_text(saved.read_text().replace("policy:\n", "policy:\n  widen: ''\n"))
    resume(run)


def test_runs_of_earlier_versions_still_resume(run):
    """Without the first and last line, and without a copy in the checkpoint."""
    lines = run.config_path.read_text().splitlines(keepends=True)
    run.config_path.write_text("".join(lines[1:-1]))
    resume(run)
    check_recipe(run, None, run.config())
    (run.checkpoints_path / "step_000006/config.yaml").unlink()
    resume(run)


@pytest.mark.parametrize(
    "name", ["../x", "../../x", "/tmp/x", "a/../../x", "..", ".", "a//b", "a/", "x\n", "\x1b[2J", "x\0y"]
)
def test_run_name_cannot_leave_the_root(name):
    with pytest.raises(ConfigError, match="run.name = .*within run.root"):
        load_config(None, [f"run.name={name!r}"] if name.isprintable() else [f'run.name="{_escape(name)}"'])


def _escape(text: str) -> str:
    return text.encode("unicode_escape").decode()


@pytest.mark.parametrize("name", ["a", "sweep/lr-1e-4", "ä b[1]", "..a", "a..b"])
def test_run_name_may_be_any_path_within_the_root(name, tmp_path):
    config = load_config(None, [f"run.name='{name}'", f"run.root={tmp_path}"])
    assert RunDirectory.create(config, "default").path == tmp_path / name


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "metrics.jsonl", "trace.jsonl", "pacing.json", "rewards.log", "schedule.jsonl"],
)
def test_link_in_a_run_directory_is_not_written_through(run, name, start, tmp_path):
    mine = tmp_path / "mine"
    path = run.path / name
    mine.write_bytes(path.read_bytes() if path.exists() else b"mine")
    before = mine.read_bytes()
    path.unlink(missing_ok=True)
    path.symlink_to(mine)
    with pytest.raises(ConfigError, match="is a link to"):
        RunRecords.reopen(run.path, load_config(str(run.config_path)), print)
    assert mine.read_bytes() == before


@pytest.mark.parametrize("name", ["best", ".partial_best", ".old_best", ".partial_step_000007"])
def test_link_among_checkpoints_is_removed_without_its_target(name, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "mine")
    for final in ("best", "step_000007"):
        replace_folder(folder / final, lambda path: path.mkdir())
    assert sorted(path.name for path in folder.iterdir()) == ["best", "step_000007"]
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert (tmp_path / "mine/file").read_text() == "mine"
