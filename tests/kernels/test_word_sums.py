"""Sums of words: the kernel and the reference against Python's own integers."""

import pytest
import torch

from paceline.kernels import word_sums
from paceline.kernels.word_sums import word_sums_reference, word_sums_triton


def by_hand(words: list[int], period: int, piece: int) -> list[int]:
    weighted = sum(word * (i % period + 1) * (i // piece + 1) for i, word in enumerate(words))
    return [signed(sum(words)), signed(weighted)]


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("count", [1, 5, 1024, 4099, 30_000])
def test_every_word_counts_by_its_place(device, count, monkeypatch):
    # Periods and pieces end within blocks, and a program takes several.
    monkeypatch.setattr(word_sums, "PERIOD", 1031)
    monkeypatch.setattr(word_sums, "PIECE", 3 * 1031)
    monkeypatch.setattr(word_sums, "MOST_PROGRAMS", 7)
    words = torch.randint(-(2**63), 2**63 - 1, (count,))
    expected = by_hand(words.tolist(), 1031, 3 * 1031)
    for run in (word_sums_triton, word_sums_reference):
        assert run(words.to(device)).tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("count", [65_521, 64 * 65_521 - 1, 64 * 65_521 + 1, 300_000_007])
def test_real_sizes(count):
    words = torch.randint(-(2**62), 2**62, (count,), device="cuda")
    assert torch.equal(word_sums_triton(words), word_sums_reference(words))
