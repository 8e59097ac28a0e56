"""Does a policy learn in low precision what it learns in its own? Sums, many runs side by side on one GPU.

    python benchmarks/fp8_learning.py POLICY OUT [--configs base fp8 ...] [--seeds 0 1 2] [--steps 40]

POLICY is SmolLM2-135M-Instruct's folder (`paceline models get smollm2-135m`). Sums of two and three digits
through its chat template: 900 problems, 200 others held out with four samples each, the last number counts.
Prints a line for each run; runs that are in OUT are not made again. What is left of each is evaluated in its
own precision and in base precision.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXACT = ["learning.numerics=exact", "rollout.deterministic=true"]
TIS = ["learning.correction.preset=token-tis"]
NO_CORRECTION = ["learning.correction.preset=none"]
CONFIGS = {
    "base": [],
    "fp8": ["rollout.precision=fp8"],
    "fp8-none": ["rollout.precision=fp8", *NO_CORRECTION],
    "kv": ["rollout.precision=kv"],
    "fp8+kv": ["rollout.precision=fp8+kv"],
    "fp8-tis": ["rollout.precision=fp8", *TIS],
    "fp8+kv-tis": ["rollout.precision=fp8+kv", *TIS],
    "kv-none": ["rollout.precision=kv", *NO_CORRECTION],
    "fp8+kv-none": ["rollout.precision=fp8+kv", *NO_CORRECTION],
    "base-exact": EXACT,
    "fp8-exact": ["rollout.precision=fp8", *EXACT],
    "kv-exact": ["rollout.precision=kv", *EXACT],
    "fp8+kv-exact": ["rollout.precision=fp8+kv", *EXACT],
}
SETTINGS = [
    "task.name=file",
    "task.chat=true",
    "task.rewards=[{function: last-number, name: correct}]",
    "task.data.answer_column=answer",
    "rollout.prompts_per_step=32",
    "rollout.samples_per_prompt=8",
    "rollout.max_tokens=96",
    "rollout.kv_tokens=65536",
    "rollout.graph_memory_gb=0.5",
    "learning.lr=1e-5",
    "learning.micro_batch_tokens=16384",
    "eval.samples=4",
    "eval.max_tokens=96",
    "checkpoint.every=1000",
    "report.closing_pairs=0",
    "report.samples_per_step=0",
]
STEP_KEYS = ("mismatch/kl", "correction/ess", "policy/lost_signal")


def write_problems(folder: Path) -> None:
    """All sums of two and of three digits, in an order of their own; the last 200 are held out."""
    sums = [terms for count in (2, 3) for terms in itertools.product(range(10), repeat=count)]
    random.Random(0).shuffle(sums)
    rows = [
        json.dumps({"prompt": f"What is {' + '.join(map(str, terms))}?", "answer": str(sum(terms))})
        for terms in sums
    ]
    for name, part in (("train", rows[:-200]), ("held_out", rows[-200:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")


def run_one(name: str, seed: int, out: Path, policy: str, steps: int) -> str:
    folder = out / "runs" / f"{name}-{seed}"
    settings = [
        *SETTINGS,
        f"policy.path={policy}",
        f"task.data.path={out / 'train.jsonl'}",
        f"task.data.held_out_path={out / 'held_out.jsonl'}",
        f"run.steps={steps}",
    ]
    log = out / f"{name}-{seed}.log"
    began = time.time()
    if not (folder / "metrics.jsonl").exists():
        where = [f"run.root={out / 'runs'}", f"run.name={folder.name}", f"run.seed={seed}"]
        if paceline(
            ["train", "default", "rollout.speculation.drafters=[]", *settings, *where, *CONFIGS[name]], log
        ):
            return f"{name:14s} seed {seed}: failed: {log.read_text()[-300:]}"
    seconds = time.time() - began
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = [record["eval/accuracy"] for record in records if record["kind"] == "eval"]
    train = [record for record in records if record["kind"] == "train"]
    means = {key: statistics.mean(r.get(key, 0.0) for r in train) for key in STEP_KEYS}
    times = {
        key: statistics.median(r[f"time/{key}"] for r in train[5:] or train) for key in ("rollout", "learn")
    }
    in_base = own[-1]
    if name != "base":
        log = out / f"{name}-{seed}-base.log"
        left = str(folder / "checkpoints" / f"step_{steps:06d}" / "policy")
        deterministic = [key for key in CONFIGS[name] if key.startswith("rollout.deterministic")]
        given = [s for s in settings if not s.startswith("policy.path")]
        if paceline(["eval", left, "--recipe", "default", "--quiet", *given, *deterministic], log):
            return f"{name:14s} seed {seed}: failed: {log.read_text()[-300:]}"
        in_base = float(log.read_text().split("avg@4: ")[1].split("%")[0]) / 100
    return (
        f"{name:14s} seed {seed}: kl {means['mismatch/kl']:.3g} ess {means['correction/ess']:.3f} "
        f"lost {means['policy/lost_signal']:.4f} | "
        f"{100 * own[0]:.1f} -> {100 * own[-1]:.1f}%, in base {100 * in_base:.1f}% | "
        f"rollout {times['rollout']:.2f} learn {times['learn']:.2f} s, run {seconds:.0f} s"
    )


def paceline(arguments: list[str], log: Path) -> int:
    command = [sys.executable, "-m", "paceline", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("policy")
    parser.add_argument("out", type=Path)
    parser.add_argument("--configs", nargs="+", default=["base", "fp8", "kv", "fp8+kv"], choices=CONFIGS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=8)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    write_problems(given.out)
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = [
            pool.submit(run_one, name, seed, given.out.absolute(), given.policy, given.steps)
            for seed in given.seeds
            for name in given.configs
        ]
        for run in runs:
            print(run.result(), flush=True)


if __name__ == "__main__":
    main()
