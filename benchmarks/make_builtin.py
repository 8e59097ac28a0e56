"""Makes the built-in policies, which the package ships in `assets/`.

    python benchmarks/make_builtin.py OUT [--family qwen3_moe]

Supervised training on the built-in task: first careful answers only, then the mix of modes that RL starts
from (a weak first phase makes RL collapse to guessing). `builtin-countdown` comes from `paceline sft`
(docs/tasks.md), `builtin-eagle` from `paceline drafter train builtin`.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.config import TaskConfig, load_config
from paceline.learning.batch import TrainingSequence
from paceline.learning.learner import Learner
from paceline.learning.supervised import imitate, supervised_sequence
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import save_policy
from paceline.policy.tokenizer import character_tokenizer, save_tokenizer
from paceline.tasks import running_sums
from paceline.tasks.base import Problem

# Optimiser steps on careful answers alone, and on the mix.
CAREFUL_STEPS = 1700
MIXED_STEPS = 300
# Share of careful answers in the mix that RL starts from.
CAREFUL_SHARE = 0.3
# Chance that a careful demonstration gets a running sum wrong and corrects itself.
SLIP_RATE = 0.12
# Examples per optimiser step.
BATCH_SIZE = 64


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
    # Two of eight experts take as much work per token as the dense feed-forward.
    return replace(
        dense,
        family=family,
        num_layers=4,
        qk_norm=True,
        num_experts=8,
        num_experts_per_token=2,
        expert_intermediate_size=128,
        normalise_expert_weights=True,
    )


def demonstration(problem: Problem, rng: random.Random, careful: bool) -> str:
    """Writes a response in one of the two modes."""
    prompt = problem.prompt
    assert isinstance(prompt, str)
    terms = [(prompt[i], int(prompt[i + 1])) for i in range(0, len(prompt) - 1, 2)]
    if not careful:
        guess = int(problem.answer) + rng.choice((-3, -2, -1, 0, 1, 2, 3))
        return f"#{max(guess, 1)}"
    total = 0
    text = ""
    for label, digit in terms:
        total += digit
        while rng.random() < SLIP_RATE:
            text += f"{label}{digit}:{max(1, total + rng.choice((-2, -1, 1, 2)))}/"
        text += f"{label}{digit}:{total};"
    return f"{text}#{total}"


def make_builtin(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    careful_steps: int = CAREFUL_STEPS,
    mixed_steps: int = MIXED_STEPS,
) -> None:
    tokenizer = character_tokenizer(running_sums.ALPHABET)
    policy = Decoder(builtin_config(family)).initialise(seed)
    total = careful_steps + mixed_steps
    settings = ("algorithm=sft", "lr=3e-3", "lr_schedule=cosine", "warmup_steps=20")
    optimiser = ("beta2=0.98", "weight_decay=0.01")
    config = load_config(None, [f"run.steps={total}", *(f"learning.{s}" for s in (*settings, *optimiser))])
    learner = Learner(policy, config)
    for step, sequences in enumerate(_batches(tokenizer, seed, careful_steps, total), start=1):
        loss = imitate(learner, sequences)["policy/loss"]
        if step % 50 == 0 or step == total:
            print(f"step {step} of {total}: loss {loss:.4f}", flush=True)
    save_policy(policy, folder, dtype=torch.bfloat16)  # half the size; the values are rounded once, here
    save_tokenizer(tokenizer, folder)


def _batches(
    tokenizer: Tokenizer, seed: int, careful_steps: int, total: int
) -> Iterator[list[TrainingSequence]]:
    defaults = TaskConfig()
    task = running_sums.RunningSums(defaults.seed, defaults.train_problems, defaults.eval_problems)
    held_out = {problem.prompt for problem in task.held_out}
    rng = random.Random(f"warmup/{seed}")
    for step in range(total):
        examples: list[TrainingSequence] = []
        while len(examples) < BATCH_SIZE:
            problem = running_sums.draw_problem(rng)
            if problem.prompt in held_out:
                continue
            careful = step < careful_steps or rng.random() < CAREFUL_SHARE
            prompt, response = problem.prompt, demonstration(problem, rng, careful)
            asked = tokenizer.encode(prompt).ids
            answer = [*tokenizer.encode(response, add_special_tokens=False).ids, 0]
            learned = [False] * len(asked) + [True] * len(answer)
            examples.append(supervised_sequence([*asked, *answer], learned))
        yield examples


def main(arguments: Sequence[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--family", choices=("llama", "qwen3_moe"), default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--careful-steps", type=int, default=CAREFUL_STEPS)
    parser.add_argument("--mixed-steps", type=int, default=MIXED_STEPS)
    options = parser.parse_args(arguments)
    if (options.out / "config.json").exists():
        parser.error(f"{options.out} already holds a model; remove it or choose another folder")
    make_builtin(options.out, options.family, options.seed, options.careful_steps, options.mixed_steps)


if __name__ == "__main__":
    main()
