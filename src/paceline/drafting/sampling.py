"""How a drafter with logits samples: with the request's own noise, temperature and truncation.

Sharing the noise is what makes its tokens agree with the policy's.
"""

import torch

from paceline.drafting.base import DrafterContext
from paceline.kernels.draft_step import DraftQueries
from paceline.kernels.rejection import Truncation, sampled_distribution
from paceline.kernels.sampler import WIDE_ROWS, sample, sample_truncated


def sample_draft(
    logits_RV: torch.Tensor,
    context: DrafterContext,
    slots_R: torch.Tensor,
    queries: DraftQueries,
    column: int,
    truncates: bool,
) -> torch.Tensor:
    """Returns the tokens at the column's sample position.

    The distribution they were drawn from is written to the context where verification asks for it.
    """
    rows = context.rows
    cut = Truncation(rows.top_k[slots_R], rows.top_p[slots_R], rows.min_p[slots_R]) if truncates else None
    if context.probabilities_SKV is not None:
        for first in range(0, len(slots_R), WIDE_ROWS):
            few = slice(first, first + WIDE_ROWS)
            cut_few = None if cut is None else cut.of_rows(few)
            context.probabilities_SKV[slots_R[few], column] = sampled_distribution(
                logits_RV[few], queries.temperature_R[few], cut_few
            ).to(context.probabilities_SKV.dtype)
    noise = queries.temperature_R, queries.seed_R, queries.sample_positions_CR[column]
    if cut is not None:
        return sample_truncated(logits_RV, *noise, cut.top_k_R, cut.top_p_R, cut.min_p_R)[0]
    return sample(logits_RV, *noise)[0]
