"""Classical speculative sampling, for comparison with shared noise.

A proposal d drawn from q is accepted with probability min(1, p(d) / q(d)), else the token is drawn from what
q left out, max(p - q, 0) normalised (Leviathan, Kalman, Matias 2023, algorithm 1; Chen et al. 2023, algorithm
2). The result is distributed as p, but unlike with shared noise it depends on the drafter.

Three draws at a position, three streams of noise: the drafter's own (STREAM_SAMPLE, so that one drafter
serves both ways), the acceptance and the recovery. A recovery that reuses the drafter's noise is biased: it
knows which token d was, and so which tokens had little noise.

Where q is not known the proposal counts as certain, q(d) = 1. That is right whatever d was drawn from,
because given d the outcome is d with probability p(d) and each other x with p(x); it only accepts less.

It is plain torch on every device. It holds some thirty bytes per logit, so it takes a few rows at a time, and
never waits for the host, so a graph can capture it. Shape letters: R rows, K proposals, Q = K + 1 positions,
T = R x Q, S slots, V vocabulary.
"""

from dataclasses import dataclass

import torch

from paceline.kernels import sampler
from paceline.kernels.noise import STREAM_ACCEPT, STREAM_RECOVER, draw_gumbel
from paceline.kernels.sampler import kept_tokens, row_logsumexp, sample, sample_truncated, scaled_logits

# The largest float32 below 1. A uniform that rounding made 1 would reject what is certain.
MOST_UNIFORM = 1.0 - 2.0**-24


@dataclass(frozen=True)
class Truncation:
    """Each row's top-k (0: off), top-p (1: off) and min-p (0: off)."""

    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor

    def of_rows(self, few: slice) -> "Truncation":
        return Truncation(self.top_k_R[few], self.top_p_R[few], self.min_p_R[few])


def sampled_distribution(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, truncation: Truncation | None = None
) -> torch.Tensor:
    """Returns the probabilities that sampling draws from, `[R, V]`.

    They are those at the row's temperature within what truncation leaves; one token where it is 0.
    """
    scaled_RV = scaled_logits(logits_RV, temperature_R)
    best_R1 = scaled_RV.argmax(-1, keepdim=True)
    if truncation is not None:
        kept_RV, _ = kept_tokens(
            scaled_RV, row_logsumexp(scaled_RV), truncation.top_k_R, truncation.top_p_R, truncation.min_p_R
        )
        scaled_RV = scaled_RV.masked_fill(~kept_RV, -torch.inf)
    certain_RV = torch.zeros_like(scaled_RV).scatter(-1, best_R1, 1.0)
    return torch.where((temperature_R > 0).unsqueeze(-1), scaled_RV.softmax(-1), certain_RV)


def keep_distribution(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    truncation: Truncation | None,
    probabilities_SKV: torch.Tensor,
    slots_R: torch.Tensor,
    column: int,
) -> None:
    """Writes what rows draw their proposal of a column from to their slots."""
    for first in range(0, len(slots_R), sampler.WIDE_ROWS):
        few = slice(first, first + sampler.WIDE_ROWS)
        cut = None if truncation is None else truncation.of_rows(few)
        distribution_RV = sampled_distribution(logits_RV[few], temperature_R[few], cut)
        probabilities_SKV[slots_R[few], column] = distribution_RV.to(probabilities_SKV.dtype)


def verify_by_rejection(
    logits_RQV: torch.Tensor,
    temperature_RQ: torch.Tensor,
    seed_RQ: torch.Tensor,
    position_RQ: torch.Tensor,
    truncation: Truncation | None,
    proposals_RK: torch.Tensor,
    probabilities_SKV: torch.Tensor | None,
    slots_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and their full-vocabulary logprobs, `[R, Q]`.

    A row's proposals were drawn from the first K probabilities of its slot; without any they count as
    certain. A proposal of -1 is none: the token is drawn from p. A position's token is its proposal where
    that is accepted, else the one drawn in its place. What follows the first token that differs from its
    proposal is undefined; `append_samples` drops it. The last position has no proposal and is sampled as
    plain decoding would.
    """
    facts = logits_RQV, temperature_RQ, seed_RQ, position_RQ
    num_rows, num_queries, _ = logits_RQV.shape

    def verified(few: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return _verify_rows(
            *(x[few] for x in facts),
            None if truncation is None else truncation.of_rows(few),
            proposals_RK[few],
            None if probabilities_SKV is None else probabilities_SKV[slots_R[few], : num_queries - 1],
        )

    size = max(1, sampler.WIDE_ROWS // num_queries)
    pieces = [verified(slice(first, first + size)) for first in range(0, num_rows, size)]
    tokens, logprobs = zip(*pieces, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _verify_rows(
    logits_RQV: torch.Tensor,
    temperature_RQ: torch.Tensor,
    seed_RQ: torch.Tensor,
    position_RQ: torch.Tensor,
    truncation: Truncation | None,
    proposals_RK: torch.Tensor,
    draft_probabilities_RKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verifies a few rows; every position decides as if it were reached."""
    num_rows, num_proposals = proposals_RK.shape
    before = slice(0, num_proposals)
    cut = _repeated(truncation, num_proposals)
    p_RKV = _flat(sampled_distribution, logits_RQV[:, before], temperature_RQ[:, before], cut)
    has_RK1 = (proposals_RK >= 0).unsqueeze(-1)
    draft_RK1 = proposals_RK.clamp(min=0).unsqueeze(-1)
    if draft_probabilities_RKV is None:
        q_RKV = torch.zeros_like(p_RKV).scatter(-1, draft_RK1, 1.0)
    else:
        q_RKV = draft_probabilities_RKV.to(p_RKV.dtype)
    q_RKV = q_RKV * has_RK1

    # Gumbel noise g is -ln of an exponential variate, which makes 1 - exp(-exp(-g)) uniform.
    seed_T, position_T = seed_RQ[:, before].flatten(), position_RQ[:, before].flatten()
    gumbel_RK1 = (
        draw_gumbel(seed_T, position_T, 1, STREAM_ACCEPT).view(num_rows, num_proposals, 1).to(p_RKV.dtype)
    )
    uniform_RK1 = (-torch.expm1(-torch.exp(-gumbel_RK1))).clamp(max=MOST_UNIFORM)
    p_RK1, q_RK1 = p_RKV.gather(-1, draft_RK1), q_RKV.gather(-1, draft_RK1).clamp(max=1.0)
    accepted_RK1 = has_RK1 & (uniform_RK1 * q_RK1 < p_RK1)

    left_RKV = (p_RKV - q_RKV).clamp(min=0)
    # p = q up to rounding, hence never rejected but for rounding. Another token than the proposal, as always
    # where it is rejected: the row ends there.
    nothing_left_RK1 = left_RKV.sum(-1, keepdim=True) <= 0
    left_RKV = torch.where(nothing_left_RK1, p_RKV.scatter(-1, draft_RK1, 0.0), left_RKV)
    noise_RKV = draw_gumbel(seed_T, position_T, p_RKV.shape[-1], STREAM_RECOVER).view(p_RKV.shape)
    recovered_RK1 = (left_RKV.log() + noise_RKV).argmax(-1, keepdim=True)

    token_RK1 = torch.where(accepted_RK1, draft_RK1, recovered_RK1)
    scaled_RKV = _flat(scaled_logits, logits_RQV[:, before], temperature_RQ[:, before])
    logsumexp_RK = row_logsumexp(scaled_RKV.flatten(0, 1)).view(num_rows, num_proposals)
    logprob_RK = scaled_RKV.gather(-1, token_RK1).squeeze(-1) - logsumexp_RK
    last_token_R, last_logprob_R = _sample_last(logits_RQV, temperature_RQ, seed_RQ, position_RQ, truncation)
    tokens_RQ = torch.cat((token_RK1.squeeze(-1), last_token_R.unsqueeze(1)), dim=1)
    return tokens_RQ, torch.cat((logprob_RK, last_logprob_R.unsqueeze(1)), dim=1)


def _sample_last(
    logits_RQV, temperature_RQ, seed_RQ, position_RQ, truncation: Truncation | None
) -> tuple[torch.Tensor, torch.Tensor]:
    # The logits last: the sampler reads the others before it waits for the launch just before it.
    noise = temperature_RQ[:, -1].contiguous(), seed_RQ[:, -1].contiguous(), position_RQ[:, -1].contiguous()
    last = logits_RQV[:, -1].contiguous(), *noise
    if truncation is None:
        return sample(*last)
    return sample_truncated(*last, truncation.top_k_R, truncation.top_p_R, truncation.min_p_R)[:2]


def _repeated(truncation: Truncation | None, count: int) -> Truncation | None:
    if truncation is None:
        return None
    return Truncation(
        *(x.repeat_interleave(count) for x in (truncation.top_k_R, truncation.top_p_R, truncation.min_p_R))
    )


def _flat(function, logits_RKV: torch.Tensor, temperature_RK: torch.Tensor, *further) -> torch.Tensor:
    """Applies a function of rows to every position of every row."""
    return function(logits_RKV.flatten(0, 1), temperature_RK.flatten(), *further).view(logits_RKV.shape)
