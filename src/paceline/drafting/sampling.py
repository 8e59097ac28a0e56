"""How a drafter with logits samples: with the request's own noise, temperature and truncation, which is what makes it agree."""

import torch

from paceline.kernels.draft_step import DraftQueries
from paceline.kernels.row_step import RowTensors
from paceline.kernels.sampler import sample, sample_truncated


def sample_draft(
    logits_RV: torch.Tensor, rows: RowTensors, slots_R: torch.Tensor, queries: DraftQueries, column: int, truncates: bool
) -> torch.Tensor:
    """The tokens at the column's sample position."""
    noise = queries.temperature_R, queries.seed_R, queries.sample_positions_CR[column]
    if truncates:
        return sample_truncated(logits_RV, *noise, rows.top_k[slots_R], rows.top_p[slots_R], rows.min_p[slots_R])[0]
    return sample(logits_RV, *noise)[0]
