"""Every example runs as written, with fewer steps and smaller batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))
SMALL = (
    "run.steps=1",
    "run.device=cpu",
    "run.threads=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "eval.problems=8",
    "report.samples_per_step=4",
)


def run(tmp_path: Path, *command: str) -> str:
    """Runs Python from the repository's root, as the examples say, and returns what it printed."""
    arguments = [sys.executable, *command, f"run.root={tmp_path}", *SMALL]
    result = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def trained(tmp_path: Path, pattern: str) -> list[dict]:
    """Returns the training records of the one run whose folder fits the pattern."""
    (metrics,) = tmp_path.glob(f"{pattern}/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


def test_examples_readme_lists_every_example():
    listed = (ROOT / "examples" / "README.md").read_text()
    for path in (ROOT / "examples").glob("[!_]*"):
        link = f"]({path.name}/" if path.is_dir() else f"]({path.name})"
        assert path.name == "README.md" or link in listed, f"{path.name} is not listed"


@pytest.mark.parametrize("name", [pytest.param(RECIPES[0], marks=pytest.mark.ci), *RECIPES[1:]])
@pytest.mark.slow
def test_example_recipe_trains_as_written(name, tmp_path):
    run(tmp_path, "-m", "paceline", "train", f"examples/{name}.yaml")
    (record,) = trained(tmp_path, f"{name}-*")
    assert record["rollout/samples"] == 16
    assert record["reward/failures"] == 0
    if name == "reward_function":
        assert 0 < record["reward/brevity"] < 1
        assert record["reward/mean"] == pytest.approx(
            record["reward/correct"] + 0.1 * record["reward/brevity"]
        )
    if name == "tool_with_turns":
        (samples,) = tmp_path.glob("*/samples/*.jsonl")
        groups = [json.loads(line) for line in samples.read_text().splitlines()]
        segments = [s for group in groups for sample in group["samples"] for s in sample["segments"]]
        assert any(not segment["sampled"] for segment in segments), "the tool answered at least once"


@pytest.mark.slow
def test_train_in_python_example_trains_and_prints_accuracy(tmp_path):
    printed = run(tmp_path, "examples/train_in_python.py")
    assert "held-out accuracy: " in printed
    assert len(trained(tmp_path, "default-*")) == 1


@pytest.mark.slow
def test_tour_example_gives_identical_runs(tmp_path):
    assert "were identical" in run(tmp_path, "examples/tour.py")
    assert len(list(tmp_path.glob("*/metrics.jsonl"))) == 2
