"""History matching: the reference against brute force in Python, the kernel against the reference."""

import random

import pytest
import torch

from paceline.kernels import history_match
from paceline.kernels.history_match import MAX_MATCH, NO_SOURCE, bank_source

SLOTS, WIDTH, BANK = 5, 60, 4


def make_case(seed: int, device: str = "cpu"):
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (SLOTS, WIDTH), generator=g)
    bank = torch.randint(0, 3, (BANK, WIDTH), generator=g)
    length = torch.randint(1, WIDTH, (SLOTS,), generator=g)
    bank_length = torch.randint(1, WIDTH, (BANK,), generator=g)
    bank[0, :40] = tokens[0, :40]  # a long match, longer than MAX_MATCH
    sources = torch.full((SLOTS, 6), NO_SOURCE, dtype=torch.int32)
    for slot in range(SLOTS):
        chosen = rng.sample([*range(SLOTS), *(bank_source(e) for e in range(BANK))], rng.randint(0, 6))
        sources[slot, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    slots = torch.tensor([4, 0, 2])
    return [x.to(device) for x in (slots, tokens, length, bank, bank_length, sources)]


def brute_force(slot, tokens, length, bank, bank_length, sources, min_match, count):
    own = tokens[slot, : length[slot]].tolist()
    best = (min_match - 1, -1, -1, -1)
    answer = []
    for rank, source in enumerate(sources[slot].tolist()):
        if source == NO_SOURCE:
            continue
        sequence = tokens[source, : length[source]].tolist() if source >= 0 else bank[-2 - source, : bank_length[-2 - source]].tolist()
        for position in range(len(sequence) - 1):
            matched = 0
            while matched < min(MAX_MATCH, len(own), position + 1) and sequence[position - matched] == own[-1 - matched]:
                matched += 1
            candidate = (matched, min(len(sequence) - 1 - position, count), rank, position)
            if matched >= min_match and candidate > best:
                best, answer = candidate, sequence[position + 1 : position + 1 + count]
    return answer + [-1] * (count - len(answer))


@pytest.mark.parametrize("min_match, count", [(1, 1), (2, 5), (3, 7)])
def test_reference_is_the_brute_force(min_match, count):
    for seed in range(25):
        case = make_case(seed)
        proposals = torch.full((SLOTS, 8), 99)
        history_match.propose_from_history(*case, min_match, count, proposals)
        for slot in case[0].tolist():
            assert proposals[slot].tolist() == [*brute_force(slot, *case[1:], min_match, count), *[99] * (8 - count)]
        assert (proposals[[1, 3]] == 99).all(), "other rows are left alone"


def check_kernel(device: str) -> None:
    for seed in range(2):
        case = make_case(seed, device)
        for min_match, count in ((1, 1), (2, 5), (4, 8)):
            ours, theirs = (torch.full((SLOTS, 8), 99, device=device) for _ in range(2))
            history_match.propose_from_history_triton(*case, min_match, count, ours)
            history_match.propose_from_history_reference(*case, min_match, count, theirs)
            assert torch.equal(ours, theirs)


def test_kernel_equals_the_reference_interpreted():
    pytest.importorskip("triton")
    check_kernel("cpu")


@pytest.mark.gpu
def test_kernel_equals_the_reference_on_the_gpu():
    check_kernel("cuda")
