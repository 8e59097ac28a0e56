"""One step of all running rows: gather, forward, sample, verify, append, test for the end. No host involved.

With Q = 1 this is plain decoding. With Q = k + 1 the row's k proposed tokens are run behind its last one,
every position is sampled with its own noise, and the longest prefix where proposal equals sample is kept,
plus one more token:

    inputs      last  d1  d2  d3        proposals d1..d3 from a drafter
    samples      s1   s2  s3  s4        what the policy itself says at each position
    d1 = s1, d2 = s2, d3 != s3   ->     append s1 s2 s3: exactly what plain decoding would have appended

Drafters that follow the policy see the hidden states and the samples at the end of the step, in the same
graph. Stop tokens and limits cut the appended run where plain decoding would have stopped. How samples come
out of hidden states is `sampling.py`'s: with `verify: rejection` a proposal is its own sample where it is
accepted, and everything else is the same.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch

from paceline.drafting.base import Drafter, TargetStep
from paceline.engine.rows import Rows
from paceline.engine.sampling import StepVariant, sample_step
from paceline.engine.sequence import Sequence
from paceline.kernels.row_step import append_samples, gather_queries
from paceline.paged.cache import BLOCK_SIZE
from paceline.paged.forward import PagedForward


@dataclass(frozen=True)
class StepStatus:
    """The outcome of a step for each row of the batch, in its order."""

    # Length; 0 running, 1 ended at its limit, 2 stopped; number of tokens that were proposed.
    rows_3R: torch.Tensor
    # Logprobs and ids of the most likely tokens at each position, where a request asks for them.
    top_values_RQN: torch.Tensor | None = None
    top_tokens_RQN: torch.Tensor | None = None

    def to_host(self) -> "StepStatus":
        """Returns copies on the host, complete once the stream has come here."""
        tensors = (self.rows_3R, self.top_values_RQN, self.top_tokens_RQN)
        return StepStatus(*(None if x is None else _pinned_copy(x) for x in tensors))

    def note_top(self, index: int, sequence: Sequence, length: int) -> None:
        """Gives a sequence the most likely tokens at the positions it has just gained."""
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
    proposals_SK: torch.Tensor,
    queries: int,
    variant: StepVariant,
    followers: Listing[Drafter] = (),
    probabilities_SKV: torch.Tensor | None = None,
) -> StepStatus:
    """Advances the rows in `slots_R` by one to `queries` tokens.

    `followers` are the drafters that see the policy's hidden states; `probabilities_SKV` is what proposals
    were drawn from, for rejection.
    """
    state = rows.state
    gathered = gather_queries(state, slots_R, proposals_SK, queries, forward.max_position, BLOCK_SIZE)
    table_RB = state.block_table.index_select(0, slots_R)
    hidden_TE, captured = forward.decode(
        gathered.tokens_RQ, gathered.positions_RQ, gathered.cache_slots_RQ, table_RB, gathered.context_R
    )
    samples = sample_step(
        forward, state, hidden_TE, slots_R, gathered, variant, proposals_SK, probabilities_SKV
    )
    shape = gathered.tokens_RQ.shape
    sampled_RQ = samples.tokens_T.view(shape)
    logprobs_RQ = samples.logprobs_T.view(shape)
    rows_3R = append_samples(state, slots_R, proposals_SK, sampled_RQ, logprobs_RQ)
    for follower in followers:
        follower.observe_step(TargetStep(slots_R, gathered, sampled_RQ, captured))
    if not variant.top_logprobs:
        return StepStatus(rows_3R)
    return StepStatus(
        rows_3R, samples.top_values_TN.unflatten(0, shape), samples.top_tokens_TN.unflatten(0, shape)
    )


def _pinned_copy(x: torch.Tensor) -> torch.Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
