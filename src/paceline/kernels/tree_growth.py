"""One depth of growing trees: the children of the nodes that a drafter ran, and the nodes it runs next.

    nodes run last, W a row      their candidates, M each         nodes run next
    a  b                         a0 a1 a2 a3  b0 b1 b2 b3         a1 a0 b2
    value: log P(reached)        value + log rate of its cell     the best by value, whatever their parent

A candidate's cell is its rank and how far its score is behind the first's (for the first: how far the second
is behind it). Candidates of all depths lie in one table, in the order in which they were found. One launch.
"""

from typing import NamedTuple

import torch

from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.row_step import TreeKeys
from paceline.kernels.tree_choice import ROOT, Candidates, order_by_value
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Boundaries of the gaps between scores that are told apart; in units of score, which are nats.
GAP_BOUNDARIES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5)
GAPS = len(GAP_BOUNDARIES) + 1
# Nodes that a row may run at a time, and how long a path of them may be.
MAX_WIDTH = 4
MAX_DEPTH = 16

_ROOT = tl.constexpr(ROOT)
_GAP_BOUNDARIES = tl.constexpr(GAP_BOUNDARIES)
_GAPS = tl.constexpr(GAPS)
_MAX_DEPTH = tl.constexpr(MAX_DEPTH)


class FoundNodes(NamedTuple):
    """Room for all candidates of R trees, N each."""

    candidates: Candidates
    # Where a candidate's keys lie in the drafter's cache, behind the root; -1: nowhere.
    places_RN: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, size: int, device: torch.device) -> "FoundNodes":
        tokens, parents, cells, places = torch.empty(4, num_rows, size, dtype=torch.int64, device=device)
        values = torch.empty(num_rows, size, dtype=torch.float32, device=device)
        return cls(Candidates(tokens, parents, values, cells), places)


class DraftPlaces(NamedTuple):
    """Positions and cache slots of what a drafter runs: the root, then as many places as it may need."""

    # By depth.
    positions_CR: torch.Tensor
    # By place, -1: there is none.
    cache_slots_CR: torch.Tensor


class RunNodes(NamedTuple):
    """The nodes of one depth that a drafter runs, W for each of R rows."""

    tokens_RW: torch.Tensor
    positions_RW: torch.Tensor
    # -1: do not store.
    cache_slots_RW: torch.Tensor
    keys: TreeKeys
    # The place of each one's parent among the nodes of all rows that were run before, `[R x W]`.
    above_T: torch.Tensor
    # Their numbers among the candidates, and the log of how likely each is to be reached.
    numbers_RW: torch.Tensor
    values_RW: torch.Tensor

    @property
    def width(self) -> int:
        return self.tokens_RW.shape[1]

    @property
    def depth(self) -> int:
        return self.keys.slots_RQD.shape[2] - 1

    @classmethod
    def empty(cls, depth: int, num_rows: int, width: int, device: torch.device) -> "RunNodes":
        tokens, positions, slots, own_depth, above, numbers = torch.empty(
            6, num_rows, width, dtype=torch.int64, device=device
        )
        keys = TreeKeys(own_depth, torch.empty(num_rows, width, depth + 1, dtype=torch.int64, device=device))
        values = torch.empty(num_rows, width, dtype=torch.float32, device=device)
        return cls(tokens, positions, slots, keys, above.view(-1), numbers, values)


def gap_cells(scores_TM: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """Returns the cells of candidates with these scores, best first; `boundaries` are GAP_BOUNDARIES."""
    gaps_TM = scores_TM[:, :1] - scores_TM
    gaps_TM[:, 0] = gaps_TM[:, 1]
    # Where there is only one candidate the gap is infinite; where there is none it is no number.
    bins_TM = torch.bucketize(gaps_TM.nan_to_num(nan=0.0).float(), boundaries)
    return torch.arange(scores_TM.shape[1], device=scores_TM.device) * GAPS + bins_TM


@triton.jit(do_not_specialize=["num_rows", "num_found", "first", "used", "depth", "width", "next_width"])
def _grow_kernel(
    given,
    last,
    found,
    places,
    following,
    num_rows,
    num_found,
    first,
    used,
    depth,
    width,
    next_width,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row.

    The nodes run last are `width` at `depth`, with COUNT candidates each; None: these are the roots. Where
    nothing follows, nothing is run next. Sizes are no constants: compiling takes half a second, and there are
    many kinds of trees.
    """
    launch_next(PDL)
    wait_previous(PDL)
    tokens_ptr, scores_ptr, log_rates_ptr = given
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK_N)
    exists = number < width * COUNT
    parent, rank = number // COUNT, number % COUNT
    from_row = (row * width) * COUNT
    token = tl.load(tokens_ptr + from_row + number, mask=exists, other=-1)
    leader = tl.load(scores_ptr + from_row + parent * COUNT, mask=exists, other=0.0)
    # The first is compared with the second.
    compared = parent * COUNT + tl.maximum(rank, 1)
    gap = leader - tl.load(scores_ptr + from_row + compared, mask=exists, other=0.0)
    cell = rank * _GAPS
    for i in tl.static_range(_GAPS - 1):
        # False where the gap is no number.
        cell += (gap > _GAP_BOUNDARIES[i]).to(tl.int32)
    if last is None:
        number_above = tl.full((BLOCK_N,), _ROOT, tl.int64)
        value_above = tl.zeros((BLOCK_N,), tl.float32)
    else:
        number_above = tl.load(last.numbers_RW + row * width + parent, mask=exists, other=0)
        value_above = tl.load(last.values_RW + row * width + parent, mask=exists, other=0.0)
    rate = tl.load(log_rates_ptr + cell, mask=exists, other=0.0)
    value = value_above + tl.where(token >= 0, rate, -float("inf"))
    order = order_by_value(value, number, exists)
    runs = exists & (order < next_width)
    out = row * num_found + first + number
    tl.store(found.candidates.tokens_RN + out, token, mask=exists)
    tl.store(found.candidates.parents_RN + out, number_above, mask=exists)
    tl.store(found.candidates.values_RN + out, value, mask=exists)
    tl.store(found.candidates.cells_RN + out, cell.to(tl.int64), mask=exists)
    tl.store(found.places_RN + out, tl.where(runs, used + order, -1).to(tl.int64), mask=exists)
    if following is not None:
        node = row * next_width + order
        place = (used + order) * num_rows + row
        own_slot = tl.load(places.cache_slots_CR + place, mask=runs, other=-1)
        tl.store(following.tokens_RW + node, tl.maximum(token, 0), mask=runs)
        position = tl.load(places.positions_CR + (depth + 1) * num_rows + row)
        tl.store(following.positions_RW + node, tl.zeros_like(token) + position, mask=runs)
        tl.store(following.cache_slots_RW + node, own_slot, mask=runs)
        tl.store(following.keys.depth_RQ + node, tl.zeros_like(token) + (depth + 1), mask=runs)
        tl.store(following.above_T + node, row * width + parent, mask=runs)
        tl.store(following.numbers_RW + node, (first + number).to(tl.int64), mask=runs)
        tl.store(following.values_RW + node, value, mask=runs)
        place_above = tl.arange(0, _MAX_DEPTH)
        if last is None:
            root_slot = tl.load(places.cache_slots_CR + row)
            above = tl.zeros((BLOCK_N, _MAX_DEPTH), tl.int64) + root_slot
        else:
            line = (row * width + parent) * (depth + 1)
            above = tl.load(
                last.keys.slots_RQD + line[:, None] + place_above[None, :],
                mask=runs[:, None] & (place_above <= depth)[None, :],
                other=0,
            )
        slots = tl.maximum(tl.where(place_above[None, :] <= depth, above, own_slot[:, None]), 0)
        line = node * (depth + 2)
        tl.store(
            following.keys.slots_RQD + line[:, None] + place_above[None, :],
            slots,
            mask=runs[:, None] & (place_above <= depth + 1)[None, :],
        )


def grow_level_triton(tokens_TM, scores_TM, log_rates_C, last, found, first, places, used, next_width):
    num_rows, num_found = found.places_RN.shape
    count = tokens_TM.shape[1]
    width = len(tokens_TM) // num_rows
    depth = 0 if last is None else last.depth
    assert width <= MAX_WIDTH and depth + 2 <= MAX_DEPTH
    following = RunNodes.empty(depth + 1, num_rows, next_width, tokens_TM.device) if next_width else None
    _grow_kernel[(num_rows,)](
        (tokens_TM, scores_TM, log_rates_C),
        last,
        found,
        places,
        following,
        *(num_rows, num_found, first, used, depth, width, next_width),
        COUNT=count,
        BLOCK_N=next_power_of_2(MAX_WIDTH * count),
        **launch_options(num_warps=1),
    )
    return following


@reference_of(grow_level_triton)
def grow_level(
    tokens_TM: torch.Tensor,
    scores_TM: torch.Tensor,
    log_rates_C: torch.Tensor,
    last: RunNodes | None,
    found: FoundNodes,
    first: int,
    places: DraftPlaces,
    used: int,
    next_width: int,
) -> RunNodes | None:
    """Writes the candidates of the nodes that were run last into `found` and returns the nodes to run next.

    Args:
        tokens_TM: The M best candidates of each of the R x W nodes, best first; -1: there is none.
        scores_TM: Their scores.
        log_rates_C: How likely candidates of each cell are, `[M x GAPS]` or more.
        last: The nodes that were run last; None: the roots.
        found: All candidates of these trees.
        first: How many of a tree's candidates were found before.
        places: Where a drafter's nodes lie.
        used: How many of these places have been used, the root's included.
        next_width: How many nodes to run next for each row; 0: none, and None is returned.
    """
    num_rows = len(found.places_RN)
    device = tokens_TM.device
    width = len(tokens_TM) // num_rows
    size = tokens_TM[0].numel() * width
    if last is None:
        depth = 0
        numbers_RW = torch.full((num_rows, 1), ROOT, device=device)
        last_values_RW = torch.zeros(num_rows, 1, device=device)
        slots_RWD = places.cache_slots_CR[0].view(-1, 1, 1).clamp(min=0)
    else:
        depth, numbers_RW, last_values_RW = last.depth, last.numbers_RW, last.values_RW
        slots_RWD = last.keys.slots_RQD
    cells_TM = gap_cells(scores_TM, torch.tensor(GAP_BOUNDARIES, device=device))
    rates_TM = torch.where(tokens_TM >= 0, log_rates_C[cells_TM], -torch.inf)
    level = slice(first, first + size)
    tokens_RN = found.candidates.tokens_RN[:, level]
    values_RN = found.candidates.values_RN[:, level]
    tokens_RN.copy_(tokens_TM.view(num_rows, -1))
    found.candidates.parents_RN[:, level] = numbers_RW.repeat_interleave(size // width, dim=1)
    values_RN.copy_((last_values_RW.unsqueeze(2) + rates_TM.view(num_rows, width, -1)).flatten(1))
    found.candidates.cells_RN[:, level] = cells_TM.view(num_rows, -1)
    found.places_RN[:, level] = -1
    if not next_width:
        return None
    picked_RW = values_RN.sort(dim=1, descending=True, stable=True).indices[:, :next_width]
    places_W = used + torch.arange(next_width, device=device)
    found.places_RN[:, level].scatter_(1, picked_RW, places_W.expand_as(picked_RW))
    parents_RW = picked_RW // (size // width)
    own_RW = places.cache_slots_CR[used : used + next_width].T
    above_RWD = slots_RWD.gather(1, parents_RW.unsqueeze(2).expand(-1, -1, depth + 1))
    keys = TreeKeys(
        torch.full_like(picked_RW, depth + 1), torch.cat((above_RWD, own_RW.clamp(min=0).unsqueeze(2)), dim=2)
    )
    row_R1 = torch.arange(num_rows, device=device).unsqueeze(1)
    return RunNodes(
        tokens_RN.gather(1, picked_RW).clamp(min=0),
        places.positions_CR[depth + 1].unsqueeze(1).repeat(1, next_width),
        own_RW.contiguous(),
        keys,
        (row_R1 * width + parents_RW).flatten(),
        first + picked_RW,
        values_RN.gather(1, picked_RW),
    )
