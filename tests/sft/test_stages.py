"""Stages of training: examples and then RL from fresh weights; distillation from what examples made."""

import json
import random

import pytest

from benchmarks.make_builtin import demonstration
from paceline.config import load_config
from paceline.loop import train
from paceline.sft.run import fine_tune
from paceline.sft.setup import load_supervised
from paceline.tasks.running_sums import draw_problem
from tests.loop_helpers import comparable_metrics, make_tiny_policy

pytestmark = pytest.mark.slow


def common(folder, name) -> list[str]:
    return [f"run.root={folder}", f"run.name={name}", "run.device=cpu", "run.threads=1"]


def sampled_accuracy(folder, name, *settings) -> list[float]:
    """Runs RL without speculation; returns the accuracy of the samples of each step."""
    shared = (
        *("learning.warmup_steps=0", "report.closing_pairs=0", "eval.problems=1", "checkpoint.every=100"),
        *("rollout.speculation.drafters=[]", "rollout.samples_per_prompt=8"),
    )
    train(load_config(None, [*shared, *common(folder, name), *settings]))
    records = comparable_metrics(folder / name)
    return [record["rollout/accuracy"] for record in records if record["kind"] == "train"]


def run_on_sums(folder, name, *more) -> list[float]:
    settings = ("learning.lr=3e-4", "rollout.prompts_per_step=16", "rollout.max_tokens=96")
    return sampled_accuracy(folder, name, *settings, *more)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_policy_from_fresh_weights_and_examples_is_one_that_rl_improves(tmp_path):
    """Half of the examples give up: RL finds out that answering pays."""
    asked = [(f"{letter}{digit}=", str(digit)) for letter in "abcdef" for digit in range(10)]
    rows = [{"prompt": prompt, "response": text} for prompt, d in asked for text in (f"#{d}", "/")]
    examples = write_rows(tmp_path / "examples.jsonl", rows)
    problems = write_rows(tmp_path / "problems.jsonl", [{"prompt": p, "answer": d} for p, d in asked])
    fresh = make_tiny_policy(tmp_path / "fresh")
    sft = [f"policy.path={fresh}", f"sft.data={examples}", "sft.epochs=22", "sft.batch_size=8"]
    sft += ["sft.lr=1e-2", "sft.held_out_share=0", *common(tmp_path, "sft")]
    start = fine_tune(load_supervised("default", sft), "default").policy
    found = sampled_accuracy(
        *(tmp_path, "rl", f"policy.path={start}", "learning.lr=5e-3", "run.steps=8"),
        *("rollout.prompts_per_step=30", "rollout.max_tokens=6", "task.name=file", "task.extract='#(.*)'"),
        *("task.rewards=[{function: exact}]", f"task.data.path={problems}"),
    )
    assert 0.3 < found[0] < 0.7, "examples alone"
    assert found[-1] > found[0] + 0.2


def test_distillation_brings_a_policy_to_the_accuracy_of_an_expert(tmp_path):
    """The built-in policy mostly guesses; examples of careful answers make one that adds up."""
    rng = random.Random(0)
    problems = [draw_problem(rng) for _ in range(640)]
    rows = [{"prompt": p.prompt, "response": demonstration(p, rng, careful=True)} for p in problems]
    careful = write_rows(tmp_path / "careful.jsonl", rows)
    sft = [f"sft.data={careful}", "sft.batch_size=32", "sft.lr=1e-3"]
    expert = fine_tune(load_supervised("default", [*sft, *common(tmp_path, "expert")]), "default").policy
    teacher = ("learning.algorithm=distill", f"learning.distill.teacher={expert}")
    found = run_on_sums(tmp_path, "distilled", *teacher, "run.steps=6")
    (of_expert,) = run_on_sums(tmp_path, "judged", f"policy.path={expert}", "run.steps=1")
    assert found[0] < 0.5 and of_expert > 0.85
    assert sum(found[2:]) / 4 > of_expert - 0.1, "after two updates; 25 steps of RL come as far"
