"""Examples make an expert of a policy; distillation alone brings the policy to where the expert is."""

import json
import random

import pytest

from benchmarks.make_builtin import demonstration
from paceline.config import load_config
from paceline.loop import train
from paceline.sft.run import fine_tune
from paceline.sft.setup import load_supervised
from paceline.tasks.running_sums import draw_problem
from tests.loop_helpers import comparable_metrics

pytestmark = pytest.mark.slow


def common(folder, name) -> list[str]:
    return [f"run.root={folder}", f"run.name={name}", "run.device=cpu", "run.threads=1"]


def sampled_accuracy(folder, name, *more) -> list[float]:
    """Runs steps on running sums; returns the accuracy of the samples of each."""
    settings = (
        *("learning.lr=3e-4", "learning.warmup_steps=0", "report.closing_pairs=0", "eval.problems=1"),
        *("rollout.prompts_per_step=16", "rollout.samples_per_prompt=8", "rollout.max_tokens=96"),
        *("rollout.speculation.drafters=[]", "checkpoint.every=100"),
    )
    train(load_config(None, [*settings, *common(folder, name), *more]))
    records = comparable_metrics(folder / name)
    return [record["rollout/accuracy"] for record in records if record["kind"] == "train"]


def test_distillation_brings_a_policy_to_the_accuracy_of_an_expert(tmp_path):
    """The built-in policy mostly guesses; examples of careful answers make one that adds up."""
    rng = random.Random(0)
    problems = [draw_problem(rng) for _ in range(640)]
    rows = [{"prompt": p.prompt, "response": demonstration(p, rng, careful=True)} for p in problems]
    (tmp_path / "careful.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = [f"sft.data={tmp_path / 'careful.jsonl'}", "sft.batch_size=32", "sft.lr=1e-3"]
    expert = fine_tune(load_supervised("default", [*sft, *common(tmp_path, "expert")]), "default").policy
    teacher = ("learning.algorithm=distill", f"learning.distill.teacher={expert}")
    found = sampled_accuracy(tmp_path, "distilled", *teacher, "run.steps=6")
    (of_expert,) = sampled_accuracy(tmp_path, "judged", f"policy.path={expert}", "run.steps=1")
    assert found[0] < 0.5 and of_expert > 0.85
    assert sum(found[2:]) / 4 > of_expert - 0.1, "after two updates; 25 steps of RL come as far"
