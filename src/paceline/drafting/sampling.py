"""How a drafter with logits samples: with the request's own noise, temperature and truncation.

Sharing the noise is what makes its tokens agree with the policy's.
"""

import torch

from paceline.drafting.base import DrafterContext
from paceline.drafting.logits import DraftLogits
from paceline.kernels.draft_step import DraftQueries
from paceline.kernels.rejection import Truncation, keep_distribution
from paceline.kernels.sampler import sample, sample_truncated


def sample_draft(
    logits: DraftLogits,
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
        kept = context.probabilities_SKV, slots_R, column
        keep_distribution(logits.full(), queries.temperature_R, cut, *kept)
    noise = queries.temperature_R, queries.seed_R, queries.sample_positions_CR[column]
    if cut is not None:
        return sample_truncated(logits.full(), *noise, cut.top_k_R, cut.top_p_R, cut.min_p_R)[0]
    if logits.vocabulary_N is None:
        return sample(logits.scores_TN, *noise)[0]
    # There always is a best candidate, unless a logit is no number.
    return logits.best(noise, 1)[0][:, 0].clamp(min=0)
