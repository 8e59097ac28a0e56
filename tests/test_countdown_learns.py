"""The small Countdown policy, warmed up on written-out searches: RL raises its accuracy, the tail stays."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LENGTHS = Path(__file__).parents[1] / "benchmarks/lengths.py"


def lengths_module():
    spec = importlib.util.spec_from_file_location("lengths", LENGTHS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("countdown")
    overrides = [
        f"run.root={root}",
        "run.name=run",
        "run.steps=20",
        "task.eval_problems=400",
        "report.samples_per_step=16",
        "report.closing_pairs=0",
    ]
    output = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "countdown-small", *overrides],
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert output.returncode == 0, output.stderr
    print(output.stdout)
    return root / "run"


@pytest.mark.slow
def test_countdown_policy_learns_to_search_longer(run):
    """Half of the searches that it was shown gave up: 20 steps gave 12 points with each of two seeds."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = (r for r in records if r["kind"] == "eval")
    assert before["eval/problems"] == 400
    assert after["eval/accuracy"] >= before["eval/accuracy"] + 0.05
    assert after["eval/length_mean"] > 1.2 * before["eval/length_mean"]
    steps = [r for r in records if r["kind"] == "train"]
    early, late = (sum(r["rollout/accuracy"] for r in part) / 5 for part in (steps[:5], steps[-5:]))
    assert late > early


@pytest.mark.slow
def test_countdown_response_lengths_are_log_normal_with_a_long_tail(run):
    """Before RL and after it: wide logarithms, little skew, most decode steps with few requests running."""
    lengths = lengths_module()
    steps = lengths.read_steps(run / "samples")
    assert len(steps) == 20 and all(len(step) == 128 for step in steps)
    for part in (steps[:4], steps[-4:]):
        deviation, skew = lengths.shape_of([length for step in part for length in step])
        assert deviation > 0.6
        assert abs(skew) < 1.0
        assert sum(lengths.tail_of(step) for step in part) / len(part) > 0.35
