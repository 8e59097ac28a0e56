"""`paceline train countdown-small`: RL improves the shipped policy, and its responses keep their tail."""

import json
import os
import subprocess
import sys

import pytest

from paceline.config import load_config
from paceline.learning.warmup import FRESH_LAYERS, FRESH_POSITIONS
from paceline.models.source import policy_folder
from paceline.policy.config import read_config
from paceline.policy.tokenizer import load_tokenizer
from paceline.tasks.make import task_alphabet

STEPS = 12


def test_the_shipped_policy_is_what_its_recipe_needs():
    config = load_config("countdown-small")
    folder = policy_folder(config.policy.path)
    shape = read_config(folder)
    assert shape.num_layers == FRESH_LAYERS and shape.max_positions == FRESH_POSITIONS
    assert set(task_alphabet(config.task)) < set(load_tokenizer(folder).get_vocab())
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000


@pytest.mark.slow
def test_it_improves_under_rl_and_keeps_its_long_tail(tmp_path):
    command = [sys.executable, "-m", "paceline", "train", "countdown-small"]
    command += [f"run.steps={STEPS}", f"run.root={tmp_path}", "run.name=run", "run.device=cpu"]
    output = subprocess.run(
        command, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, timeout=900
    )
    assert output.returncode == 0, output.stderr
    print(output.stdout)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    before, *_, after = [r for r in records if r["kind"] == "eval"]
    steps = [r for r in records if r["kind"] == "train"]
    assert 0.3 <= before["eval/accuracy"] <= 0.8
    assert after["eval/accuracy"] >= before["eval/accuracy"] + 0.1
    for step in steps:
        assert step["rollout/length_max"] > 2.5 * step["rollout/length_mean"]
        assert step["policy/largest_logprob_delta"] < 1e-3, "rollout and learner agree on every token"
    tail = sum(r["rollout/tail_steps"] * r["rollout/decode_steps"] for r in steps)
    assert tail > 0.4 * sum(r["rollout/decode_steps"] for r in steps), "plain decoding's steps, mostly tail"
