"""Tests of the noise as noise: are its bits fair, and independent over tokens, positions, seeds and streams?

That a backend's noise is this noise is another check's business (every token depends on it); here the
published definition itself is tested, on the very numbers that requests use: seeds as they are derived from
small run seeds, steps and sample indices, positions and tokens that count up.
"""

import math

import torch

from paceline.certify.certificate import Check
from paceline.certify.oracle.noise import RECOVER, SAMPLE, gumbel, noise_bits
from paceline.certify.oracle.seeds import seed_of
from paceline.certify.power import percent
from paceline.certify.statistics import chi_square_tail, poisson_tail

# Neighbouring tokens and positions per seed.
TOKENS = 32
POSITIONS = 32

# Bins of each of two neighbouring draws, in the test of pairs.
PAIR_BINS = 16

# Equally likely bins of the Gumbel's distribution, half of them in its upper tail.
GUMBEL_BINS = 64


def noise_checks(seeds: int, run_seed: int) -> list[Check]:
    seeds_S = torch.tensor(
        [seed_of("train", run_seed, i // 64, str(i // 8 % 8), 0, i % 8) for i in range(seeds)]
    )
    bits_SPT = _draws(seeds_S, SAMPLE)
    return [
        _fair_bits(bits_SPT),
        _gumbel_distribution(bits_SPT),
        *(_independent(f"neighbouring {what}", *pair) for what, pair in _neighbours(bits_SPT).items()),
        _independent("streams", bits_SPT, _draws(seeds_S, RECOVER)),
        _avalanche(seeds_S),
        _no_draw_twice(bits_SPT),
    ]


def _draws(seeds_S: torch.Tensor, stream: int) -> torch.Tensor:
    count = len(seeds_S)
    positions_N = torch.arange(POSITIONS).repeat(count)
    bits_NT = noise_bits(seeds_S.repeat_interleave(POSITIONS), positions_N, TOKENS, stream)
    return bits_NT.view(count, POSITIONS, TOKENS)


def _neighbours(bits_SPT: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        "tokens": (bits_SPT[:, :, :-1], bits_SPT[:, :, 1:]),
        "tokens, four apart": (bits_SPT[:, :, :-4], bits_SPT[:, :, 4:]),
        "positions": (bits_SPT[:, :-1], bits_SPT[:, 1:]),
        "samples of a prompt": (bits_SPT[:-1], bits_SPT[1:]),
        "steps": (bits_SPT[:-64], bits_SPT[64:]),
    }


def _bit_counts(bits: torch.Tensor) -> torch.Tensor:
    return torch.stack([((bits >> place) & 1).sum() for place in range(32)]).double()


def _fair_bits(bits: torch.Tensor) -> Check:
    count = bits.numel()
    deviation_B = (_bit_counts(bits) - count / 2) / math.sqrt(count / 4)
    statistic = float((deviation_B**2).sum())
    found = 5.5 / (2 * math.sqrt(count))
    detail = f"{count} draws; one of the 32 bits off by {percent(found)} would have been found"
    return Check("noise: every bit is fair", None, detail, chi_square_tail(statistic, 32))


def _gumbel_distribution(bits: torch.Tensor) -> Check:
    """Tests the Gumbel against its distribution function exp(-exp(-g)), finely where tokens win."""
    tail = torch.cat(
        (torch.linspace(0, 0.9, GUMBEL_BINS // 2 + 1), 1 - torch.logspace(-1, -4, GUMBEL_BINS // 2)[1:])
    )
    edges = torch.cat((tail.double(), torch.ones(1, dtype=torch.float64)))
    share = torch.exp(-torch.exp(-gumbel(bits))).flatten()
    counts = torch.bincount(torch.bucketize(share, edges[1:-1]), minlength=len(edges) - 1).double()
    expected = edges.diff() * share.numel()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    detail = f"{share.numel()} draws in {len(expected)} bins, the last with a probability of 0.0001"
    return Check("noise: Gumbel distributed", None, detail, chi_square_tail(statistic, len(expected) - 1))


def _independent(what: str, first: torch.Tensor, second: torch.Tensor) -> Check:
    """Tests pairs of draws: the joint distribution of their high bits, and how often each bit agrees."""
    count = first.numel()
    shift = 32 - PAIR_BINS.bit_length() + 1
    pairs = (first >> shift) * PAIR_BINS + (second >> shift)
    counts = torch.bincount(pairs.flatten(), minlength=PAIR_BINS**2).double()
    expected = count / PAIR_BINS**2
    joint = float(((counts - expected) ** 2 / expected).sum())
    agree_B = (_bit_counts(first ^ second) - count / 2) / math.sqrt(count / 4)
    p_value = min(
        1.0,
        2 * chi_square_tail(joint, PAIR_BINS**2 - 1),
        2 * chi_square_tail(float((agree_B**2).sum()), 32),
    )
    found = 5.5 / math.sqrt(count)
    detail = f"{count} pairs; a correlation of {found:.1g} between two of the same bits would have been found"
    return Check(f"noise: independent over {what}", None, detail, p_value)


def _avalanche(seeds_S: torch.Tensor) -> Check:
    """Flips each bit of seed and position: half of the draw's bits must change, each alone."""
    some_S = seeds_S[:512]
    positions_S = torch.arange(len(some_S)) * 7919 % 4096
    before = noise_bits(some_S, positions_S, 4)
    statistic = 0.0
    flips = [1 << place for place in range(63)] + [-(1 << 63)]
    changed = [noise_bits(some_S ^ flip, positions_S, 4) for flip in flips]
    changed += [noise_bits(some_S, positions_S ^ (1 << place), 4) for place in range(31)]
    count = before.numel()
    for after in changed:
        deviation_B = (_bit_counts(before ^ after) - count / 2) / math.sqrt(count / 4)
        statistic += float((deviation_B**2).sum())
    degrees = 32 * len(changed)
    detail = f"{len(changed)} bits of seed and position, each over {count} draws"
    return Check(
        "noise: every input bit changes half of the output", None, detail, chi_square_tail(statistic, degrees)
    )


def _no_draw_twice(bits: torch.Tensor) -> Check:
    """Counts equal draws of all four tokens of a group: one in 2^128 pairs by chance, hence none."""
    groups_N4 = bits.reshape(-1, 4)
    low = groups_N4[:, 0] | (groups_N4[:, 1] << 31 << 1)
    repeated = len(low) - len(low.unique())
    expected = len(low) ** 2 / 2.0**65
    detail = f"{repeated} of {len(low)} groups of four tokens have the noise of another"
    p_value = 1.0 if repeated == 0 else poisson_tail(repeated, expected)
    return Check("noise: no draw is used twice", None, detail, p_value)
