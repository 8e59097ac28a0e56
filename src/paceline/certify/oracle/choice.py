"""The token that a backend must have chosen, and whether rounding could have made it another.

Every score has a lower and an upper bound: by how far a backend's logits and its float32 noise may be off.
A choice is decided where the winner's lower bound is above all other upper bounds; a decided token that is
not the winner is wrong. Where it is not decided, only tokens whose upper bound reaches the best lower bound
are explained.

    shared noise   argmax over the tokens left of logits / T + gumbel
    rejection      the proposal d with probability min(1, p(d) / q(d)), else argmax of ln max(p - q, 0) +
                   gumbel (Leviathan, Kalman, Matias 2023, algorithm 1, with the noise of streams 1 and 2)
"""

from dataclasses import dataclass

import torch

from paceline.certify.oracle.noise import ACCEPT, RECOVER, SAMPLE, gumbel, gumbel_error, noise_bits, uniform
from paceline.certify.oracle.truncation import (
    Sampling,
    distribution,
    kept,
    maybe_kept,
    scores_of,
    surely_kept,
)

# What float32 may do to a difference of two probabilities.
PROBABILITY_ERROR = 3e-7


@dataclass(frozen=True)
class Choice:
    """The choices at N positions."""

    token_N: torch.Tensor  # the one without rounding
    decided_N: torch.Tensor  # rounding cannot make it another
    possible_NV: torch.Tensor  # the tokens that rounding may make it
    greedy_N: torch.Tensor  # the most likely token

    def explains(self, sampled_N: torch.Tensor) -> torch.Tensor:
        """Returns whether each sampled token is the choice, or may be by rounding."""
        may_be_N = self.possible_NV.gather(1, sampled_N.unsqueeze(1)).squeeze(1)
        return (sampled_N == self.token_N) | (~self.decided_N & may_be_N)


def shared_noise_choice(
    logits_NV: torch.Tensor,
    sampling: Sampling,
    seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
    tolerance_N: torch.Tensor,
    recovers: bool = False,
) -> Choice:
    """Returns the choices under shared noise; logits may be off by `tolerance_N`.

    With `recovers` the noise is that of recoveries: a step by rejection draws so where nothing was proposed.
    """
    scores_NV = scores_of(logits_NV, sampling.temperature)
    if sampling.temperature <= 0:
        slack_N1 = tolerance_N.double().unsqueeze(1)
        return _choice(scores_NV, scores_NV - slack_N1, scores_NV + slack_N1, scores_NV)
    slack_N = tolerance_N.double() / sampling.temperature
    bits_NV = noise_bits(seeds_N, positions_N, logits_NV.shape[1], RECOVER if recovers else SAMPLE)
    noisy_NV = scores_NV + gumbel(bits_NV)
    error_NV = slack_N.unsqueeze(1) + gumbel_error(bits_NV)
    return _choice(
        noisy_NV.masked_fill(~kept(scores_NV, sampling), -torch.inf),
        (noisy_NV - error_NV).masked_fill(~surely_kept(scores_NV, sampling, slack_N), -torch.inf),
        (noisy_NV + error_NV).masked_fill(~maybe_kept(scores_NV, sampling, slack_N), -torch.inf),
        scores_NV,
    )


def rejection_choice(
    logits_NV: torch.Tensor,
    draft_NV: torch.Tensor | None,
    proposed_N: torch.Tensor | None,
    sampling: Sampling,
    seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
    tolerance_N: torch.Tensor,
) -> Choice:
    """Returns the choices at positions that had a proposal.

    It was drawn with the sampling noise from the distribution that the draft logits give, or, without draft
    logits, is `proposed_N` and counts as certain.
    """
    p_NV = distribution(logits_NV, sampling)
    if draft_NV is None:
        q_NV = torch.zeros_like(p_NV).scatter(1, proposed_N.unsqueeze(1), 1.0)
        draft_decided_N = torch.ones_like(proposed_N, dtype=torch.bool)
    else:
        q_NV = distribution(draft_NV, sampling)
        draft = shared_noise_choice(draft_NV, sampling, seeds_N, positions_N, tolerance_N)
        proposed_N, draft_decided_N = (
            draft.token_N,
            draft.decided_N & _same_cut(draft_NV, sampling, tolerance_N),
        )
    draft_decided_N = draft_decided_N & _same_cut(logits_NV, sampling, tolerance_N)
    relative_N = 2 * tolerance_N.double() / (sampling.temperature or 1.0) + PROBABILITY_ERROR
    p_N, q_N = (x.gather(1, proposed_N.unsqueeze(1)).squeeze(1) for x in (p_NV, q_NV))
    threshold_N = uniform(noise_bits(seeds_N, positions_N, 1, ACCEPT)).squeeze(1) * q_N
    accepted_N = threshold_N < p_N
    sure_N = (threshold_N - p_N).abs() > 2 * relative_N * torch.maximum(p_N, threshold_N) + 1e-12

    left_NV = (p_NV - q_NV).clamp(min=0)
    error_NV = relative_N.unsqueeze(1) * (p_NV + q_NV)
    bits_NV = noise_bits(seeds_N, positions_N, p_NV.shape[1], RECOVER)
    noise_NV, noise_error_NV = gumbel(bits_NV), gumbel_error(bits_NV)
    recovered = _choice(
        left_NV.log() + noise_NV,
        (left_NV - error_NV).clamp(min=0).log() + noise_NV - noise_error_NV,
        (left_NV + error_NV).log() + noise_NV + noise_error_NV,
        p_NV,
    )
    token_N = torch.where(accepted_N, proposed_N, recovered.token_N)
    decided_N = draft_decided_N & sure_N & (accepted_N | recovered.decided_N)
    return Choice(token_N, decided_N, p_NV > 0, recovered.greedy_N)


def _same_cut(logits_NV: torch.Tensor, sampling: Sampling, tolerance_N: torch.Tensor) -> torch.Tensor:
    """Returns whether what is left, or at temperature 0 the most likely token, is beyond rounding."""
    scores_NV = scores_of(logits_NV, sampling.temperature)
    slack_N = tolerance_N.double() / (sampling.temperature or 1.0)
    if sampling.temperature <= 0:
        best_N2 = scores_NV.topk(2).values
        return best_N2[:, 0] - best_N2[:, 1] > 2 * slack_N
    cuts = (cut(scores_NV, sampling, slack_N) for cut in (surely_kept, maybe_kept))
    surely_NV, maybe_NV = cuts
    return (surely_NV == maybe_NV).all(1)


def certain_cut(logits_NV: torch.Tensor, sampling: Sampling, tolerance_N: torch.Tensor) -> torch.Tensor:
    """Returns whether logits that are off by `tolerance_N` leave the same tokens."""
    return _same_cut(logits_NV, sampling, tolerance_N)


def _choice(
    nominal_NV: torch.Tensor, lower_NV: torch.Tensor, upper_NV: torch.Tensor, scores_NV: torch.Tensor
) -> Choice:
    token_N = nominal_NV.argmax(1)
    best_lower_N = lower_NV.gather(1, token_N.unsqueeze(1)).squeeze(1)
    others_N = upper_NV.scatter(1, token_N.unsqueeze(1), -torch.inf).amax(1)
    decided_N = best_lower_N > others_N
    possible_NV = upper_NV >= lower_NV.amax(1, keepdim=True)
    return Choice(token_N, decided_N, possible_NV, scores_NV.argmax(1))
