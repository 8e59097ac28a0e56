"""Which tokens top-k, top-p and min-p leave, by their definitions, and what is left where logits may be off.

Scores are logits over the temperature. In this order:

    top-k    the k highest scores; of equal ones the lower id
    top-p    within those, every token before which less than p of their mass lies, the higher scores first
    min-p    tokens at least min_p times as likely as the most likely one

`kept` is that. `surely_kept` and `maybe_kept` are the same where every score may be off by `slack`: two
scores change places only if they are within 2 x slack, odds and ratios change by exp(2 x slack) at most.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

# What float32 may do to a mass, or to a limit that a backend stores.
MASS_ERROR = 1e-6


class Sampling(Protocol):
    """The parameters of a request that decide which token it draws."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def scores_of(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns logits over the temperature in float64; at temperature 0 the logits."""
    return logits_NV.double() / (temperature if temperature > 0 else 1.0)


@dataclass(frozen=True)
class Ranked:
    """Scores from the highest to the lowest, and which token each belongs to."""

    scores_NV: torch.Tensor
    tokens_NV: torch.Tensor

    @staticmethod
    def of(scores_NV: torch.Tensor) -> "Ranked":
        """Ranks scores; of equal ones the lower id comes first."""
        order = scores_NV.argsort(dim=1, descending=True, stable=True)
        return Ranked(scores_NV.gather(1, order), order)

    def by_token(self, flags_NV: torch.Tensor) -> torch.Tensor:
        """Returns what is given by rank in the order of tokens."""
        return torch.empty_like(flags_NV).scatter(1, self.tokens_NV, flags_NV)


def kept(scores_NV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns which tokens are left, `[N, V]`."""
    ranked = Ranked.of(scores_NV)
    before_NV = torch.arange(scores_NV.shape[1], device=scores_NV.device).expand_as(scores_NV)
    left_NV = _left(ranked, sampling, before_NV, _mass_of_first(ranked, before_NV))
    left_NV[:, 0] = True  # whatever the parameters, one token is left
    return ranked.by_token(left_NV)


def maybe_kept(scores_NV: torch.Tensor, sampling: Sampling, slack_N: torch.Tensor) -> torch.Tensor:
    """Returns which tokens may be left if every score may be off by `slack_N`."""
    ranked = Ranked.of(scores_NV)
    slack_N1 = slack_N.unsqueeze(1)
    ascending_NV = ranked.scores_NV.flip(1).contiguous()
    limits_NV = (ranked.scores_NV + 2 * slack_N1).contiguous()
    before_NV = scores_NV.shape[1] - torch.searchsorted(ascending_NV, limits_NV, right=True)
    left_NV = _left(ranked, sampling, before_NV, _mass_of_first(ranked, before_NV), slack_N1, MASS_ERROR)
    left_NV[:, 0] = True
    return ranked.by_token(left_NV)


def surely_kept(scores_NV: torch.Tensor, sampling: Sampling, slack_N: torch.Tensor) -> torch.Tensor:
    """Returns which tokens are left however scores are off by up to `slack_N`."""
    ranked = Ranked.of(scores_NV)
    slack_N1 = slack_N.unsqueeze(1)
    ascending_NV = ranked.scores_NV.flip(1).contiguous()
    limits_NV = (ranked.scores_NV - 2 * slack_N1).contiguous()
    reach_NV = scores_NV.shape[1] - torch.searchsorted(ascending_NV, limits_NV)  # the token itself among them
    mass_NV = _mass_of_first(ranked, reach_NV) - (ranked.scores_NV - ranked.scores_NV[:, :1]).exp()
    return ranked.by_token(_left(ranked, sampling, reach_NV - 1, mass_NV, -slack_N1, -MASS_ERROR))


def _mass_of_first(ranked: Ranked, counts_NV: torch.Tensor) -> torch.Tensor:
    """Returns the mass of the first so many tokens of each row, in units of the first one's."""
    mass_NV = (ranked.scores_NV - ranked.scores_NV[:, :1]).exp()
    return torch.cat((torch.zeros_like(mass_NV[:, :1]), mass_NV.cumsum(1)), dim=1).gather(1, counts_NV)


def _left(
    ranked: Ranked,
    sampling: Sampling,
    before_NV: torch.Tensor,
    mass_before_NV: torch.Tensor,
    slack_N1: torch.Tensor | float = 0.0,
    error: float = 0.0,
) -> torch.Tensor:
    """Returns by rank which tokens are left, if so many, of so much mass, come before each.

    `slack_N1` and `error` widen the limits, or narrow them where they are negative.
    """
    scores_NV = ranked.scores_NV
    vocab_size = scores_NV.shape[1]
    top_k = sampling.top_k if sampling.top_k > 0 else vocab_size
    left_NV = before_NV < top_k
    slack_N1 = torch.as_tensor(slack_N1, dtype=scores_NV.dtype, device=scores_NV.device)
    relative_NV = scores_NV - scores_NV[:, :1]
    if sampling.top_p < 1:
        share_NV = mass_before_NV / relative_NV.exp()[:, :top_k].sum(1, keepdim=True)
        moved_NV = share_NV * (-2 * slack_N1).exp()
        left_NV = left_NV & (moved_NV / (moved_NV + 1 - share_NV) - error < sampling.top_p)
    if sampling.min_p > 0:
        left_NV = left_NV & (relative_NV >= math.log(sampling.min_p) - 2 * slack_N1 - error)
    return left_NV


def distribution(logits_NV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns the probabilities that sampling draws from, `[N, V]`; one token at temperature 0."""
    scores_NV = scores_of(logits_NV, sampling.temperature)
    if sampling.temperature <= 0:
        best_N1 = Ranked.of(scores_NV).tokens_NV[:, :1]
        return torch.zeros_like(scores_NV).scatter(1, best_N1, 1.0)
    left_NV = kept(scores_NV, sampling)
    weights_NV = torch.where(left_NV, (scores_NV - scores_NV.amax(1, keepdim=True)).exp(), 0.0)
    return weights_NV / weights_NV.sum(1, keepdim=True)
