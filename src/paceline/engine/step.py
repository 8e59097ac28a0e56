"""One step of all running rows: gather, forward, sample, verify, append, test for the end. No host involved.

With Q = 1 this is plain decoding. With Q = k + 1 the row's k proposed tokens are run behind its last one, every position
is sampled with its own noise, and the longest prefix where proposal equals sample is kept, plus one more token:

    inputs      last  d1  d2  d3        proposals d1..d3 from a drafter
    samples      s1   s2  s3  s4        what the policy itself says at each position
    d1 = s1, d2 = s2, d3 != s3   ->     append s1 s2 s3: exactly what plain decoding would have appended

Drafters that follow the policy see the hidden states and the samples at the end of the step, in the same graph.
Stop tokens and limits cut the appended run where plain decoding would have stopped. With `verify: rejection` the samples come
from `kernels/rejection.py`, which gives a proposal itself where it accepts it; everything else is the same.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from enum import StrEnum

import torch

from paceline.drafting.base import Drafter, TargetStep
from paceline.engine.rows import Rows
from paceline.engine.sequence import Sequence
from paceline.kernels.rejection import Truncation, verify_by_rejection
from paceline.kernels.row_step import Queries, append_samples, gather_queries
from paceline.kernels.sampler import sample, sample_truncated
from paceline.paged.cache import BLOCK_SIZE
from paceline.paged.forward import PagedForward


class Verify(StrEnum):
    """How a step decides what it keeps of a proposal."""

    SHARED_NOISE = "shared-noise"
    REJECTION = "rejection"
    REJECTION_OF_CERTAIN = "rejection-of-certain"  # of a drafter without probabilities


@dataclass(frozen=True)
class StepVariant:
    """What the batch needs beyond plain sampling; each combination is a graph of its own."""

    truncates: bool = False
    top_logprobs: int = 0
    verify: Verify = Verify.SHARED_NOISE


@dataclass(frozen=True)
class StepStatus:
    """The outcome of a step for each row of the batch, in its order."""

    lengths_states: torch.Tensor  # [2, R]: length; 0 running, 1 ended at its limit, 2 stopped
    top_values_RQN: torch.Tensor | None = None
    top_tokens_RQN: torch.Tensor | None = None

    def to_host(self) -> "StepStatus":
        """Copies that are complete once the stream has come here."""
        return StepStatus(*(None if x is None else _pinned_copy(x) for x in (self.lengths_states, self.top_values_RQN, self.top_tokens_RQN)))

    def note_top(self, index: int, sequence: Sequence, length: int) -> None:
        """Gives a sequence the most likely tokens at the positions it has just gained."""
        wanted = sequence.request.sampling.top_logprobs
        gained = length - len(sequence.request.prompt) - len(sequence.top_logprobs)
        for q in range(gained if wanted else 0):
            tokens, values = self.top_tokens_RQN[index, q, :wanted].tolist(), self.top_values_RQN[index, q, :wanted].tolist()
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
    """Advances the rows in `slots_R` by one to `queries` tokens; `probabilities_SKV` is what proposals were drawn from, for rejection."""
    state = rows.state
    gathered = gather_queries(state, slots_R, proposals_SK, queries, forward.max_position, BLOCK_SIZE)
    table_RB = state.block_table.index_select(0, slots_R)
    hidden_TE, captured = forward.decode(gathered.tokens_RQ, gathered.positions_RQ, gathered.cache_slots_RQ, table_RB, gathered.context_R)
    logits_TV = forward.logits(hidden_TE)
    if variant.verify is Verify.SHARED_NOISE:
        sampled_T, logprobs_T = _sample(rows, logits_TV, slots_R, gathered, variant.truncates)
    else:
        known_SKV = probabilities_SKV if variant.verify is Verify.REJECTION else None
        sampled_T, logprobs_T = _sample_by_rejection(rows, logits_TV, slots_R, gathered, variant.truncates, proposals_SK, known_SKV)
    shape = gathered.tokens_RQ.shape
    lengths_states = append_samples(state, slots_R, proposals_SK, sampled_T.view(shape), logprobs_T.view(shape))
    for follower in followers:
        follower.observe_step(TargetStep(slots_R, gathered, sampled_T.view(shape), captured))
    if not variant.top_logprobs:
        return StepStatus(lengths_states)
    temperature_T1 = gathered.temperature_RQ.flatten().unsqueeze(1)
    scaled_TV = logits_TV / torch.where(temperature_T1 > 0, temperature_T1, 1.0)
    top = scaled_TV.log_softmax(-1).topk(variant.top_logprobs)
    return StepStatus(lengths_states, top.values.unflatten(0, shape), top.indices.unflatten(0, shape))


def _pinned_copy(x: torch.Tensor) -> torch.Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def _sample(rows: Rows, logits_TV: torch.Tensor, slots_R: torch.Tensor, gathered: Queries, truncates: bool) -> tuple[torch.Tensor, torch.Tensor]:
    noise = gathered.temperature_RQ.flatten(), gathered.seed_RQ.flatten(), gathered.sample_positions_RQ.flatten()
    if not truncates:
        return sample(logits_TV, *noise)
    slots_T = slots_R.repeat_interleave(gathered.tokens_RQ.shape[1])
    state = rows.state
    tokens_T, logprobs_T, _ = sample_truncated(logits_TV, *noise, state.top_k[slots_T], state.top_p[slots_T], state.min_p[slots_T])
    return tokens_T, logprobs_T


def _sample_by_rejection(
    rows: Rows,
    logits_TV: torch.Tensor,
    slots_R: torch.Tensor,
    gathered: Queries,
    truncates: bool,
    proposals_SK: torch.Tensor,
    probabilities_SKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, state = gathered.tokens_RQ.shape[1] - 1, rows.state
    truncation = Truncation(state.top_k[slots_R], state.top_p[slots_R], state.min_p[slots_R]) if truncates else None
    return verify_by_rejection(
        logits_TV.unflatten(0, gathered.tokens_RQ.shape), gathered.temperature_RQ, gathered.seed_RQ, gathered.sample_positions_RQ,
        truncation, proposals_SK[slots_R, :count], None if probabilities_SKV is None else probabilities_SKV[slots_R, :count],
    )  # fmt: skip
