"""What a run tells people: paths as they are, a note where nothing can be learned, intervals with a width."""

import io

import pytest
import rich.console

from paceline.config import load_config, signal_notes
from paceline.report.console import Console
from paceline.report.summary import EvalPoint, Summary


def notes(*overrides: str) -> list[str]:
    config = load_config(None, list(overrides))
    return signal_notes(config.rollout, config.learning)


def test_signal_notes_name_settings_without_a_signal():
    assert notes() == []
    (cold,) = notes("rollout.temperature=0")
    assert "rollout.temperature = 0" in cold and "no update is made" in cold
    (alone,) = notes("rollout.samples_per_prompt=1", "learning.algorithm=gspo")
    assert "rollout.samples_per_prompt = 1" in alone and "learning.algorithm=reinforce++" in alone
    assert notes("rollout.samples_per_prompt=1", "learning.algorithm=reinforce++") == []


def test_train_command_prints_signal_notes_at_its_start(train):
    command = train("run", "rollout.samples_per_prompt=1", "run.steps=1")
    assert command.wait() == 0
    text = " ".join(command.text().split())
    assert "rollout.samples_per_prompt = 1: learning.algorithm = 'grpo' compares the samples" in text
    assert "no signal: every group scored alike" in text


@pytest.mark.parametrize("name", ["a[b]", "[bold]x[/]", "[/]", ":bug:", "a b", "x" * 120])
def test_console_prints_paths_verbatim(name, tmp_path):
    run = tmp_path / name
    point = EvalPoint(3, 1.0, 0.9, 1.0, 5.0, 8, 1.0)
    console = Console()
    console.out = rich.console.Console(file=io.StringIO(), highlight=False, emoji=False, width=80)
    console.start_of_run("builtin", "running-sums", "cpu", run)
    console.resumed(run, 3)
    console.summary(Summary(run, 6, 100, point, point, point, 100, 0, {"rollout": 1.0}))
    text = console.out.file.getvalue()
    assert text.count(str(run)) == 4 and "100.0% [90.0, 100.0]" in text


def test_resume_command_prints_brackets_verbatim(start, policy, tmp_path):
    from paceline.report.run_directory import RunDirectory
    from tests.loop_helpers import tiny_overrides
    from tests.runs.conftest import SMALL, signal_self_in

    command = start(
        *["train", *tiny_overrides(policy, tmp_path, "'a[b] [/]'"), *SMALL],
        prepare=signal_self_in(RunDirectory, "append_metrics", at_call=2),
    )
    assert command.wait() == 75, command.text()
    assert f"continue with: paceline train --resume '{tmp_path}/a[b] [/]'\n" in command.text()
