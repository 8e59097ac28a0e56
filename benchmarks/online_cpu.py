"""The built-in run with a head that learns, on a CPU: accept length, decode steps and CPU seconds.

    python benchmarks/online_cpu.py OUT states [STEPS]   policy before the update as teacher, against after it
    python benchmarks/online_cpu.py OUT fresh [STEPS]    a fresh head at k = 5, by step
    python benchmarks/online_cpu.py OUT auto [STEPS]     `auto` against `never`, the shipped head, three seeds

CPU time of the process, not the clock's: other work on the machine does not count.
"""

import json
import statistics
import sys
import time
from pathlib import Path

from paceline.config import load_config
from paceline.loop import Trainer
from paceline.report.console import Console

COMMON = [
    "run.device=cpu",
    "run.threads=1",
    "eval.every=0",
    "report.closing_pairs=0",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.tokens=5",
]


def run(out: Path, name: str, *overrides: str, own_pass: bool = False) -> dict:
    """Makes the steps of a run; `own_pass`: the head learns from a second pass, after the update."""
    config = load_config(None, [*COMMON, f"run.root={out}", f"run.name={name}", *overrides])
    trainer = Trainer(config, "default", None, None, Console(quiet=True))
    if own_pass:
        trainer.learner.capture_states = lambda sequences: None
        trainer.drafter.recording.take_states = dict
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


def states(out: Path, steps: int) -> None:
    """The learner's states (policy before the update) against a pass of their own (after it)."""
    for seed in range(2):
        for own_pass in (False, True):
            keys = [f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=3", "tokens=2048")]
            name = f"states-{'after' if own_pass else 'before'}-{seed}"
            run(out, name, f"run.seed={seed}", f"run.steps={steps}", *keys, own_pass=own_pass)


def fresh(out: Path, steps: int) -> None:
    """A fresh head that learns always."""
    keys = [f"rollout.speculation.online.{key}" for key in ("when=always", "lr=3e-3", "unroll=5")]
    run(out, "fresh", f"run.steps={steps}", "rollout.speculation.eagle_path=fresh", *keys)


def auto(out: Path, steps: int) -> None:
    """Paired CPU seconds of `auto` and `never`."""
    ratios = []
    for seed in range(3):
        pair = [
            run(
                out,
                f"{when}-{seed}",
                f"run.seed={seed}",
                f"run.steps={steps}",
                f"rollout.speculation.online.when={when}",
            )
            for when in ("never", "auto")
        ]
        ratios.append(pair[1]["cpu_seconds"] / pair[0]["cpu_seconds"])
    shown = [round(ratio, 4) for ratio in ratios]
    print(f"CPU seconds of auto over never: {shown}, median {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    folder, what, *more = sys.argv[1:]
    {"states": states, "fresh": fresh, "auto": auto}[what](Path(folder), int(more[0]) if more else 25)
