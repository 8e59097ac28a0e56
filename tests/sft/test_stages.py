"""From fresh weights to a trained policy in stages: examples, then RL, then distillation into the start."""

import json
import random

import pytest

from paceline.config import load_config
from paceline.loop import train
from paceline.sft.run import fine_tune
from paceline.sft.setup import load_supervised
from tests.loop_helpers import make_tiny_policy

pytestmark = pytest.mark.slow

# The answer is the digit in the prompt; half of the first stage's examples have another one.
PROMPTS = [(f"{letter}{digit}=", str(digit)) for letter in "abcdefghijkl" for digit in range(10)]


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Runs examples and RL; returns the folder, and what each evaluation of RL found."""
    folder = tmp_path_factory.mktemp("stages")
    rng = random.Random(0)
    fresh = make_tiny_policy(folder / "fresh")
    examples = [
        {"prompt": prompt, "response": f"#{answer if rng.random() < 0.5 else rng.randrange(10)}"}
        for prompt, answer in PROMPTS * 3
    ]
    problems = [{"prompt": prompt, "answer": answer} for prompt, answer in PROMPTS]
    for name, rows in (("examples", examples), ("problems", problems)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"policy.path={fresh}", f"sft.data={folder / 'examples.jsonl'}", "sft.epochs=8", "sft.lr=1e-2")
    sft = [*given, "sft.batch_size=24", *common(folder, "sft")]
    fine_tune(load_supervised("default", sft), "default")
    return folder, reinforce(folder, "rl", "learning.algorithm=grpo")


def common(folder, name) -> list[str]:
    return [f"run.root={folder}", f"run.name={name}", "run.device=cpu", "run.threads=1"]


def reinforce(folder, name, *more) -> list[float]:
    settings = (
        *("run.steps=12", "learning.lr=3e-3", "learning.warmup_steps=0", "report.closing_pairs=0"),
        *("rollout.prompts_per_step=16", "rollout.samples_per_prompt=8", "rollout.max_tokens=6"),
        *("eval.samples=8", "rollout.speculation.drafters=[]", "task.name=file", "task.extract='#(.*)'"),
        *("task.rewards=[{function: exact}]", f"task.data.path={folder / 'problems.jsonl'}"),
        *(f"policy.path={folder / 'sft/checkpoints/best'}", "task.data.held_out_share=0.3"),
    )
    run = train(load_config(None, [*settings, *common(folder, name), *more])).summary
    return [run.before.accuracy, run.after.accuracy]


def test_policy_from_examples_is_one_that_rl_improves(stages):
    _, (before, after) = stages
    assert 0.3 < before < 0.8, "half of the examples are right"
    assert after > before + 0.15


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_distillation_brings_the_start_to_the_experts_accuracy(stages, kl):
    """With a third of RL's steps, and no reward."""
    folder, (before, expert) = stages
    teacher = f"learning.distill.teacher={folder / 'rl/checkpoints/best'}"
    kind = ("learning.algorithm=distill", teacher, f"learning.distill.kl={kl}", "run.steps=4")
    start, found = reinforce(folder, f"distilled-{kl}", *kind)
    assert start == before
    assert found > expert - 0.05 and found > before + 0.1
