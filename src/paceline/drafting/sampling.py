"""How a drafter with logits samples: with the request's own noise, temperature and truncation.

Sharing the noise is what makes its tokens agree with the policy's. Where rows share what is verified, a chain
also says how likely each of its tokens is, from how far the first candidate is ahead of the second.
"""

from dataclasses import dataclass, field

import torch

from paceline.drafting.base import DrafterContext
from paceline.drafting.growth import GapCalibration
from paceline.drafting.logits import DraftLogits
from paceline.drafting.tree import TreeProposals
from paceline.kernels.draft_step import DraftQueries
from paceline.kernels.rejection import Truncation, keep_distribution
from paceline.kernels.sampler import sample, sample_truncated
from paceline.kernels.tree_choice import ROOT, Candidates


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
    return _first(logits.best(noise, 1)[0])


def _first(tokens_RN: torch.Tensor) -> torch.Tensor:
    """Returns the best candidates; there always is one, unless a logit is no number."""
    return tokens_RN[:, 0].clamp(min=0)


@dataclass
class ChainDraft:
    """The tokens of growing chains, R of them, one column after the other."""

    context: DrafterContext
    slots_R: torch.Tensor
    queries: DraftQueries
    truncates: bool
    # Of a chain that is scored: what it learned of earlier ones.
    calibration: GapCalibration | None = None
    tokens: list[torch.Tensor] = field(default_factory=list)
    cells: list[torch.Tensor] = field(default_factory=list)

    def sample(self, logits: DraftLogits) -> torch.Tensor:
        """Returns the next column's tokens."""
        column = len(self.tokens)
        if self.calibration is None:
            drawn = self.context, self.slots_R, self.queries, column, self.truncates
            self.tokens.append(sample_draft(logits, *drawn))
            return self.tokens[-1]
        rows = self.context.rows
        cut = None
        if self.truncates:
            cut = Truncation(*(x[self.slots_R] for x in (rows.top_k, rows.top_p, rows.min_p)))
        noise = self.queries.temperature_R, self.queries.seed_R, self.queries.sample_positions_CR[column]
        tokens_R2, scores_R2 = logits.best(noise, 2, cut)
        self.tokens.append(_first(tokens_R2))
        self.cells.append(self.calibration.cells(scores_R2)[:, 0])
        return self.tokens[-1]

    def propose(self, trees: TreeProposals) -> None:
        """Writes the chains into the proposals; scored ones as trees without branches."""
        tokens_RK = torch.stack(self.tokens, dim=1)
        if self.calibration is None:
            self.context.proposals_SK[self.slots_R, : len(self.tokens)] = tokens_RK
            return
        cells_RK = torch.stack(self.cells, dim=1)
        values_RK = self.calibration.log_rates()[cells_RK].cumsum(1)
        parents_K = torch.arange(len(self.tokens), device=tokens_RK.device) + ROOT
        candidates = Candidates(tokens_RK, parents_K.expand_as(tokens_RK), values_RK, cells_RK)
        trees.propose(self.slots_R, candidates, len(self.tokens))
