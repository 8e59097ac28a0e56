"""Gathering, walking and moving trees: kernels against references, references against plain Python."""

import copy

import pytest
import torch

from paceline.kernels import move_slots, row_step, tree_gather, tree_walk
from tests.kernels.test_row_step import BLOCK_SIZE, PROPOSALS, SLOTS, make_rows


def make_trees(seed: int, device: str = "cpu"):
    rows, slots, proposals = make_rows(seed, device)
    generator = torch.Generator().manual_seed(seed + 500)
    number = torch.arange(1, PROPOSALS + 1)
    parents = (torch.rand(SLOTS, PROPOSALS, generator=generator) * number).long()
    return rows, slots, proposals, parents.to(device)


def path_of(parents: list[int], node: int) -> list[int]:
    return [*path_of(parents, parents[node - 1]), node] if node else [0]


@pytest.mark.parametrize("queries", [1, 2, 5, 8])
def test_gather_tree_puts_nodes_behind_their_paths(queries):
    for seed in range(20):
        rows, slots, proposals, parents = make_trees(seed)
        gathered, keys = tree_gather.gather_tree(rows, slots, proposals, parents, queries, 1000, BLOCK_SIZE)
        for i, slot in enumerate(slots.tolist()):
            root = int(rows.length[slot]) - 1

            def place(node: int, slot: int = slot, root: int = root) -> int:
                block = int(rows.block_table[slot, (root + node) // BLOCK_SIZE])
                return block * BLOCK_SIZE + (root + node) % BLOCK_SIZE

            stored = [bool(rows.active[slot]) and root + node < rows.limit[slot] for node in range(queries)]
            for node in range(queries):
                path = path_of(parents[slot].tolist(), node)
                assert gathered.positions_RQ[i, node] == root + len(path) - 1
                assert gathered.sample_positions_RQ[i, node] == root + len(path)
                assert gathered.cache_slots_RQ[i, node] == (place(node) if stored[node] else -1)
                assert keys.depth_RQ[i, node] == len(path) - 1
                found = keys.slots_RQD[i, node].tolist()
                expected = [place(n) if stored[n] else 0 for n in path + [node] * (queries - len(path))]
                assert found == expected


def samples_for(rows, slots, proposals, parents, queries, seed):
    """Samples that agree with some child rather often."""
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.randint(0, 5, (len(slots), queries), generator=generator)
    for i, slot in enumerate(slots.tolist()):
        for node in range(1, queries):
            if proposals[slot, node - 1] >= 0 and torch.rand((), generator=generator) < 0.6:
                sampled[i, parents[slot, node - 1]] = proposals[slot, node - 1]
    return sampled.to(proposals.device), torch.randn(sampled.shape, generator=generator).to(proposals.device)


@pytest.mark.parametrize("queries", [1, 2, 5, 8])
def test_walk_tree_follows_what_was_sampled(queries):
    longest = 0
    for seed in range(40):
        rows, slots, proposals, parents = make_trees(seed)
        gathered, _ = tree_gather.gather_tree(rows, slots, proposals, parents, queries, 1000, BLOCK_SIZE)
        sampled, logprobs = samples_for(rows, slots, proposals, parents, queries, seed)
        tokens = proposals.clone()
        walk = tree_walk.walk_tree(slots, proposals, parents, gathered, sampled, logprobs)
        for i, slot in enumerate(slots.tolist()):
            path = [0]
            exists = [
                False,
                *((tokens[slot, : queries - 1] >= 0) & (gathered.cache_slots_RQ[i, 1:] >= 0)).tolist(),
            ]
            while True:
                children = [
                    node
                    for node in range(1, queries)
                    if exists[node]
                    and parents[slot, node - 1] == path[-1]
                    and tokens[slot, node - 1] == sampled[i, path[-1]]
                ]
                if not children:
                    break
                path.append(max(children))
            if slot == 6:
                continue  # the null row stands in the batch twice, and its proposals mean nothing
            longest = max(longest, len(path))
            assert walk.steps_R[i] == len(path) and walk.proposed_R[i] == sum(exists)
            assert walk.path_RQ[i, : len(path)].tolist() == path
            assert walk.sampled_RQ[i, : len(path)].tolist() == sampled[i, path].tolist()
            assert walk.logprobs_RQ[i, : len(path)].tolist() == logprobs[i, path].tolist()
            assert walk.sources_RQ[i, : len(path)].tolist() == gathered.cache_slots_RQ[i, path].tolist()
            assert (
                walk.targets_RQ[i, : len(path)].tolist() == gathered.cache_slots_RQ[i, : len(path)].tolist()
            )
            assert (walk.targets_RQ[i, len(path) :] == -1).all()
            chain = [*sampled[i, path[:-1]].tolist(), *[-1] * (queries - len(path))]
            assert proposals[slot, : queries - 1].tolist() == chain
    assert longest >= min(queries, 4)


def check_kernels(device: str, seeds: range) -> None:
    for seed in seeds:
        for queries in (1, 3, 8):
            rows, slots, proposals, parents = make_trees(seed, device)
            arguments = rows, slots, proposals, parents, queries, 17, BLOCK_SIZE
            ours, our_keys = row_step.launch_gather(*arguments)
            theirs, their_keys = tree_gather.gather_tree.reference(*arguments)
            for mine, reference in ((ours, theirs), (our_keys, their_keys)):
                for name, tensor in reference._asdict().items():
                    assert torch.equal(getattr(mine, name), tensor), name
            sampled = samples_for(rows, slots, proposals, parents, queries, seed)
            other = copy.deepcopy(proposals)
            ours = tree_walk.walk_tree_triton(slots, proposals, parents, theirs, *sampled)
            reference = tree_walk.walk_tree.reference(slots, other, parents, theirs, *sampled)
            for name, tensor in reference._asdict().items():
                assert torch.equal(getattr(ours, name), tensor), name
            # All but the null row's, which stands in the batch twice.
            assert torch.equal(proposals[:6], other[:6])


def check_moves(device: str) -> None:
    for width in (3, 260):
        storage = torch.randint(0, 1000, (2, 24, width), dtype=torch.int32)
        sources = torch.tensor([[0, 2, 3, 7], [8, 9, 12, 13], [16, 20, 21, -1], [-1] * 4])
        targets = torch.tensor([[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, -1, 19], [-1] * 4])
        expected = storage.clone()
        for source, target in zip(sources.flatten().tolist(), targets.flatten().tolist(), strict=True):
            if min(source, target) >= 0:
                expected[:, target] = storage[:, source]
        for run in (move_slots.move_slots_triton, move_slots.move_slots.reference):
            moved = storage.clone().to(device)
            run(moved, sources.to(device), targets.to(device))
            assert torch.equal(moved.cpu(), expected)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 8), marks=pytest.mark.slow)], ids=str)
def test_tree_step_kernels_equal_the_references_interpreted(seeds):
    pytest.importorskip("triton")
    check_kernels("cpu", seeds)
    check_moves("cpu")


@pytest.mark.gpu
def test_tree_step_kernels_equal_the_references_on_the_gpu():
    check_kernels("cuda", range(8))
    check_moves("cuda")
