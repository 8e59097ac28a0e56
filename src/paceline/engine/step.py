"""One step of all running rows: gather, forward, sample, verify, append, test for the end. No host involved.

With Q = 1 this is plain decoding. With Q = k + 1 the row's k proposed tokens are run behind its last one,
every position is sampled with its own noise, and the longest prefix where proposal equals sample is kept,
plus one more token:

    inputs      last  d1  d2  d3        proposals d1..d3 from a drafter
    samples      s1   s2  s3  s4        what the policy itself samples at each position
    d1 = s1, d2 = s2, d3 != s3   ->     append s1 s2 s3: exactly what plain decoding would have appended

A proposal may also be a tree, whose nodes run at once, each behind its own path: the walk goes from the root
to the child that equals the sample, and the path's keys and values move to their final positions
(`kernels/tree_gather.py`, `kernels/tree_walk.py`). After that it is a chain.

Samples after the first disagreement are dropped; their KV entries lie past `length` and are overwritten by
the next step. Stop tokens and limits cut the appended run where plain decoding would have stopped. Drafters
that follow the policy receive the hidden states and the samples at the end of the step, in the same graph.
`sampling.py` turns hidden states into samples: with `verify: rejection` a proposal is its own sample where it
is accepted, and everything else is the same.

Tensor names end in their shape, here and in `kernels/`, `paged/`, `drafting/` and `policy/`:

    R  rows of the batch        Q  queries per row          T  tokens, packed (R x Q in a step)
    S  slots of all rows        K  proposed tokens          B  blocks of a row's table
    V  vocabulary               E  hidden size              N  output features, or how many are wanted
    H  heads                    D  head size                L  layers
    X  experts                  F  expert's inner size      P  tokens of a piece, or positions

Digits are fixed sizes, and letters that are not listed are local to their file. Matrix products in
`kernels/` are [M, K] by [N, K]; in `learning/`, R is response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from paceline.drafting.base import HIDDEN, Drafter, TargetStep
from paceline.engine.proposals import Proposals
from paceline.engine.request_state import RequestState
from paceline.engine.rows import Rows
from paceline.engine.sampling import Samples, StepVariant, sample_step
from paceline.engine.tree_path import Path, straight_path, walked_path
from paceline.kernels.row_step import append_samples, gather_queries
from paceline.kernels.tree_gather import gather_tree
from paceline.paged.cache import BLOCK_SIZE
from paceline.paged.forward import PagedForward


class RowState(IntEnum):
    """The state of a row after a step, as `kernels/row_step.append_samples` reports it."""

    RUNNING = 0
    ENDED_AT_LIMIT = 1
    STOPPED = 2


@dataclass(frozen=True)
class StepShape:
    """The tokens that a step runs, as chains or trees."""

    rows: int
    # Per row, its last token included.
    num_queries: int
    tree: bool = False


@dataclass(frozen=True)
class StepStatus:
    """The outcome of a step for each row of the batch, in its order."""

    # Lengths, states and numbers of proposed tokens, in one tensor: one copy to the host per step.
    status_3R: torch.Tensor
    # Logprobs and ids of the most likely tokens at each position, where a request asks for them.
    top_values_RQN: torch.Tensor | None = None
    top_tokens_RQN: torch.Tensor | None = None
    # The nodes on each row's path, where trees were proposed; the root is 0.
    path_RQ: torch.Tensor | None = None

    @property
    def lengths_R(self) -> torch.Tensor:
        return self.status_3R[0]

    @property
    def states_R(self) -> torch.Tensor:
        return self.status_3R[1]

    @property
    def proposed_R(self) -> torch.Tensor:
        return self.status_3R[2]

    def to_host(self) -> "StepStatus":
        """Starts copies to pinned memory; complete once the stream reaches this point."""
        tensors = (self.status_3R, self.top_values_RQN, self.top_tokens_RQN, self.path_RQ)
        return StepStatus(*(None if x is None else _pinned_copy(x) for x in tensors))

    def append_top_logprobs(self, index: int, sequence: RequestState, length: int) -> None:
        """Appends the most likely tokens at the positions that this step added to a sequence."""
        wanted = sequence.request.sampling.top_logprobs
        gained = length - len(sequence.request.prompt) - len(sequence.top_logprobs)
        for q in range(gained if wanted else 0):
            tokens = self.top_tokens_RQN[index, q, :wanted].tolist()
            values = self.top_values_RQN[index, q, :wanted].tolist()
            sequence.top_logprobs.append(dict(zip(tokens, values, strict=True)))


def step(
    forward: PagedForward,
    rows: Rows,
    slots_R: torch.Tensor,
    proposals: Proposals,
    shape: StepShape,
    variant: StepVariant,
    followers: Sequence[Drafter] = (),
    probabilities_SKV: torch.Tensor | None = None,
    proposer: Drafter | None = None,
) -> StepStatus:
    """Advances the rows in `slots_R` by one to `shape.num_queries` tokens.

    `followers` are the drafters that receive the policy's hidden states; `probabilities_SKV` holds the
    distributions that proposals were drawn from, for rejection. `proposer` receives the paths through trees.
    """
    state = rows.state
    proposed_SK = proposals.tokens_SK
    sizes = shape.num_queries, forward.max_position, BLOCK_SIZE
    if shape.tree:
        queries, keys = gather_tree(state, slots_R, proposed_SK, proposals.parents_SK, *sizes)
    else:
        queries, keys = gather_queries(state, slots_R, proposed_SK, *sizes), None
    table_RB = state.block_table.index_select(0, slots_R)
    places = queries.positions_RQ, queries.cache_slots_RQ, table_RB, queries.context_R
    hidden_TE, captured = forward.decode(queries.tokens_RQ, *places, keys)
    allowed_RV = rows.allowed_SV.index_select(0, slots_R) if variant.masked else None
    samples = sample_step(
        forward, state, hidden_TE, slots_R, queries, variant, proposed_SK, probabilities_SKV, allowed_RV
    )
    if any(follower.wants_hidden for follower in followers):
        captured[HIDDEN] = hidden_TE
    path, kept_T = straight_path(queries, samples), queries.cache_slots_RQ.flatten()
    if shape.tree:
        path, walked = walked_path(slots_R, proposals, queries, samples)
        forward.cache.move_slots(walked.walk.sources_RQ, walked.walk.targets_RQ)
        if proposer is not None:
            proposer.observe_tree(walked)
        kept_T = walked.walk.node_targets_RQ.flatten()
    status_3R = append_samples(state, slots_R, proposed_SK, path.sampled_RQ, path.logprobs_RQ)
    for follower in followers:
        ran = queries.context_R, queries.positions_RQ.flatten(), kept_T, samples.tokens_T
        follower.observe_step(TargetStep(slots_R, *ran, captured, path.way_RQ))
    return _status(status_3R, samples, path)


def _status(status_3R: torch.Tensor, samples: Samples, path: Path) -> StepStatus:
    path_RQ = None
    if path.walk is not None:
        # For all nodes, not only those on the path.
        status_3R[2] = path.walk.proposed_R
        path_RQ = path.walk.path_RQ
    if samples.top_values_TN is None:
        return StepStatus(status_3R, path_RQ=path_RQ)
    top = samples.top_values_TN, samples.top_tokens_TN
    if path.way_RQ is None:
        shape = path.sampled_RQ.shape
        return StepStatus(status_3R, *(x_TN.unflatten(0, shape) for x_TN in top), path_RQ)
    return StepStatus(status_3R, *(x_TN[path.way_RQ] for x_TN in top), path_RQ)


def _pinned_copy(x: torch.Tensor) -> torch.Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
