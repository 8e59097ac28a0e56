"""What each token of a completion should have been drawn from: the policy's own forward pass over the whole text.

Probabilities are given by rank, the most likely token first, and everything beyond the first RANKS in one bin: a sampler that
favours likely tokens, or proposed ones, shows there whatever the contexts are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.kernels.rejection import Truncation, sampled_distribution
from paceline.kernels.sampler import kept_tokens, row_logsumexp, scaled_logits
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder
from paceline.types import Completion, SamplingParams

RANKS = 32
PASS_TOKENS = 4096
PASS_LOGITS = 1 << 25  # held at once


@dataclass(frozen=True)
class Expected:
    """One entry per response token N of all completions, in their order."""

    probabilities_NB: torch.Tensor  # by rank; the last bin is the rest
    observed_N: torch.Tensor  # the bin of the token that was sampled
    certain_N: torch.Tensor  # what truncation leaves does not hang on the last digits
    place_N: torch.Tensor  # index within the response
    context_N: torch.Tensor  # equal for tokens with the same text before them

    def where(self, mask_N: torch.Tensor) -> "Expected":
        return Expected(*(x[mask_N] for x in vars(self).values()))


@torch.inference_mode()
def expected_tokens(policy: Decoder, completions: Sequence[Completion], sampling: SamplingParams, tolerance: float) -> Expected:
    """`tolerance`: how far the backend's logits may lie from the policy's; contexts where so little decides what is kept are not certain.

    Each context is computed once: many seeds over few prompts share most of theirs.
    """
    contexts: dict[tuple[int, ...], int] = {}
    texts: dict[tuple[int, ...], int] = {}  # the longest contexts, with the length of their prompt
    context_of, places, tokens = [], [], []
    for completion in completions:
        prompt = completion.request.prompt
        texts.setdefault(prompt + completion.tokens[:-1], len(prompt))
        for place, token in enumerate(completion.tokens):
            context_of.append(contexts.setdefault(prompt + completion.tokens[:place], len(contexts)))
            places.append(place)
            tokens.append(token)
    order_C, probabilities_CB, certain_C = _by_rank(policy, texts, contexts, sampling, tolerance)
    context_N, token_N = torch.tensor(context_of), torch.tensor(tokens)
    is_token_NR = order_C[context_N] == token_N.unsqueeze(1)
    observed_N = torch.where(is_token_NR.any(1), is_token_NR.int().argmax(1), order_C.shape[1])
    return Expected(probabilities_CB[context_N], observed_N, certain_C[context_N], torch.tensor(places), context_N)


def _by_rank(
    policy: Decoder, texts: dict[tuple[int, ...], int], contexts: dict[tuple[int, ...], int], sampling: SamplingParams, tolerance: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By context: the tokens of the first ranks, the probabilities of the bins, and whether that is certain."""
    ranks = min(RANKS, policy.config.vocab_size)
    order_CR = torch.zeros(len(contexts), ranks, dtype=torch.int64)
    probabilities_CB = torch.zeros(len(contexts), ranks + 1, dtype=torch.float64)
    certain_C = torch.zeros(len(contexts), dtype=torch.bool)
    waiting = sorted(texts, key=len)
    per_pass = max(1, min(PASS_TOKENS // len(waiting[-1]), PASS_LOGITS // (policy.config.vocab_size * len(waiting[-1]))))
    for start in range(0, len(waiting), per_pass):
        some = waiting[start : start + per_pass]
        packed = PackedAttention([len(text) for text in some], policy.device)
        first, wanted, places = 0, [], []
        for text in some:
            for length in range(texts[text], len(text) + 1):
                wanted.append(contexts[text[:length]])
                places.append(first + length - 1)
            first += len(text)
        tokens_T = torch.tensor([token for text in some for token in text], device=policy.device)
        hidden_TE = policy(tokens_T, packed.positions_T, packed)
        order, probabilities, certain = _ranked(policy.logits(hidden_TE[torch.tensor(places, device=policy.device)]), sampling, tolerance, ranks)
        order_CR[wanted], probabilities_CB[wanted], certain_C[wanted] = order.cpu(), probabilities.double().cpu(), certain.cpu()
    return order_CR, probabilities_CB, certain_C


def _ranked(logits_NV: torch.Tensor, sampling: SamplingParams, tolerance: float, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    temperature_N = torch.full_like(logits_NV[:, 0], sampling.temperature)
    p_NV = sampled_distribution(logits_NV, temperature_N, _truncation(sampling, len(logits_NV), logits_NV.device))
    top = p_NV.topk(ranks)
    rest_N1 = (1 - top.values.sum(1, keepdim=True)).clamp(min=0)
    if ranks == p_NV.shape[1] or sampling.truncates:  # what rounding leaves there must not pass for a possible token
        rest_N1 = torch.where(rest_N1 < 1e-6, 0.0, rest_N1)
    certain_N = _certain(scaled_logits(logits_NV, temperature_N), sampling, tolerance)
    return top.indices, torch.cat((top.values, rest_N1), 1), certain_N


def _truncation(sampling: SamplingParams, rows: int, device: torch.device, factor: float = 1.0) -> Truncation | None:
    if not sampling.truncates:
        return None
    top_p = sampling.top_p * factor if sampling.top_p < 1.0 else 1.0
    values = torch.tensor(sampling.top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(sampling.min_p * factor, dtype=torch.float64)
    return Truncation(*(value.to(device).expand(rows) for value in values))


def _certain(scaled_NV: torch.Tensor, sampling: SamplingParams, tolerance: float) -> torch.Tensor:
    """Whether the kept tokens stay the same when logits move by `tolerance`; at temperature 0, whether the most likely token does."""
    ordered_NV = scaled_NV.sort(dim=-1, descending=True).values
    if sampling.temperature == 0:
        return ordered_NV[:, 0] - ordered_NV[:, 1] > tolerance
    certain_N = torch.ones_like(scaled_NV[:, 0], dtype=torch.bool)
    if not sampling.truncates:
        return certain_N
    if 0 < sampling.top_k < scaled_NV.shape[1]:
        certain_N &= ordered_NV[:, sampling.top_k - 1] - ordered_NV[:, sampling.top_k] > tolerance
    low, high = (_truncation(sampling, len(scaled_NV), scaled_NV.device, 1 + sign * tolerance) for sign in (-1, 1))
    logsumexp_N = row_logsumexp(scaled_NV)
    kept = [kept_tokens(scaled_NV, logsumexp_N, cut.top_k_R, cut.top_p_R, cut.min_p_R)[0] for cut in (low, high)]
    return certain_N & (kept[0] == kept[1]).all(1)
