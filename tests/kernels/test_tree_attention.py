"""A tree's node attends to its path and nothing else, with the bits that it has as the end of plain text."""

import random

import pytest
import torch

from paceline.kernels import paged_launch
from paceline.kernels.fp8_format import E4M3, to_e4m3
from paceline.kernels.paged_attention import paged_attention, paged_attention_triton
from paceline.kernels.paged_launch import Launch, partial_bytes, plan_attention
from paceline.kernels.row_step import TreeKeys

BLOCK_SIZE = 16
NODES = 16


def random_paths(rng: random.Random) -> list[list[int]]:
    """The path of each node, from the root to itself."""
    paths = [[0]]
    for node in range(1, NODES):
        paths.append([*paths[rng.choice([rng.randrange(node), node - 1])], node])
    return paths


class Forest:
    """Trees behind texts of some lengths, and every node's path as a text of its own in other blocks."""

    def __init__(
        self,
        contexts: list[int],
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        heads: tuple[int, int, int] = (4, 2, 32),
    ) -> None:
        """`heads`: of queries, of keys, and their size."""
        query_heads, kv_heads, head_dim = heads
        rng = random.Random(len(contexts))
        tokens = max(contexts) + NODES
        blocks = -(-tokens // BLOCK_SIZE)
        count = len(contexts) * (1 + NODES) * blocks
        cache = count + 1, BLOCK_SIZE, kv_heads, head_dim
        self.k, self.v = (torch.randn(cache).to(dtype) for _ in range(2))
        table = (torch.randperm(count) + 1).view(-1, blocks).int()
        self.table, self.path_table = table[: len(contexts)], table[len(contexts) :]
        self.context = torch.tensor(contexts)
        self.q = torch.randn(len(contexts), NODES, query_heads, head_dim).to(dtype)
        depths, slots = [], []
        for row, context in enumerate(contexts):
            paths = random_paths(rng)
            depths.append([len(path) - 1 for path in paths])
            slots.append(
                [
                    [self.slot(row, context + node) for node in path + [path[-1]] * (NODES - len(path))]
                    for path in paths
                ]
            )
            for node, path in enumerate(paths):
                line = self.path_table[row * NODES + node]
                places = [*range(context), *(context + ancestor for ancestor in path)]
                for cache in (self.k.flatten(0, 1), self.v.flatten(0, 1)):
                    source = torch.tensor([self.slot(row, place) for place in places])
                    position = torch.arange(len(places))
                    cache[line[position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE] = cache[
                        source
                    ]
        self.tree = TreeKeys(torch.tensor(depths), torch.tensor(slots))
        if kv_dtype == E4M3:
            self.k, self.v = to_e4m3(self.k.float()), to_e4m3(self.v.float())

    def slot(self, row: int, place: int) -> int:
        return int(self.table[row, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE

    @property
    def scales(self) -> tuple:
        half = self.k.shape[2] // 2
        scales = torch.tensor([0.5, 2.0] * half), torch.tensor([1.5, 0.25] * half)
        return scales if self.k.dtype == E4M3 else (None, None)

    def plain(self, run, device: str, **options) -> torch.Tensor:
        position = (self.context.unsqueeze(1) + self.tree.depth_RQ).flatten()
        q = self.q.flatten(0, 1).unsqueeze(1)
        tensors = (t.to(device) for t in (q, self.k, self.v, self.path_table, position))
        return run(*tensors, **self.scaled(device), **options).view(self.q.shape)

    def as_tree(self, run, device: str, **options) -> torch.Tensor:
        tensors = (t.to(device) for t in (self.q, self.k, self.v, self.table, self.context))
        tree = TreeKeys(self.tree.depth_RQ.to(device), self.tree.slots_RQD.to(device))
        return run(*tensors, **self.scaled(device), tree=tree, **options)

    def scaled(self, device: str) -> dict:
        return {
            name: scale if scale is None else scale.to(device)
            for name, scale in zip(("k_scale_H", "v_scale_H"), self.scales, strict=True)
        }


# Trees that begin a tile, cross into the next, and into the next group.
CONTEXTS = [0, 57, 64, 250, 300]


@pytest.mark.parametrize(
    "dtype, kv_dtype", [(torch.float32,) * 2, (torch.float64,) * 2, (torch.float32, E4M3)]
)
def test_tree_attention_reference_has_the_bits_of_each_path(dtype, kv_dtype):
    forest = Forest(CONTEXTS, dtype, kv_dtype)
    expected = forest.plain(paged_attention.reference, "cpu")
    assert torch.equal(forest.as_tree(paged_attention.reference, "cpu"), expected)


def test_tree_attention_of_inactive_rows_is_zero(device):
    forest = Forest([20, 30], torch.float32, torch.float32)
    forest.context[0] = -1
    for run in (paged_attention.reference, paged_attention_triton):
        out = forest.as_tree(run, "cpu" if run is paged_attention.reference else device)
        assert not out[0].any() and out[1].any()


@pytest.mark.usefixtures("independent_rows")
@pytest.mark.parametrize(
    "programs", ["several share a row", pytest.param("one a row", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kv_dtype", [None, pytest.param(E4M3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", ["short", pytest.param("long", marks=pytest.mark.slow)])
def test_tree_attention_kernel_has_the_bits_of_each_path(device, programs, kv_dtype, rows, monkeypatch):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    few = [57, 250] if rows == "short" else [250, 300]
    contexts = few if device == "cpu" else CONTEXTS
    # On a GPU the instructions depend on the heads. One of keys, where rows are short, has no scales.
    few_heads = (2, 1, 32) if rows == "short" and kv_dtype is None else (4, 2, 32)
    heads = few_heads if device == "cpu" else (32, 8, 128)
    forest = Forest(contexts, dtype, kv_dtype or dtype, heads)
    if rows == "long":  # what comes before the root's group is taken by programs of many nodes
        monkeypatch.setattr(paged_launch, "OWN_KEYS_GROUPS", 0)
    launch = Launch(1 if programs == "one a row" else 3, stages=2)
    ours = forest.as_tree(paged_attention_triton, device, launch=launch)
    expected = forest.plain(paged_attention_triton, device)
    assert torch.equal(ours, expected)
    if kv_dtype is None:
        reference = forest.plain(paged_attention.reference, "cpu")
        torch.testing.assert_close(ours.cpu(), reference, rtol=1e-2, atol=1e-5 if device == "cpu" else 2e-2)


def test_plan_attention_of_trees():
    """An H200 and an 8B model's heads: what nodes share is apart where rows may be long and it pays."""

    def plan(rows: int, nodes: int, max_groups: int = 17, **options):
        return plan_attention(rows, nodes, 32, 8, max_groups, processors=132, tree=True, **options)

    assert plan(8, 16).shared and plan(8, 16).far_rows == 64
    assert not plan(32, 7).shared and plan(32, 7).far_rows == 32
    assert plan(16, 7).far.stages > plan(64, 7).far.stages
    assert not plan(64, 16).shared and plan(64, 16).far_rows == 32
    for alone in (plan(8, 16, max_groups=4), plan(32, 7, fp8=True), plan(4, 2)):
        assert alone.far is None


@pytest.mark.parametrize("rows, nodes, results", [(8, 16, 24), (32, 7, 1), (64, 2, 0), (2, 1, 24)])
def test_partial_bytes_of_trees(rows, nodes, results):
    counted = partial_bytes(rows, nodes, 32, 8, 128, table_tokens=4352, processors=132, trees=True)
    assert counted == rows * nodes * 32 * results * (128 + 2) * 4
