"""Run directories made up for tests of the report: plausible ones, and hostile ones."""

import json
from pathlib import Path

import yaml

# What must be shown as text wherever it stands.
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">&lt;b&gt;\u2028'

# The same, as a folder may be called.
HOSTILE_NAME = "<img src=x onerror=window.hacked=1>&amp; run"

# A closing check that found the same tokens in less time.
CLOSING = {
    "ratio": 1.2,
    "ratio_low": 1.1,
    "ratio_high": 1.3,
    "plain_steps": 288,
    "paced_steps": 172,
    "repeats": 5,
    "identical": True,
    "too_noisy": False,
}


def train_record(step: int, **changes: object) -> dict[str, object]:
    """Returns the metrics of one step of a policy that learns."""
    learned = 1 - 0.9 / (1 + 0.1 * step)
    return {
        "step": step,
        "kind": "train",
        "reward/mean": learned,
        "reward/std": 0.3,
        "rollout/accuracy": learned,
        "rollout/length_mean": 40.0 + step % 7,
        "rollout/length_p95": 80.0,
        "rollout/length_max": 100.0 + step % 13,
        "rollout/tokens": 5000 + step,
        "rollout/decode_steps": 90,
        "rollout/tail_steps": 0.4,
        "rollout/zero_variance_groups": 0.2,
        "policy/entropy": 0.3 / step,
        "policy/approximate_kl": 1e-4,
        "policy/gradient_norm": 0.5,
        "policy/learning_rate": 1e-4,
        "policy/skipped": 0.0,
        "mismatch/k3": 1e-9,
        "mismatch/kl": -1e-9,
        "correction/ess": 0.99,
        "speculation/accept_length": 2.5,
        "speculation/steps": 0.5,
        "speculation/accepted": 0.6,
        "speculation/eagle/accept_length": 2.0,
        "speculation/eagle/accepted_1": 0.7,
        "speculation/eagle/accepted_2": 0.4,
        "speculation/history/accept_length": 3.0,
        "speculation/history/accepted_1": 0.8,
        "drafter/updates": 2 if step % 5 == 0 else 0,
        "drafter/version": step - step % 10,
        "time/prefill": 0.1,
        "time/decode": 1.5,
        "time/tail": 0.9,
        "time/reward_wait": 0.0,
        "time/rollout": 2.6,
        "time/learn": 1.2,
        "time/sync": 0.01,
        "time/step": 3.8,
        "time/tokens_per_second": 1900.0,
        "memory/rollout_gb": 1.2,
        "memory/learn_gb": 1.3,
        **changes,
    }


def eval_record(step: int, accuracy: float) -> dict[str, object]:
    """Returns the metrics of one evaluation."""
    return {
        "step": step,
        "kind": "eval",
        "eval/accuracy": accuracy,
        "eval/accuracy_margin": 0.03,
        "eval/length_mean": 40.0,
        "eval/problems": 512,
    }


def make_run(path: Path, steps: int = 20, seed: int = 0, text: str = "a1:1;#1", **changes: object) -> Path:
    """Writes a run of so many steps; `changes` go into every step's metrics."""
    for folder in ("samples", "checkpoints"):
        (path / folder).mkdir(parents=True)
    config = {"run": {"seed": seed, "steps": steps}, "policy": {"path": "builtin"}, "task": {"name": text}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    with (path / "metrics.jsonl").open("w") as metrics, (path / "trace.jsonl").open("w") as trace:
        metrics.write(json.dumps(eval_record(0, 0.35)) + "\n")
        for step in range(1, steps + 1):
            metrics.write(json.dumps(train_record(step, **changes)) + "\n")
            for row in trace_rows(step):
                trace.write(json.dumps(row) + "\n")
        metrics.write(json.dumps(eval_record(steps, 0.92)) + "\n")
    for step in range(1, steps + 1):
        (path / "samples" / f"step_{step:06d}.jsonl").write_text(json.dumps(group(step, text)) + "\n")
    return path


def trace_rows(step: int) -> list[dict[str, object]]:
    """Returns the decisions of one rollout, with fewer and fewer requests."""
    strategies = ("plain", "history:3", "eagle:1", "history:7")
    return [
        {
            "step": step,
            "strategy": strategy,
            "reason": "trial" if strategy == "eagle:1" else "best",
            "context": 30.0,
            "expected": 1000.0,
            "steps": 10,
            "rows": 10 * (64 >> 2 * i),
            "tokens": (i + 1) * 10 * (64 >> 2 * i),
            "seconds": 0.5,
            "disturbed_seconds": 0.0,
        }
        for i, strategy in enumerate(strategies)
    ]


def group(step: int, text: str) -> dict[str, object]:
    """Returns one saved group of two responses."""
    samples = [
        {
            "text": f"{text} answer {step}",
            "reward": float(correct),
            "correct": bool(correct),
            "components": {text[:20]: 1.0},
            "finish_reason": "stop",
            "tokens": [1, 2, 3],
        }
        for correct in (1, 0)
    ]
    return {"prompt_id": text, "prompt": f"{text} question {step}", "samples": samples}


def make_hostile_run(root: Path) -> Path:
    """Writes a run whose name, recipe, prompts and responses are markup, with broken lines in its files."""
    run = make_run(root / HOSTILE_NAME, text=HOSTILE)
    drafter = "<script>window.hacked=1</script>"
    hostile = {f"speculation/{drafter}/accepted_1": 0.5, f"speculation/{drafter}/accept_length": 2.0}
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(train_record(21, **hostile)).encode() + b"\n")
        file.write(b'{"step": 22, "kind": "train", "reward/mean": "<b>not a number</b>"}\n')
        file.write(b'{"step": 23, "kind": "train", "reward/mean": NaN, "time/step": Infinity}\n')
        file.write(b'{"step": 23, "kind": "train", "time/step": 1' + b"0" * 400 + b"}\n")
        file.write(b"[]\n\xff\xfe\n" + b"[" * 100_000 + b"\n" + b'{"step": 24, "kind": "tra')
    with (run / "samples" / "step_000020.jsonl").open("ab") as file:
        long = group(20, "x" * 300_000)
        file.write(json.dumps(long).encode() + b"\nnull\n{}\n" + b'{"prompt": 1, "samples": 3}\n\xff\n')
    with (run / "trace.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "strategy": "<b>:x"}\n{"step": 21\n')
    (run / "closing.json").write_text('{"ratio": "<b>"}')
    return run
