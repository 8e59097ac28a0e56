"""`paceline train` as a newcomer runs it: three seeds, the worst one counts."""

import json
import os
import subprocess
import sys
import time

import pytest

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module", params=SEEDS)
def run(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(f"seed{request.param}")
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        f"run.seed={request.param}",
        f"run.root={root}",
        "run.name=run",
    ]
    start = time.monotonic()
    output = subprocess.run(
        command, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, timeout=3600
    )
    assert output.returncode == 0, output.stderr
    print(output.stdout, f"{time.monotonic() - start:.0f} s in all")
    records = [json.loads(line) for line in (root / "run/metrics.jsonl").read_text().splitlines()]
    return records, output.stdout


@pytest.mark.slow
def test_default_recipe_raises_accuracy_and_response_lengths(run):
    records, output = run
    evaluations = [r for r in records if r["kind"] == "eval"]
    steps = [r for r in records if r["kind"] == "train"]
    before, after = evaluations[0], evaluations[-1]
    assert before["eval/problems"] >= 512
    assert 0.30 <= before["eval/accuracy"] <= 0.45
    assert after["eval/accuracy"] >= 0.80
    assert after["eval/length_mean"] > 2 * before["eval/length_mean"]
    assert max(r["rollout/length_max"] for r in steps) > 150
    assert all(r["policy/largest_logprob_delta"] < 1e-3 for r in steps), (
        "rollout and learner agree on every token"
    )
    assert "held-out accuracy" in output and "run directory" in output


@pytest.mark.slow
def test_default_recipe_rollout_has_a_long_tail(run):
    """Plain decoding would spend most of its steps on at most an eighth of the samples: what speculation is
    for.

    A plain rollout takes as many steps as its longest response has tokens. Speculation shortens only the
    tail, so the steps outside it are the same.
    """
    records, _ = run
    late = [r for r in records if r["kind"] == "train"][10:]
    busy = sum((1 - r["rollout/tail_steps"]) * r["rollout/decode_steps"] for r in late)
    assert 1 - busy / sum(r["rollout/length_max"] for r in late) > 0.5
    assert sum(r["rollout/decode_steps"] for r in late) <= sum(r["rollout/length_max"] for r in late), (
        "speculation never adds steps"
    )
