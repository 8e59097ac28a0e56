"""Sums of words: the kernel and the reference against Python's own integers."""

import pytest
import torch

from paceline.kernels import word_sums
from paceline.kernels.word_sums import WordTable, word_sums_reference, word_sums_triton


def by_hand(words: list[int], period: int, piece: int) -> list[int]:
    weighted = sum(word * (i % period + 1) * (i // piece + 1) for i, word in enumerate(words))
    return [signed(sum(words)), signed(weighted)]


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


COUNTS = [5, 0, 1024, 1, 4099, 30_000]


def kernel_sums(pieces: list[torch.Tensor]) -> torch.Tensor:
    addresses, counts = [words.data_ptr() for words in pieces], [len(words) for words in pieces]
    return word_sums_triton(WordTable.of(addresses, counts, pieces[0].device))


def test_word_sums_weigh_every_word_by_its_place(device, monkeypatch):
    # Periods and pieces end within blocks, and a program takes several.
    monkeypatch.setattr(word_sums, "PERIOD", 1031)
    monkeypatch.setattr(word_sums, "PIECE", 3 * 1031)
    monkeypatch.setattr(word_sums, "BLOCKS", 3)
    pieces = [torch.randint(-(2**63), 2**63 - 1, (count,)) for count in COUNTS]
    expected = [by_hand(words.tolist(), 1031, 3 * 1031) for words in pieces]
    there = [words.to(device) for words in pieces]
    assert [word_sums_reference(words).tolist() for words in there] == expected
    assert kernel_sums(there).tolist() == expected


@pytest.mark.gpu
def test_word_sums_of_real_sizes():
    counts = [65_521, 64 * 65_521 - 1, 64 * 65_521 + 1, 300_000_007]
    pieces = [torch.randint(-(2**62), 2**62, (count,), device="cuda") for count in counts]
    assert torch.equal(kernel_sums(pieces), torch.stack([word_sums_reference(words) for words in pieces]))
