"""The requests of a certificate: every setting a request may have, on prompts of every length that matters.

Prompts are the task's own, cut where blocks of the cache begin and end, and random ones, after which a policy
is less sure than after those it was trained on.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from paceline.certify.oracle.seeds import seed_of
from paceline.types import Request, SamplingParams

# How tokens are drawn: each parameter alone, and together. Temperatures above 1 put randomness where a policy
# that was trained has none.
SETTINGS = (
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(1.6),
    SamplingParams(3.0),
    SamplingParams(0.0),
    SamplingParams(1.0, top_k=5),
    SamplingParams(2.0, top_k=2),
    SamplingParams(2.0, top_p=0.9),
    SamplingParams(1.5, top_p=0.5),
    SamplingParams(0.7, top_p=0.95),
    SamplingParams(2.0, min_p=0.05),
    SamplingParams(1.5, min_p=0.3),
    SamplingParams(2.5, top_k=8, top_p=0.8),
    SamplingParams(2.5, top_k=6, min_p=0.15),
    SamplingParams(2.5, top_p=0.9, min_p=0.3),
    SamplingParams(2.5, top_k=12, top_p=0.9, min_p=0.05),
)

# What lies between the settings above: ranges of which each is drawn from, by the parameter. Somewhere a
# backend may round, cap or ignore what it was asked for.
TEMPERATURES = ((0.02, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, 5.0))
TRUNCATIONS = (
    ("top_k", (1, 5)),
    ("top_k", (6, 20)),
    ("top_k", (21, math.inf)),  # up to the vocabulary
    ("top_p", (0.02, 0.5)),
    ("top_p", (0.5, 0.97)),
    ("top_p", (0.97, 0.999)),
    ("min_p", (0.001, 0.05)),
    ("min_p", (0.05, 0.3)),
    ("min_p", (0.3, 0.9)),
)

# Samples of one prompt that are submitted together.
GROUP = 4

# Lengths of prompts: around one to four blocks of 16 tokens.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 80)

# Positions of the policy whose long contexts are certified, and what is asked there: the least and the most
# tokens of a prompt, those of its responses, and their number. Attention takes 512 keys at a time, or another
# power of two.
LONG_POSITIONS = 4096
LONG_LENGTHS = (
    ((450, 500), 80, 1),
    ((520, 1000), 10, 2),
    ((1017, 1023), 12, 1),
    ((1030, 1530), 10, 2),
    ((2060, 3000), 10, 2),
    ((LONG_POSITIONS - 6, LONG_POSITIONS - 2), 12, 2),
)

# Seeds at the ends of their range, and pairs that differ in one half only.
ODD_SEEDS = (0, 1, -1, 1 << 32, (1 << 32) + 1, (1 << 63) - 1, -(1 << 63), 0xFFFFFFFF, 7 << 32, 7)
ODD_SEED_SETTING = SamplingParams(2.0)

# Ranges of settings, each parameter by itself.
RANGES = len(TEMPERATURES) + len(TRUNCATIONS)


def describe(sampling: SamplingParams) -> str:
    """Returns sampling parameters as a label of checks."""
    parts = [f"T {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return ", ".join(parts)


def drawn_settings(
    rng: random.Random, count: int, vocab_size: int, hottest: float = 5.0, min_p: bool = True
) -> list[SamplingParams]:
    """Returns settings at random: one of each range in turn, then temperature and truncation together.

    A truncation by itself is drawn hot, where there is something to cut.
    """
    temperatures = [(low, min(high, hottest)) for low, high in TEMPERATURES if low < hottest]
    truncations = [(name, bounds) for name, bounds in TRUNCATIONS if min_p or name != "min_p"]
    hot = 0.5 * hottest, hottest
    kinds = [(warm, []) for warm in temperatures] + [(hot, [cut]) for cut in truncations]
    kinds += [(warm, truncations) for warm in temperatures]
    settings = []
    for index in range(count):
        warm, cuts = kinds[index % len(kinds)]
        drawn: dict[str, float] = {}
        for name, (low, high) in cuts if len(cuts) < 2 else rng.sample(cuts, 3):
            value = between(rng, low, min(high, max(low, vocab_size - 1)))
            drawn[name] = round(value) if name == "top_k" else value
        settings.append(SamplingParams(between(rng, *warm), **drawn))
    return settings


def between(rng: random.Random, low: float, high: float) -> float:
    """Returns a number of three digits, every order of magnitude as likely as the others."""
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def drawn_label(sampling: SamplingParams) -> str:
    """Returns what is drawn at random of a setting, as a label of checks."""
    cuts = (
        ["top-k"] * (sampling.top_k > 0) + ["top-p"] * (sampling.top_p < 1) + ["min-p"] * (sampling.min_p > 0)
    )
    return "drawn " + (cuts[0] if len(cuts) == 1 else "truncations together" if cuts else "temperatures")


def varied_prompts(
    prompts: Sequence[tuple[int, ...]], vocab_size: int, longest: int, seed: int
) -> list[tuple[int, ...]]:
    """Returns prompts of many lengths up to `longest`: the task's own, cut ones, and random ones."""
    rng = random.Random(f"certify prompts {seed}")
    lengths = [length for length in LENGTHS if length <= longest]
    chosen = []
    for index, length in enumerate(lengths):
        source = prompts[index % len(prompts)]
        text = [*source, *(rng.randrange(vocab_size) for _ in range(length))]
        chosen += [tuple(text[:length]), tuple(rng.randrange(vocab_size) for _ in range(length))]
    own = [prompt for prompt in prompts if 1 < len(prompt) <= longest]
    chosen += rng.sample(own, min(len(own), len(chosen)))
    rng.shuffle(chosen)
    return chosen


def grid_requests(
    prompts: Sequence[tuple[int, ...]],
    settings: Sequence[SamplingParams],
    samples: int,
    tokens: int,
    seed: int,
) -> list[Request]:
    """Returns `samples` requests of each setting, in groups that share a prompt, all mixed in one queue.

    Every fifth also asks for the most likely tokens.
    """
    requests = []
    for index, setting in enumerate(settings):
        for sample in range(samples):
            group = sample // GROUP
            prompt = prompts[(index * 5 + group) % len(prompts)]
            name = f"grid {describe(setting)}"
            sampling = replace(
                setting, max_tokens=tokens, ignore_eos=True, top_logprobs=3 if sample % 5 == 4 else 0
            )
            own_seed = seed_of("eval", seed, 0, name, group, sample)
            requests.append(Request(f"{name}/{sample}", prompt, own_seed, sampling, group=f"{name}/{group}"))
    random.Random(seed).shuffle(requests)
    return requests


def odd_seed_requests(prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Request]:
    """Returns requests of one prompt whose seeds lie at the ends of what a seed may be."""
    sampling = replace(ODD_SEED_SETTING, max_tokens=tokens, ignore_eos=True)
    return [Request(f"seed {seed}", prompts[0], seed, sampling, group="odd seeds") for seed in ODD_SEEDS]


def sibling_requests(
    prompts: Sequence[tuple[int, ...]],
    groups: int,
    size: int,
    seed: int,
    label: str,
    settings: Sequence[SamplingParams] = SETTINGS,
) -> list[Request]:
    """Returns groups that are too large to run at once, so that siblings still wait when others are done."""
    chosen = []
    for index in range(groups * size):
        group = index // size
        setting = settings[(group + 3 * index) % len(settings)]
        sampling = replace(setting, max_tokens=4 + 5 * index % 13, ignore_eos=True)
        prompt = prompts[group % len(prompts)]
        own_seed = seed_of("eval", seed, 0, label, group, index)
        chosen.append(Request(f"{label}/{index}", prompt, own_seed, sampling, group=f"{label}/{group}"))
    return chosen


def long_requests(
    prompts: Sequence[tuple[int, ...]], count: int, tokens: int, seed: int, label: str
) -> list[Request]:
    """Returns requests that outgrow the blocks they are admitted with; lengths differ."""
    rng = random.Random(f"{label} {seed}")
    chosen = []
    for index in range(count):
        setting = SETTINGS[index * 3 % len(SETTINGS)]
        sampling = replace(setting, max_tokens=tokens - rng.randrange(tokens // 2), ignore_eos=True)
        name = f"{label}/{index}"
        prompt = prompts[index // 2 % len(prompts)]
        chosen.append(
            Request(
                name,
                prompt,
                seed_of("eval", seed, 0, label, 0, index),
                sampling,
                group=f"{label}/{index // 2}",
            )
        )
    return chosen


def drawn_requests(
    rng: random.Random,
    prompts: Sequence[tuple[int, ...]],
    vocab_size: int,
    count: int,
    shortest: int,
    longest: int,
) -> list[Request]:
    """Returns groups of which nothing is fixed but the length of prompt and response together, at most."""
    name = f"drawn {rng.randrange(1 << 32)}"
    settings = drawn_settings(rng, count, vocab_size)
    rng.shuffle(settings)
    chosen: list[Request] = []
    while len(chosen) < count:
        group = len(chosen)
        length = round(between(rng, shortest, longest // 2))
        text = [*rng.choice(prompts)[: rng.randrange(length + 1)], *rng.choices(range(vocab_size), k=length)]
        for place in range(group, min(count, group + rng.randint(1, 9))):
            sampling = replace(
                settings[place],
                max_tokens=round(between(rng, 1, min(64, longest // 2))),
                ignore_eos=rng.random() < 0.8,
                stop_token_ids=tuple(rng.sample(range(vocab_size), rng.choice((0, 0, 0, 1, 2)))),
                top_logprobs=rng.choice((0, 0, rng.randint(1, min(20, vocab_size)))),
            )
            own_seed = seed_of("eval", rng.randrange(1 << 32), 0, name, group, place)
            request = Request(f"{name}/{place}", tuple(text[:length]), own_seed, sampling)
            chosen.append(replace(request, group=f"{name}/{group}"))
    return chosen


def long_context_requests(vocab_size: int, seed: int) -> list[Request]:
    """Returns requests behind thousands of tokens, up to the last position."""
    rng = random.Random(f"certify long {seed}")
    settings = drawn_settings(rng, 64, vocab_size)
    chosen = []
    for group, (bounds, tokens, siblings) in enumerate(LONG_LENGTHS):
        length = rng.randint(*bounds)
        prompt = tuple(rng.choices(range(vocab_size), k=length))
        for sibling in range(siblings):
            sampling = replace(rng.choice(settings), max_tokens=tokens, ignore_eos=True)
            own_seed = seed_of("eval", seed, 0, "long", group, sibling)
            name = f"long {length}/{sibling}"
            chosen.append(Request(name, prompt, own_seed, sampling, group=f"long {length}"))
    return chosen
