"""Gather and append: the kernel against the reference, the reference against plain Python for one row."""

import copy

import pytest
import torch

from paceline.kernels import row_step
from paceline.kernels.row_step import RowTensors

BLOCK_SIZE = 4
SLOTS = 7
WIDTH = 40
PROPOSALS = 7


def make_rows(seed: int, device: str = "cpu") -> tuple[RowTensors, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g)

    length = 1 + integers(20, SLOTS)
    rows = RowTensors(
        tokens=integers(5, SLOTS, WIDTH),
        logprobs=torch.randn(SLOTS, WIDTH, generator=g),
        length=length,
        limit=length + 1 + integers(6, SLOTS),
        active=integers(4, SLOTS) > 0,
        stopped=torch.zeros(SLOTS, dtype=torch.bool),
        seed=torch.randint(-(2**62), 2**62, (SLOTS,), generator=g),
        temperature=torch.rand(SLOTS, generator=g),
        top_k=torch.zeros(SLOTS, dtype=torch.int64),
        top_p=torch.ones(SLOTS),
        min_p=torch.zeros(SLOTS),
        stop_ids=torch.where(integers(2, SLOTS, 4) > 0, integers(5, SLOTS, 4), -1),
        block_table=integers(50, SLOTS, 12).int(),
    )
    slots = torch.tensor([3, 0, 6, 5, 6])  # 6 twice: the null row may stand in a batch several times
    rows.active[6] = False
    rows = RowTensors(**{name: tensor.to(device) for name, tensor in rows._asdict().items()})
    proposals = torch.where(
        torch.arange(PROPOSALS) < integers(PROPOSALS + 1, SLOTS, 1), integers(5, SLOTS, PROPOSALS), -1
    )
    return rows, slots.to(device), proposals.to(device)


@pytest.mark.parametrize("queries", [1, 2, 5, 8])
def test_append_samples_keeps_what_plain_decoding_would(queries):
    for seed in range(30):
        rows, slots, proposals = make_rows(seed)
        g = torch.Generator().manual_seed(seed + 1000)
        sampled = torch.randint(0, 5, (5, queries), generator=g)
        agree = (torch.rand(5, queries - 1, generator=g) < 0.7) & (proposals[slots, : queries - 1] >= 0)
        sampled[:, :-1] = torch.where(agree, proposals[slots, : queries - 1], sampled[:, :-1])
        logprobs = torch.randn(5, queries, generator=g)
        before = copy.deepcopy(rows)
        status = row_step.append_samples(rows, slots, proposals, sampled, logprobs)
        for i, slot in enumerate(slots.tolist()):
            expected = before.tokens[slot, : before.length[slot]].tolist()
            state = 0 if before.active[slot] else 1
            for q in range(queries if before.active[slot] else 0):
                expected.append(sampled[i, q].item())
                if expected[-1] in before.stop_ids[slot].tolist():
                    state = 2
                elif len(expected) == before.limit[slot]:
                    state = 1
                if state or (q < queries - 1 and expected[-1] != proposals[slot, q]):
                    break
            assert status[:, i].tolist() == [
                len(expected),
                state,
                sum(p >= 0 for p in proposals[slot, : queries - 1].tolist()),
            ]
            assert rows.tokens[slot, : len(expected)].tolist() == expected
            assert rows.length[slot] == len(expected) and rows.active[slot].item() == (state == 0)
            new = slice(int(before.length[slot]), len(expected))
            assert rows.logprobs[slot, new].tolist() == logprobs[i, : new.stop - new.start].tolist()
            rest = slice(len(expected), None)
            assert torch.equal(rows.tokens[slot, rest], before.tokens[slot, rest])


def check_kernels(device: str, seeds: range) -> None:
    for seed in seeds:
        for queries in (1, 3, 8):
            rows, slots, proposals = make_rows(seed, device)
            args = (slots, proposals, queries, 17, BLOCK_SIZE)
            ours = row_step.gather_queries_triton(rows, *args)
            theirs = row_step.gather_queries.reference(rows, *args)
            for name, tensor in theirs._asdict().items():
                assert torch.equal(getattr(ours, name), tensor), name
            sampled = torch.randint(0, 5, (5, queries), device=device)
            sampled[:3, :-1] = proposals[slots[:3], : queries - 1].clamp(min=0)
            logprobs = torch.randn(5, queries, device=device)
            other = copy.deepcopy(rows)
            ours = row_step.append_samples_triton(rows, slots, proposals, sampled, logprobs)
            theirs = row_step.append_samples.reference(other, slots, proposals, sampled, logprobs)
            assert torch.equal(ours, theirs)
            for name, tensor in other._asdict().items():
                assert torch.equal(getattr(rows, name), tensor), name


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 12), marks=pytest.mark.slow)], ids=str)
def test_row_step_kernels_equal_the_references_interpreted(seeds):
    pytest.importorskip("triton")
    check_kernels("cpu", seeds)


@pytest.mark.gpu
def test_row_step_kernels_equal_the_references_on_the_gpu():
    check_kernels("cuda", range(12))
