"""From a step's hidden states to its samples: LM head and sampler, over one piece of the tokens at a time.

    hidden states   | piece 0 | piece 1 | piece 2 |        [T, E]
    logits            [piece, V]                           of one piece; the next one's reuse the memory
    samples         | piece 0 | piece 1 | piece 2 |        [T]

All logits of 256 rows with 8 queries would be 1.2 GB (vocabulary of 151,936), and every captured graph of
another size would keep its own. Rejection needs a row's queries together, so its pieces are whole rows.
"""

from dataclasses import dataclass, fields
from enum import StrEnum

import torch

from paceline.kernels.rejection import Truncation, verify_by_rejection
from paceline.kernels.row_step import Queries, RowTensors
from paceline.kernels.sampler import sample, sample_truncated, top_logprobs
from paceline.paged.forward import PagedForward

# Tokens of a piece. From about here on an H200 takes longer to multiply (0.45 ms for Qwen3-8B's head) than to
# read the head's weight (0.27 ms), so more and smaller products cost no time; twice as many tokens would save
# 4% of the head's time and take another 0.16 GB. A multiple of `kernels/row_tiles.py`'s ROW_TILE, so a CPU
# pads no more rows than it would without pieces.
SAMPLE_TOKENS = 256
# The logit of a token that a grammar forbids: no noise lifts it, and sums over a part of the vocabulary stay
# finite.
FORBIDDEN = -1e30


class Verify(StrEnum):
    """How a step decides which tokens of a proposal it keeps."""

    SHARED_NOISE = "shared-noise"
    REJECTION = "rejection"
    # For a drafter without probabilities: its proposals count as certain.
    REJECTION_WITHOUT_PROBABILITIES = "rejection-without-probabilities"


@dataclass(frozen=True)
class StepVariant:
    """What the batch needs beyond plain sampling; each combination is a separate graph."""

    truncates: bool = False
    top_logprobs: int = 0
    verify: Verify = Verify.SHARED_NOISE
    masked: bool = False  # by a grammar, in some row; every row has one query then


@dataclass(frozen=True)
class Samples:
    """The sampled tokens and logprobs of a step or a piece of it."""

    tokens_T: torch.Tensor
    logprobs_T: torch.Tensor
    top_values_TN: torch.Tensor | None = None
    top_tokens_TN: torch.Tensor | None = None

    @staticmethod
    def joined(pieces: list["Samples"]) -> "Samples":
        if len(pieces) == 1:
            return pieces[0]
        columns = ([getattr(piece, field.name) for piece in pieces] for field in fields(Samples))
        return Samples(*(None if column[0] is None else torch.cat(column) for column in columns))


def sample_step(
    forward: PagedForward,
    rows: RowTensors,
    hidden_TE: torch.Tensor,
    slots_R: torch.Tensor,
    queries: Queries,
    variant: StepVariant,
    proposals_SK: torch.Tensor,
    probabilities_SKV: torch.Tensor | None,
    allowed_RV: torch.Tensor | None = None,
) -> Samples:
    """Returns one sample for each of the R x Q hidden states.

    `probabilities_SKV` holds the distributions that proposals were drawn from, for rejection; `allowed_RV`
    says which tokens grammars allow.
    """
    num_queries = queries.tokens_RQ.shape[1]
    size = SAMPLE_TOKENS
    if variant.verify is not Verify.SHARED_NOISE:
        size = max(1, SAMPLE_TOKENS // num_queries) * num_queries
    known_SKV = probabilities_SKV if variant.verify is Verify.REJECTION else None
    slots_T = slots_R.repeat_interleave(num_queries) if variant.truncates else None

    def sampled(piece: slice) -> Samples:
        """Samples a piece; a function, so that its logits are freed before the next piece's are made."""
        logits_PV = forward.logits(hidden_TE[piece])
        if allowed_RV is not None:
            logits_PV = logits_PV.masked_fill(~allowed_RV[piece], FORBIDDEN)
        temperature_P = queries.temperature_RQ.flatten()[piece]
        if variant.verify is Verify.SHARED_NOISE:
            noise = (
                temperature_P,
                queries.seed_RQ.flatten()[piece],
                queries.sample_positions_RQ.flatten()[piece],
            )
            tokens_P, logprobs_P = _by_shared_noise(
                logits_PV, *noise, None if slots_T is None else _truncation(rows, slots_T[piece])
            )
        else:
            whole = slice(piece.start // num_queries, piece.stop // num_queries)
            of_rows = logits_PV, slots_R[whole], _of_rows(queries, whole)
            tokens_P, logprobs_P = _by_rejection(rows, *of_rows, variant.truncates, proposals_SK, known_SKV)
        top = top_logprobs(logits_PV, temperature_P, variant.top_logprobs) if variant.top_logprobs else ()
        return Samples(tokens_P, logprobs_P, *top)

    return Samples.joined([sampled(slice(first, first + size)) for first in range(0, len(hidden_TE), size)])


def _by_shared_noise(
    logits_PV: torch.Tensor,
    temperature_P: torch.Tensor,
    seed_P: torch.Tensor,
    position_P: torch.Tensor,
    truncation: Truncation | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if truncation is None:
        return sample(logits_PV, temperature_P, seed_P, position_P)
    cut = truncation.top_k_R, truncation.top_p_R, truncation.min_p_R
    return sample_truncated(logits_PV, temperature_P, seed_P, position_P, *cut)[:2]


def _by_rejection(
    rows: RowTensors,
    logits_PV: torch.Tensor,
    slots_R: torch.Tensor,
    queries: Queries,
    truncates: bool,
    proposals_SK: torch.Tensor,
    probabilities_SKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_queries = queries.tokens_RQ.shape
    tokens_RQ, logprobs_RQ = verify_by_rejection(
        logits_PV.unflatten(0, (num_rows, num_queries)),
        queries.temperature_RQ,
        queries.seed_RQ,
        queries.sample_positions_RQ,
        _truncation(rows, slots_R) if truncates else None,
        proposals_SK[slots_R, : num_queries - 1],
        probabilities_SKV,
        slots_R,
    )
    return tokens_RQ.flatten(), logprobs_RQ.flatten()


def _truncation(rows: RowTensors, slots: torch.Tensor) -> Truncation:
    return Truncation(rows.top_k[slots], rows.top_p[slots], rows.min_p[slots])


def _of_rows(queries: Queries, few: slice) -> Queries:
    return Queries(*(x[few] for x in queries))
