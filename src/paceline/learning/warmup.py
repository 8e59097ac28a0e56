"""`paceline warmup`: makes a starting checkpoint by supervised training.

The examples are a JSONL file of `prompt` and `response`, or the demonstrations of a task that can solve its
own problems.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import LearningConfig
from paceline.learning.supervised import Example, train_supervised
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.fused import EVERYTHING, Recompute
from paceline.policy.huggingface import save_policy
from paceline.policy.tokenizer import character_tokenizer, save_tokenizer
from paceline.tasks.jsonl import read_jsonl
from paceline.tasks.task import Task

# A fresh policy's context in tokens and its depth: a CPU trains it within a quarter of an hour.
FRESH_POSITIONS = 1024
FRESH_LAYERS = 4

# Optimiser steps over which the learning rate rises.
LR_WARMUP_STEPS = 20

# Called with the step, the number of steps and the loss.
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class WarmupSettings:
    """How a policy is trained on examples."""

    epochs: int
    batch_size: int  # examples per optimiser step
    lr: float
    seed: int
    micro_batch_tokens: int = 2048
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class WarmupTotals:
    """Totals of a warm-up."""

    examples: int
    dropped: int  # examples that were too long
    tokens: int  # of all epochs, prompts included


def write_fresh_policy(folder: Path, alphabet: Sequence[str], seed: int) -> None:
    """Writes an untrained policy, as wide as the built-in one, with a token for each of these texts."""
    config = DecoderConfig(
        family="llama",
        vocab_size=len(alphabet) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_layers=FRESH_LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=FRESH_POSITIONS,
        tie_embeddings=True,
        eos_token_ids=(0,),
    )
    save_policy(Decoder(config).initialise(seed), folder)
    save_tokenizer(character_tokenizer(alphabet), folder)


def warm_up_on_file(
    policy: Decoder, tokenizer: Tokenizer, data: Path, settings: WarmupSettings, progress: Progress
) -> WarmupTotals:
    """Trains the policy in place on a JSONL file's pairs, whose texts are taken as they are."""
    end = _end_token(policy)
    examples: list[Example] = []
    for where, prompt, response in _read_pairs(data):
        examples.append(_example(tokenizer, prompt, response, end))
        if not examples[-1].prompt:
            raise ValueError(
                f"{where}: `prompt` has no tokens, and this tokenizer begins no text by itself, so nothing "
                "predicts the first token of the response; move the beginning of the text into `prompt`"
            )
    return _train(policy, examples, settings, progress)


def warm_up_on_task(
    policy: Decoder, task: Task, count: int, max_tokens: int, settings: WarmupSettings, progress: Progress
) -> WarmupTotals:
    """Trains the policy in place on `count` of a task's demonstrations, asked exactly as in RL.

    A demonstration of more than `max_tokens` is left out: RL would cut such a response off.
    """
    made = demonstration_examples(task, count, settings.seed, _end_token(policy))
    positions = policy.config.max_positions
    fitting = [e for e in made if len(e.response) <= max_tokens and e.num_tokens <= positions]
    if not fitting:
        shortest = min(len(example.response) for example in made)
        raise ValueError(
            f"all {count} demonstrations are too long: rollout.max_tokens = {max_tokens}, the policy has "
            f"{positions} positions, and the shortest takes {shortest} tokens; raise the first, or make "
            "task.options easier"
        )
    totals = _train(policy, fitting, settings, progress)
    return replace(totals, dropped=len(made) - len(fitting))


def demonstration_examples(task: Task, count: int, seed: int, end: int) -> list[Example]:
    """Returns a task's demonstrations as tokens, prompts rendered by the task's own encoder."""
    assert task.demonstrations is not None
    demonstrations = list(task.demonstrations(count, seed))
    texts = [demonstration.response for demonstration in demonstrations]
    responses = task.prompts.tokenizer.encode_batch(texts, add_special_tokens=False)  # on all cores
    return [
        Example(task.prompts.encode(demonstration.problem), (*response.ids, end))
        for demonstration, response in zip(demonstrations, responses, strict=True)
    ]


def _train(
    policy: Decoder, examples: list[Example], settings: WarmupSettings, progress: Progress
) -> WarmupTotals:
    """Trains on every example once an epoch, in an order that is a pure function of seed and epoch."""
    total = settings.epochs * -(-len(examples) // settings.batch_size)

    def batches() -> Iterator[list[Example]]:
        for epoch in range(settings.epochs):
            order = examples[:]
            random.Random(f"{settings.seed}/{epoch}").shuffle(order)
            yield from (order[i : i + settings.batch_size] for i in range(0, len(order), settings.batch_size))

    policy.recompute = EVERYTHING if settings.activation_checkpointing else Recompute()
    learning = LearningConfig(
        lr=settings.lr,
        lr_schedule="cosine",
        warmup_steps=min(LR_WARMUP_STEPS, total // 10),
        micro_batch_tokens=settings.micro_batch_tokens,
    )
    train_supervised(policy, batches(), total, learning, lambda step, loss: progress(step, total, loss))
    tokens = settings.epochs * sum(example.num_tokens for example in examples)
    return WarmupTotals(len(examples), 0, tokens)


def _end_token(policy: Decoder) -> int:
    if not policy.config.eos_token_ids:
        raise ValueError("the policy's config.json names no eos_token_id, so a response has no end to learn")
    return policy.config.eos_token_ids[0]


def _read_pairs(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields each pair's place in the file, prompt and response."""
    found = False
    for where, record in read_jsonl(path):
        pair = record.get("prompt"), record.get("response")
        if not (isinstance(pair[0], str) and isinstance(pair[1], str)):
            raise ValueError(
                f"{where}: each line must be a JSON object with the texts `prompt` and `response`"
            )
        yield where, pair[0], pair[1]
        found = True
    if not found:
        raise ValueError(f"{path} holds no examples")


def _example(tokenizer: Tokenizer, prompt: str, response: str, end: int) -> Example:
    return Example(
        tuple(tokenizer.encode(prompt).ids), (*tokenizer.encode(response, add_special_tokens=False).ids, end)
    )
