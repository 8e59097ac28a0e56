"""`paceline warmup`: makes a starting checkpoint by supervised training.

Without data it makes the built-in policy: first careful answers only, then the mix of modes that RL starts
from (a weak first phase makes RL collapse to guessing). With a JSONL file of `prompt` and `response` it
fine-tunes any policy.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import LearningConfig, TaskConfig
from paceline.learning.supervised import Example, train_supervised
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import DTYPES, load_policy, save_policy
from paceline.policy.tokenizer import character_tokenizer, load_tokenizer, save_tokenizer
from paceline.tasks import running_sums

# Share of careful answers in the mix that RL starts from.
CAREFUL_SHARE = 0.3

# Examples per optimiser step of the built-in policy.
BATCH_SIZE = 64

# Optimiser steps over which the learning rate rises.
LR_WARMUP_STEPS = 20

# Called with the step, the number of steps and the loss.
Progress = Callable[[int, int, float], None]


def builtin_config(family: str = "llama") -> DecoderConfig:
    """Returns the built-in policy's shape for a family.

    It is deep and thin: many small steps make the engine's overheads and the long tail visible on a laptop.
    """
    dense = DecoderConfig(
        family="llama",
        vocab_size=len(running_sums.ALPHABET) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=512,
        tie_embeddings=True,
        eos_token_ids=(0,),
    )
    if family == "llama":
        return dense
    if family == "qwen3_moe":  # two of eight experts take as much work per token as the dense feed-forward
        experts = dict(
            num_experts=8,
            num_experts_per_token=2,
            expert_intermediate_size=128,
            normalise_expert_weights=True,
        )
        return replace(dense, family=family, num_layers=4, qk_norm=True, **experts)
    raise ValueError(f"--family {family!r} has no built-in policy; there is one for: llama, qwen3_moe")


def make_builtin(
    folder: Path, seed: int, careful_steps: int, mixed_steps: int, progress: Progress, family: str = "llama"
) -> None:
    """Trains the built-in policy and writes it to `folder`."""
    tokenizer = character_tokenizer(running_sums.ALPHABET)
    policy = Decoder(builtin_config(family)).initialise(seed)
    total = careful_steps + mixed_steps
    settings = LearningConfig(
        lr=3e-3,
        lr_schedule="cosine",
        warmup_steps=LR_WARMUP_STEPS,
        beta2=0.98,
        weight_decay=0.01,
        micro_batch_tokens=2048,
    )
    batches = _builtin_batches(tokenizer, seed, careful_steps, total)
    train_supervised(policy, batches, total, settings, lambda step, loss: progress(step, total, loss))
    save_policy(policy, folder, dtype=DTYPES["bfloat16"])  # half the size; the values are rounded once, here
    save_tokenizer(tokenizer, folder)


def _builtin_batches(
    tokenizer: Tokenizer, seed: int, careful_steps: int, total: int
) -> Iterator[list[Example]]:
    defaults = TaskConfig()
    task = running_sums.RunningSums(defaults.seed, defaults.train_problems, defaults.eval_problems)
    held_out = {problem.prompt for problem in task.held_out}
    rng = random.Random(f"warmup/{seed}")
    for step in range(total):
        examples: list[Example] = []
        while len(examples) < BATCH_SIZE:
            problem = running_sums.draw_problem(rng)
            if problem.prompt in held_out:
                continue
            careful = step < careful_steps or rng.random() < CAREFUL_SHARE
            response = running_sums.demonstration(problem, rng, careful)
            examples.append(_example(tokenizer, problem.prompt, response, end=0))
        yield examples


def warm_up_on_file(
    policy_folder: str,
    data: Path,
    out: Path,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
    progress: Progress,
) -> None:
    """Fine-tunes the policy of `policy_folder` on a file of prompts and responses, and writes it to `out`."""
    policy = load_policy(policy_folder, DTYPES["float32"])
    tokenizer = load_tokenizer(policy_folder)
    if not policy.config.eos_token_ids:
        raise ValueError(
            f"{policy_folder}/config.json names no eos_token_id, so a response has no end to learn"
        )
    examples = [_example(tokenizer, p, r, policy.config.eos_token_ids[0]) for p, r in _read_pairs(data)]
    steps_per_epoch = -(-len(examples) // batch_size)
    total = epochs * steps_per_epoch

    def batches() -> Iterator[list[Example]]:
        for epoch in range(epochs):
            order = examples[:]
            random.Random(f"{seed}/{epoch}").shuffle(order)
            yield from (order[i : i + batch_size] for i in range(0, len(order), batch_size))

    settings = LearningConfig(lr=lr, lr_schedule="cosine", warmup_steps=min(LR_WARMUP_STEPS, total // 10))
    train_supervised(policy, batches(), total, settings, lambda step, loss: progress(step, total, loss))
    save_policy(policy, out, tokenizer_from=policy_folder)


def _read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    found = False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            yield record["prompt"], record["response"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: each line must be a JSON object with `prompt` and `response` ({error!r})"
            ) from None
        found = True
    if not found:
        raise ValueError(f"{path} holds no examples")


def _example(tokenizer: Tokenizer, prompt: str, response: str, end: int) -> Example:
    return Example(
        tuple(tokenizer.encode(prompt).ids), (*tokenizer.encode(response, add_special_tokens=False).ids, end)
    )
