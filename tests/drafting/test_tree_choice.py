"""Which nodes a tree gets: brute force for choosing and merging, and rates that follow what happens."""

import random

import pytest
import torch

from paceline.drafting.branches import BranchCalibration, merged_branches
from paceline.drafting.calibration import Calibration
from paceline.drafting.growth import CANDIDATES, GapCalibration, TreeShape, depth_that_pays
from paceline.kernels.tree_choice import ROOT, Candidates, ProposedNodes, choose_nodes
from paceline.kernels.tree_counts import count_nodes
from paceline.kernels.tree_growth import GAP_BOUNDARIES, gap_cells

CPU = torch.device("cpu")


def empty_nodes(slots: int, count: int) -> ProposedNodes:
    tokens, parents, cells = torch.full((3, slots, count), -7)
    return ProposedNodes(tokens, parents, cells)


def chosen_nodes(candidates: Candidates, count: int) -> ProposedNodes:
    nodes = empty_nodes(len(candidates.tokens_RN), count)
    choose_nodes(candidates, count, torch.arange(len(candidates.tokens_RN)), nodes)
    return nodes


def random_candidates(rng: random.Random, size: int) -> Candidates:
    parents, values = [], []
    for number in range(size):
        parent = rng.randrange(-1, number)
        parents.append(parent)
        above = 0.0 if parent == ROOT else values[parent]
        values.append(-torch.inf if rng.random() < 0.2 else above - rng.uniform(0.1, 2.0))
    tokens = [-1 if value == -torch.inf else number for number, value in enumerate(values)]
    return Candidates(*(torch.tensor([x]) for x in (tokens, parents, values, [0] * size)))


def test_choose_nodes_takes_the_likeliest_behind_their_parents():
    rng = random.Random(0)
    for _ in range(50):
        candidates = random_candidates(rng, 20)
        nodes = chosen_nodes(candidates, 9)
        values, parents = candidates.values_RN[0].tolist(), candidates.parents_RN[0].tolist()
        possible = [n for n in range(20) if values[n] > -torch.inf]
        expected = sorted(possible, key=lambda n: -values[n])[:9]
        chosen = [token for token in nodes.tokens_SK[0].tolist() if token >= 0]
        assert chosen == expected, "a candidate's token is its number here"
        for node, number in enumerate(chosen):
            parent = parents[number]
            assert nodes.parents_SK[0, node] == (0 if parent == ROOT else 1 + chosen.index(parent))
            assert nodes.parents_SK[0, node] <= node
    few = chosen_nodes(random_candidates(rng, 3), 7)
    assert few.tokens_SK.shape == (1, 7) and (few.tokens_SK[0, 3:] == -1).all()


def test_merged_branches_are_a_trie():
    rng = random.Random(1)
    calibration = BranchCalibration(CPU)
    for _ in range(30):
        branches = [[rng.randrange(2) for _ in range(rng.randrange(6))] for _ in range(8)]
        tokens = torch.tensor([[branch + [-1] * (5 - len(branch)) for branch in branches]])
        matched = torch.tensor([[rng.choice([2, 4, 9, 16]) for _ in range(8)]])
        candidates = merged_branches(tokens, matched, calibration)
        exists = candidates.values_RN[0] > -torch.inf
        paths = []
        for number in exists.nonzero().squeeze(1).tolist():
            path, node = [], number
            while node != ROOT:
                assert exists[node]
                path.insert(0, int(candidates.tokens_RN[0, node]))
                parent = int(candidates.parents_RN[0, node])
                above = 0.0 if parent == ROOT else candidates.values_RN[0, parent]
                assert candidates.values_RN[0, node] < above
                node = parent
            paths.append(tuple(path))
        prefixes = {tuple(branch[:end]) for branch in branches for end in range(1, len(branch) + 1)}
        assert len(paths) == len(set(paths)) and set(paths) == prefixes


def test_calibration_rates_follow_what_happens():
    calibration = Calibration([0.5, 0.5, 0.5], CPU)
    generator = torch.Generator().manual_seed(0)
    truth = torch.tensor([0.9, 0.2, 0.5])
    slots = torch.arange(16)
    counts = calibration.tried_C, calibration.right_C, calibration.fresh_2C
    for _ in range(200):
        # Trees of one node, which the walk takes if it is right; some were not verified.
        cells = torch.randint(0, 2, (16, 1), generator=generator)
        right = (torch.rand(16, 1, generator=generator) < truth[cells]).long()
        verified = (torch.rand(16, 1, generator=generator) < 0.7).long() - 1
        path = torch.cat((torch.zeros_like(right), torch.where(verified < 0, 0, right)), 1)
        verified = torch.cat((torch.zeros_like(verified), verified), 1)
        count_nodes(path, verified, slots, torch.zeros(16, 1, dtype=torch.long), cells, *counts)
    rates = calibration.log_rates().exp()
    assert torch.allclose(rates[:2], truth[:2], atol=0.05) and rates[2] == 0.5, "nothing was seen of the last"


def test_gap_calibration_makes_closer_scores_likelier():
    calibration = GapCalibration(CPU)
    scores = torch.tensor([[5.0, 4.9, 4.8, 1.0], [5.0, 1.0, 0.0, -torch.inf], [5.0, *[-torch.inf] * 3]])
    rates = calibration.log_rates()[gap_cells(scores, torch.tensor(GAP_BOUNDARIES))].exp()
    assert rates[0, 0] < rates[1, 0] <= rates[2, 0], "a first that stands alone is surer"
    assert rates[0, 1] > rates[1, 1] and rates[0, 2] > rates[0, 3]


def test_small_tree_can_be_the_chain_of_its_nodes():
    for nodes in range(1, 8):
        assert len(TreeShape.of(nodes).widths) + 1 == nodes


@pytest.mark.parametrize("deepest", range(TreeShape.SHALLOWEST, TreeShape.LIMIT + 1))
def test_tree_shapes_keep_to_the_blocks_and_the_candidates_that_nodes_have(deepest):
    for nodes in range(1, 16):
        shape = TreeShape.of(nodes, deepest)
        assert len(shape.widths) + 1 <= min(nodes, deepest)
        assert shape.places <= nodes + 1 and all(1 <= width <= TreeShape.WIDEST for width in shape.widths)
        assert CANDIDATES * shape.places >= nodes, "as many candidates as nodes"
        widest = shape.widths == (TreeShape.WIDEST,) * len(shape.widths)
        assert sum(shape.widths) == nodes or widest or nodes == 1, "as many as have blocks"
        assert list(shape.widths) == sorted(shape.widths, reverse=True)


def test_seldom_right_head_makes_flat_trees():
    measured = 0.587, 0.355, 0.216, 0.140, 0.093  # a head of SmolLM2-135M on sums
    surer = 0.884, 0.814, 0.750, 0.685, 0.629  # on Countdown
    assert depth_that_pays(measured) == 5 and depth_that_pays(surer) == TreeShape.LIMIT
    assert depth_that_pays((0.1, 0.01)) == depth_that_pays((0.0, 0.0)) == TreeShape.SHALLOWEST
    assert depth_that_pays(()) == depth_that_pays((0.5,)) == TreeShape.DEEPEST, "nothing is known"
    depths = [depth_that_pays([rate**place for place in range(1, 6)]) for rate in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert depths == sorted(depths) and depths[0] < depths[-1]
