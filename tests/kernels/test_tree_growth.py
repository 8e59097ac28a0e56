"""Growing, choosing and counting the nodes of trees: the kernels against their references, step by step."""

import pytest
import torch

from paceline.kernels import tree_choice, tree_counts, tree_growth
from paceline.kernels.tree_choice import Candidates, ProposedNodes
from paceline.kernels.tree_growth import GAPS, DraftPlaces, FoundNodes, RunNodes

COUNT = 4
ROWS = 5


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for field in value for t in tensors_of(field)] if value is not None else []


def same(ours, reference) -> None:
    for mine, expected in zip(tensors_of(ours), tensors_of(reference), strict=True):
        assert mine.dtype == expected.dtype and torch.equal(mine, expected)


def level_inputs(generator: torch.Generator, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates with equal scores, with missing ones, and with none at all among them."""
    scores = (torch.randn(nodes, COUNT, generator=generator) * 3).round().sort(descending=True).values
    missing = torch.randint(0, 12, (nodes, 1), generator=generator) + 1
    scores[torch.arange(COUNT) >= missing] = -torch.inf
    scores[0] = -torch.inf
    tokens = torch.randint(0, 900, (nodes, COUNT), generator=generator)
    return torch.where(scores > -torch.inf, tokens, -1), scores


@pytest.mark.parametrize(
    "widths",
    [
        (1, 1),
        (4, 4, 4, 3),
        *(
            pytest.param(widths, marks=pytest.mark.slow)
            for widths in ((), (3, 3, 3, 2, 2, 2), (2, 2, 2, 2, *[1] * 7))
        ),
    ],
)
def test_grow_level_kernel_is_the_reference(device, widths):
    generator = torch.Generator().manual_seed(len(widths))
    places = 1 + sum(widths)
    log_rates = -torch.rand(COUNT * GAPS + 3, generator=generator).to(device)
    slots = torch.randperm(places * ROWS, generator=generator).view(places, ROWS)
    slots[-1, 2] = -1  # past its row's limit
    slots[:, 3] = -1  # not active
    where = DraftPlaces(torch.arange(places * ROWS).view(places, ROWS).to(device), slots.to(device))
    found = [FoundNodes.empty(ROWS, COUNT * places, torch.device(device)) for _ in range(2)]
    last: list[RunNodes | None] = [None, None]
    first, used, width = 0, 1, 1
    for following in (*widths, 0):
        best = [x.to(device) for x in level_inputs(generator, ROWS * width)]
        for i, run in enumerate((tree_growth.grow_level_triton, tree_growth.grow_level.reference)):
            last[i] = run(*best, log_rates, last[i], found[i], first, where, used, following)
        same(*last)
        first, used, width = first + COUNT * width, used + following, following
    assert first == COUNT * places
    same(*found)


def test_choose_nodes_kernel_is_the_reference(device):
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([4, 0, 2], device=device)
    for size, count in ((3, 5), (20, 15), (60, 15), (90, 7)):
        # Parents before their children, and more likely; some equal, some missing.
        parents = (torch.rand(3, size, generator=generator) * torch.arange(size)).long() - 1
        steps = (torch.rand(3, size, generator=generator) * 4).round() / 4 + 0.25
        steps[torch.rand(3, size, generator=generator) < 0.1] = torch.inf
        values = torch.zeros(3, size)
        for number in range(size):
            above = parents[:, number : number + 1]
            reached = torch.where(above < 0, 0.0, values.gather(1, above.clamp(min=0)))
            values[:, number] = reached.squeeze(1) - steps[:, number]
        tokens = torch.where(values > -torch.inf, torch.arange(size), -1)
        cells = torch.randint(0, 30, (3, size), generator=generator)
        candidates = Candidates(*(x.to(device) for x in (tokens, parents, values, cells)))
        outcomes = []
        for run in (tree_choice.choose_nodes_triton, tree_choice.choose_nodes.reference):
            numbers = torch.full((3, 6, 16), -7, device=device)
            nodes = ProposedNodes(*numbers)
            outcomes.append((run(candidates, count, slots, nodes), nodes))
        (ours, our_nodes), (reference, nodes) = outcomes
        assert torch.equal(ours, reference)
        same(our_nodes, nodes)


def test_count_nodes_and_log_rates_kernels_are_the_reference(device):
    generator = torch.Generator().manual_seed(0)
    num_cells, queries = 21, 6
    prior = torch.rand(num_cells, generator=generator).to(device)
    counts = [
        (torch.zeros(2, num_cells, device=device), torch.zeros(2, num_cells, device=device)) for _ in "ab"
    ]
    for _ in range(3):
        parents = (torch.rand(8, queries + 2, generator=generator) * torch.arange(1, queries + 3)).long()
        cells = torch.randint(-1, num_cells, (8, queries + 2), generator=generator)
        slots = torch.randperm(8, generator=generator)[:4]
        verified = torch.randint(-1, 9, (4, queries), generator=generator)
        # A path of any length, whose last node stands again behind its end.
        path = torch.randint(0, queries, (4, queries), generator=generator).sort(1).values
        path[:, 0] = 0
        step = [x.to(device) for x in (path, verified, slots, parents, cells)]
        for (tried_right, fresh), run in zip(
            counts, (tree_counts.count_nodes_triton, tree_counts.count_nodes.reference), strict=True
        ):
            run(*step, *tried_right, fresh)
            assert not fresh.any()
        (ours, _), (reference, _) = counts
        assert torch.allclose(ours, reference, rtol=1e-6) and reference[1].any() and reference[0].any()
    ours = tree_counts.log_rates_triton(prior, *reference)
    assert torch.allclose(ours, tree_counts.log_rates.reference(prior, *reference), rtol=1e-6, atol=1e-6)
