"""The distribution each token should have been drawn from, by the policy's forward pass over the whole text.

Probabilities are given by rank, the most likely token first, and everything beyond the first RANKS in one
bin: a sampler that favours likely tokens, or proposed ones, shows there whatever the contexts are.

Where the policy is exact only up to rounding that cannot be predicted, perturbed copies of it bound that:
the probabilities that they give the same tokens are returned as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.certify.oracle.choice import certain_cut
from paceline.certify.oracle.truncation import distribution
from paceline.certify.subject import Policy
from paceline.policy.attention import PackedAttention
from paceline.types import Completion, SamplingParams

# Most likely tokens that have a bin of their own.
RANKS = 32

# Tokens of a forward pass.
PASS_TOKENS = 4096

# Logits that a forward pass holds at once.
PASS_LOGITS = 1 << 25

# How far rounding may move two logits apart, over the standard deviation of its effect in their context; few
# pairs go beyond.
SPREAD_FACTOR = 2.0

# The same with a single copy, which shows too little of what may happen: hardly any of thousands go beyond.
SINGLE_COPY_SPREAD_FACTOR = 6.0

# A remainder of probability below this is rounding, not a possible token.
MIN_REST = 1e-6


def spread_factor(copies: int) -> float:
    """Returns how far rounding may move two logits apart, over the standard deviation of its effect."""
    return SPREAD_FACTOR if copies > 1 else SINGLE_COPY_SPREAD_FACTOR


@dataclass(frozen=True)
class Pass:
    """Texts of one forward pass, and the contexts within them whose logits are wanted."""

    texts: list[tuple[int, ...]]
    contexts: list[tuple[int, ...]]
    places: list[int]  # of each context's last token among all tokens

    def logits(self, policy: Policy) -> torch.Tensor:
        packed = PackedAttention([len(text) for text in self.texts], policy.device)
        tokens_T = torch.tensor([token for text in self.texts for token in text], device=policy.device)
        places_N = torch.tensor(self.places, device=policy.device)
        return policy.logits(policy(tokens_T, packed.positions_T, packed)[places_N])


def passes(policy: Policy, texts: dict[tuple[int, ...], int]) -> Iterator[Pass]:
    """Yields forward passes over texts, given with the length of their prompt.

    Every context from the prompt on is wanted.
    """
    waiting = sorted(texts, key=len)
    longest = len(waiting[-1])
    per_pass = max(1, min(PASS_TOKENS // longest, PASS_LOGITS // (policy.config.vocab_size * longest)))
    for start in range(0, len(waiting), per_pass):
        part = Pass(waiting[start : start + per_pass], [], [])
        first = 0
        for text in part.texts:
            for length in range(texts[text], len(text) + 1):
                part.contexts.append(text[:length])
                part.places.append(first + length - 1)
            first += len(text)
        yield part


@dataclass(frozen=True)
class Expected:
    """What is expected of the response tokens N of all completions, in their order."""

    probabilities_NB: torch.Tensor  # by rank; the last bin is the rest
    observed_N: torch.Tensor  # the bin of the token that was sampled
    certain_N: torch.Tensor  # what truncation leaves does not depend on rounding
    place_N: torch.Tensor  # index within the response
    context_N: torch.Tensor  # equal for tokens with the same text before them
    perturbed_NSB: torch.Tensor  # the probabilities of the same bins under each perturbed copy

    def where(self, mask_N: torch.Tensor) -> "Expected":
        return Expected(*(x[mask_N] for x in vars(self).values()))


@torch.inference_mode()
def expected_tokens(
    policy: Policy,
    completions: Sequence[Completion],
    sampling: SamplingParams,
    tolerance: float,
    perturbed: Sequence[Policy] = (),
) -> Expected:
    """Computes what each token should have been drawn from.

    `tolerance` is how far the backend's logits may be from the policy's anywhere; contexts where so little,
    or what a perturbed copy does there, decides what is kept are not certain. Each context is computed once:
    many seeds over few prompts share most of theirs.
    """
    contexts: dict[tuple[int, ...], int] = {}
    texts: dict[tuple[int, ...], int] = {}  # the longest contexts, with the length of their prompt
    context_of = []
    places = []
    tokens = []
    for completion in completions:
        prompt = completion.request.prompt
        texts.setdefault(prompt + completion.tokens[:-1], len(prompt))
        for place, token in enumerate(completion.tokens):
            context_of.append(contexts.setdefault(prompt + completion.tokens[:place], len(contexts)))
            places.append(place)
            tokens.append(token)
    order_CR, probabilities_CB, certain_C, perturbed_CSB = _by_rank(
        policy, perturbed, texts, contexts, sampling, tolerance
    )
    context_N = torch.tensor(context_of)
    is_token_NR = order_CR[context_N] == torch.tensor(tokens).unsqueeze(1)
    observed_N = torch.where(is_token_NR.any(1), is_token_NR.int().argmax(1), order_CR.shape[1])
    return Expected(
        probabilities_CB[context_N],
        observed_N,
        certain_C[context_N],
        torch.tensor(places),
        context_N,
        perturbed_CSB[context_N],
    )


def _by_rank(
    policy: Policy,
    perturbed: Sequence[Policy],
    texts: dict[tuple[int, ...], int],
    contexts: dict[tuple[int, ...], int],
    sampling: SamplingParams,
    tolerance: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns four tensors by context.

    They are the tokens of the first ranks, the probabilities of the bins, whether truncation is certain, and
    the probabilities under the perturbed copies.
    """
    ranks = min(RANKS, policy.config.vocab_size)
    order_CR = torch.zeros(len(contexts), ranks, dtype=torch.int64)
    probabilities_CB = torch.zeros(len(contexts), ranks + 1, dtype=torch.float64)
    certain_C = torch.zeros(len(contexts), dtype=torch.bool)
    perturbed_CSB = torch.zeros(len(contexts), len(perturbed), ranks + 1)
    for part in passes(policy, texts):
        wanted = [contexts[context] for context in part.contexts]
        logits_NV = part.logits(policy)
        p_NV = distribution(logits_NV, sampling)
        tolerance_N = torch.full_like(logits_NV[:, 0], tolerance)
        order_NR = p_NV.topk(ranks).indices
        for i, other in enumerate(perturbed):
            other_NV = part.logits(other).to(logits_NV)
            tolerance_N = torch.maximum(
                tolerance_N, spread_factor(len(perturbed)) * (other_NV - logits_NV).std(-1)
            )
            perturbed_CSB[wanted, i] = (
                _binned(distribution(other_NV, sampling), order_NR, sampling).float().cpu()
            )
        order_CR[wanted] = order_NR.cpu()
        probabilities_CB[wanted] = _binned(p_NV, order_NR, sampling).double().cpu()
        certain_C[wanted] = certain_cut(logits_NV, sampling, tolerance_N / 2).cpu()
    return order_CR, probabilities_CB, certain_C, perturbed_CSB


def _binned(p_NV: torch.Tensor, order_NR: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    top_NR = p_NV.gather(1, order_NR)
    rest_N1 = (1 - top_NR.sum(1, keepdim=True)).clamp(min=0)
    if order_NR.shape[1] == p_NV.shape[1] or sampling.truncates:
        rest_N1 = torch.where(rest_N1 < MIN_REST, 0.0, rest_N1)
    return torch.cat((top_NR, rest_N1), 1)
