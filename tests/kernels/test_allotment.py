"""Sharing a step's tokens and packing them: kernels against references, references against plain Python."""

from dataclasses import fields

import pytest
import torch

from paceline.kernels import allotment, packing, row_step, tree_gather
from paceline.kernels.paged_attention import paged_attention_reference, paged_attention_triton
from paceline.kernels.tree_gather import TreeKeys
from tests.kernels.test_row_step import BLOCK_SIZE, PROPOSALS, SLOTS
from tests.kernels.test_tree_attention import NODES, Forest
from tests.kernels.test_tree_step import make_trees


def make_shared(seed: int, device: str = "cpu"):
    """Rows with proposals whose values are often equal."""
    rows, slots, proposals, parents = make_trees(seed, device)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 1, (SLOTS, PROPOSALS), generator=generator).float().cumsum(1).to(device)
    priority = torch.randint(-1, 2, (SLOTS,), generator=generator).float().to(device)
    return rows, slots, proposals, parents, values, priority


def shares(slots: torch.Tensor, count: int) -> list[int]:
    rows = len(slots)
    return sorted({rows, rows + 1, rows + rows * count // 3, rows * (count + 1)})


@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_likeliest_proposals_are_run(count):
    for seed in range(20):
        rows, slots, proposals, _, values, priority = make_shared(seed)
        for total in shares(slots, count):
            found = allotment.allot_tokens(rows, slots, proposals, values, priority, count, total)
            ranked = []
            for row, slot in enumerate(slots.tolist()):
                for k in range(count):
                    exists = (
                        bool(rows.active[slot])
                        and proposals[slot, k] >= 0
                        and rows.length[slot] + k < rows.limit[slot]
                    )
                    value = float(values[slot, k] + priority[slot]) if exists else float("-inf")
                    ranked.append((-value, k, row))
            ranked.sort()
            expected = [1] * len(slots)
            for _, _, row in ranked[: total - len(slots)]:
                expected[row] += 1
            assert found.tokens_R.tolist() == expected and sum(expected) == total
            for rank, (_, k, row) in enumerate(ranked):
                assert found.order_RK[row, k] == rank // len(slots)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_allotment_kernel(count, device):
    for seed in range(3):
        rows, slots, proposals, _, values, priority = make_shared(seed, device)
        for total in shares(slots, count):
            given = rows, slots, proposals, values, priority, count, total
            ours, expected = allotment.allot_tokens_triton(*given), allotment.allot_tokens_reference(*given)
            assert torch.equal(ours.tokens_R, expected.tokens_R)
            assert torch.equal(ours.order_RK, expected.order_RK)


def packed_by(run, seed: int, count: int, total: int, tree: bool, device: str = "cpu"):
    rows, slots, proposals, parents, values, priority = make_shared(seed, device)
    sizes = count + 1, 1000, BLOCK_SIZE
    if tree:
        queries, keys = tree_gather.gather_tree(rows, slots, proposals, parents, *sizes)
    else:
        queries, keys = row_step.gather_queries(rows, slots, proposals, *sizes), None
    tokens_R = allotment.allot_tokens(rows, slots, proposals, values, priority, count, total).tokens_R
    return queries, keys, tokens_R, run(slots, queries, keys, tokens_R, total)


@pytest.mark.parametrize("tree", [False, True])
def test_tokens_lie_row_after_row(tree):
    for seed in range(10):
        slots = make_shared(seed)[1]
        for total in shares(slots, 5):
            queries, keys, tokens_R, packed = packed_by(packing.pack_queries, seed, 5, total, tree)
            expected = [(row, q) for row, n in enumerate(tokens_R.tolist()) for q in range(n)]
            assert packed.ragged.row_T.tolist() == [row for row, _ in expected]
            assert packed.slots_T.tolist() == [int(slots[row]) for row, _ in expected]
            for i, (row, q) in enumerate(expected):
                for field in fields(queries):
                    if field.name != "context_R":
                        ours, theirs = (getattr(x, field.name) for x in (packed.queries, queries))
                        assert ours[i, 0] == theirs[row, q], field.name
                if tree:
                    assert packed.tree.depth_RQ[i, 0] == keys.depth_RQ[row, q]
                    assert torch.equal(packed.tree.slots_RQD[i, 0], keys.slots_RQD[row, q])
                assert packed.index_RQ[row, q] == i and packed.source_T[i] == row * 6 + q
                assert packed.cache_slots_RQ[row, q] == queries.cache_slots_RQ[row, q]
            runs = torch.arange(6) < tokens_R.unsqueeze(1)
            assert (packed.cache_slots_RQ[~runs] == -1).all()
            first = packed.ragged.first_R.unsqueeze(1).expand_as(runs)
            assert torch.equal(packed.index_RQ[~runs], first[~runs])


@pytest.mark.parametrize("tree", [False, True])
def test_packing_kernel(tree, device):
    for seed in range(3):
        slots = make_shared(seed)[1]
        for total in shares(slots, 5):
            ours = packed_by(packing.pack_queries_triton, seed, 5, total, tree, device)[-1]
            expected = packed_by(packing.pack_queries_reference, seed, 5, total, tree, device)[-1]
            for name in ("slots_T", "source_T", "index_RQ", "cache_slots_RQ"):
                assert torch.equal(getattr(ours, name), getattr(expected, name)), name
            for part, kind in (("queries", row_step.Queries), ("ragged", packing.RaggedRows)):
                for field in fields(kind):
                    x, y = (getattr(getattr(p, part), field.name) for p in (ours, expected))
                    assert x == y if isinstance(x, int) else torch.equal(x, y), field.name
            if tree:
                assert torch.equal(ours.tree.depth_RQ, expected.tree.depth_RQ)
                assert torch.equal(ours.tree.slots_RQD, expected.tree.slots_RQD)


def ragged_of(tokens: list[int], device: str) -> packing.RaggedRows:
    tokens_R = torch.tensor(tokens)
    ragged = (tokens_R.cumsum(0) - tokens_R, tokens_R, torch.arange(len(tokens)).repeat_interleave(tokens_R))
    return packing.RaggedRows(*(x.to(device) for x in ragged), max(NODES, *tokens))


@pytest.mark.parametrize(
    "programs", ["several share a row", pytest.param("one a row", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("tree", [False, True])
def test_attention_of_ragged_rows_has_each_rows_bits(tree, programs, device, monkeypatch):
    """As if every row had as many; in the kernel whether rows share programs or not."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    forest = Forest([57, 250, 64], dtype, dtype)
    forest.context[2] = -1
    tokens = [3, 16, 5]
    if programs == "one a row":
        monkeypatch.setattr("paceline.kernels.paged_attention.multiprocessors", lambda _: 1)
    runs = torch.arange(NODES) < torch.tensor(tokens).unsqueeze(1)
    for run, where in ((paged_attention_reference, "cpu"), (paged_attention_triton, device)):
        cache = [x.to(where) for x in (forest.k, forest.v, forest.table, forest.context)]
        whole = forest.tree.depth_RQ, forest.tree.slots_RQD
        keys = TreeKeys(*(x.to(where) for x in whole)) if tree else None
        packed = TreeKeys(*(x[runs].unsqueeze(1).to(where) for x in whole)) if tree else None
        expected = run(forest.q.to(where), *cache, tree=keys).cpu()[runs]
        flat = forest.q[runs].unsqueeze(1).to(where)
        ours = run(flat, *cache, tree=packed, ragged=ragged_of(tokens, where))
        assert torch.equal(ours.squeeze(1).cpu(), expected)
