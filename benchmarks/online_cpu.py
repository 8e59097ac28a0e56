"""The built-in run with a head that learns, on a CPU: accept length, decode steps and CPU seconds.

    python benchmarks/online_cpu.py OUT states [STEPS]   policy before the update as teacher, against after it
    python benchmarks/online_cpu.py OUT fresh [STEPS]    a fresh head at k = 5, by step
    python benchmarks/online_cpu.py OUT auto [STEPS]     `auto` against `never`, the shipped head, three seeds

Overrides of the recipe may follow STEPS. Times are CPU seconds of the process: other work on the machine does
not count.
"""

import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from paceline.config import load_config
from paceline.drafting.examples import Example, passages
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.training import compare_rows
from paceline.loop import Trainer
from paceline.report.console import Console

# Passages of a rollout that heads are judged along.
JUDGED_PASSAGES = 32

COMMON = [
    "run.device=cpu",
    "run.threads=1",
    "eval.every=0",
    "report.closing_pairs=0",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.tokens=5",
]


def run(out: Path, name: str, *overrides: str) -> dict:
    """Makes the steps of a run, and says what came of them."""
    config = load_config("default", [*COMMON, f"run.root={out}", f"run.name={name}", *overrides])
    trainer = Trainer(config, "default", None, None, Console(quiet=True))
    began = time.process_time()
    trainer.run_steps()
    lines = (out / name / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    result = {
        "name": name,
        "cpu_seconds": time.process_time() - began,
        "accept_length": [round(step["speculation/eagle/accept_length"], 3) for step in steps],
        "decode_steps": sum(step["rollout/decode_steps"] for step in steps),
        "updates": sum(step.get("drafter/updates", 0) for step in steps),
        "displaced": sum(step.get("time/drafter_displaced", 0.0) for step in steps),
    }
    print(json.dumps(result), flush=True)
    return result


def take_turns(out: Path, steps: int, seed: int) -> dict[str, float]:
    """Returns CPU seconds of a run with `never` and one with `auto`, whose steps take turns.

    A core under contention needs up to 5% more CPU time for the same work, for minutes; this way it falls
    on both. Each is first in every other step.
    """
    seconds = {"never": 0.0, "auto": 0.0}
    with ExitStack() as opened:
        trainers = {}
        for when in seconds:
            keys = f"run.seed={seed}", f"run.steps={steps}", f"rollout.speculation.online.when={when}"
            names = f"run.root={out}", f"run.name={when}-{seed}"
            config = load_config("default", [*COMMON, *names, *keys])
            trainers[when] = Trainer(config, "default", None, None, Console(quiet=True))
            opened.enter_context(trainers[when]._opened)
            trainers[when]._hand_over_weights()
        for step in range(1, steps + 1):
            for when in sorted(seconds, reverse=step % 2 == 0):
                began = time.process_time()
                trainers[when].step_number = step
                trainers[when].step()
                seconds[when] += time.process_time() - began
    return seconds


def states(out: Path, steps: int) -> None:
    """Two heads in one run: one learns from the learner's states, one from a pass after the update.

    Each is judged along the next step's responses, before it has seen them: what it would have drafted in
    that rollout. The policy is the same for both, since drafts do not change it.
    """
    keys = [f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=3", "tokens=2048")]
    config = load_config(
        "default", [*COMMON, f"run.root={out}", "run.name=states", f"run.steps={steps}", *keys]
    )
    trainer = Trainer(config, "default", None, None, Console(quiet=True))
    drafter = trainer.drafter
    before = drafter.online
    after = OnlineDrafter(trainer.session.policy, before.head, before.config, before.seed, print)
    follow, judged = drafter.follow, []

    def follow_both(step: int, seconds: float) -> dict[str, float]:
        texts = [text for text in before.texts.chosen if text.tokens in before.texts.tap.found]
        new = [Example(text, step, step - 1, before.texts.tap.found[text.tokens]) for text in texts]
        chosen = [passage for example in new for passage in passages(example, 64)][:JUDGED_PASSAGES]
        judged.append([_overlap(online, chosen) for online in (before, after)])
        print(step, [round(value, 4) for value in judged[-1]], flush=True)
        after.texts.chosen = before.texts.chosen
        after.follow(step, {})
        return follow(step, seconds)

    drafter.follow = follow_both
    trainer.run_steps()
    for name, values in zip(("before", "after"), zip(*judged[1:], strict=True), strict=True):
        print(f"taught by the policy {name} the update: mean overlap {statistics.mean(values):.4f}")
    differences = [a - b for b, a in judged[1:]]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    print(f"after - before: {statistics.mean(differences):+.4f}, standard error {error:.4f}")


def _overlap(online: OnlineDrafter, chosen: list) -> float:
    """The mean overlap of a head's first drafted tokens with the policy."""
    learning = online.learning
    sums = [compare_rows(online.policy, online.head, *learning.inputs([passage])) for passage in chosen]
    return sum(total for total, _ in sums) / sum(tokens for _, tokens in sums)


def fresh(out: Path, steps: int) -> None:
    """A fresh head that learns always."""
    keys = [f"rollout.speculation.online.{key}" for key in ("when=always", "lr=3e-3", "unroll=5")]
    run(out, "fresh", f"run.steps={steps}", "rollout.speculation.eagle_path=fresh", *keys)


def auto(out: Path, steps: int) -> None:
    """Paired CPU seconds of `auto` and `never`."""
    take_turns(out / "warm_up", 1, seed=0)  # what a process does once is nobody's
    ratios = []
    for seed in range(3):
        seconds = take_turns(out, steps, seed)
        ratios.append(seconds["auto"] / seconds["never"])
        print(json.dumps({"seed": seed, "cpu_seconds": seconds, "ratio": round(ratios[-1], 4)}), flush=True)
    shown = [round(ratio, 4) for ratio in ratios]
    print(f"CPU seconds of auto over never: {shown}, median {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    folder, what, *more = sys.argv[1:]
    COMMON.extend(more[1:])
    {"states": states, "fresh": fresh, "auto": auto}[what](Path(folder), int(more[0]) if more else 25)
