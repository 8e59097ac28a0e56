"""Runs small enough for a test, and what must be equal between two runs of the same seed.

The policy is tiny and untrained, so it is never right about a sum; `length_reward.py` pays for length
instead, which gives every group something to learn.
"""

import json
from pathlib import Path

from paceline.config import Config, load_config
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import save_policy
from paceline.policy.tokenizer import character_tokenizer, save_tokenizer
from paceline.tasks.running_sums import ALPHABET


def make_tiny_policy(folder: Path, layers: int = 2) -> Path:
    config = DecoderConfig("llama", len(ALPHABET) + 1, 32, 64, layers, 2, 1, 16, 256, eos_token_ids=(0,))
    policy = Decoder(config).initialise(0)
    save_policy(policy, folder)
    save_tokenizer(character_tokenizer(ALPHABET), folder)
    return folder


def tiny_overrides(policy: Path, root: Path, name: str, steps: int = 6) -> list[str]:
    return [
        f"policy.path={policy}",
        f"run.root={root}",
        f"run.name={name}",
        f"run.steps={steps}",
        "run.threads=1",
        "run.device=cpu",
        "task.train_problems=12",
        "task.eval_problems=8",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.max_tokens=24",
        "eval.max_tokens=24",
        "checkpoint.every=2",
        "eval.every=3",
        "learning.lr=1e-3",
        "learning.warmup_steps=0",
        "rollout.speculation.drafters=[history]",
        "rollout.speculation.pacing=fixed",
        "rollout.speculation.tokens=5",
        "rollout.speculation.max_running=6",
        "report.closing_pairs=1",
    ]


def tiny_config(policy: Path, root: Path, name: str, *extra: str) -> Config:
    return load_config(None, [*tiny_overrides(policy, root, name), *extra])


def comparable_metrics(run: Path) -> list[dict[str, float]]:
    """Everything but times and memory."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "memory/"))} for record in records]
