"""What each token of a completion should have been drawn from: the policy's own forward pass over the whole
text.

Probabilities are given by rank, the most likely token first, and everything beyond the first RANKS in one
bin: a sampler that favours likely tokens, or proposed ones, shows there whatever the contexts are.

Where an exact policy is exact only up to rounding that nobody can predict, its shaken copies come along: the
probabilities they give the same tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.certify.subject import Policy
from paceline.kernels.rejection import Truncation, sampled_distribution
from paceline.kernels.sampler import kept_tokens, row_logsumexp, scaled_logits
from paceline.policy.attention import PackedAttention
from paceline.types import Completion, SamplingParams

RANKS = 32
PASS_TOKENS = 4096
PASS_LOGITS = 1 << 25  # held at once
APART = (
    2.0  # how far two logits move apart, over the standard deviation of what moved a context's; few go beyond
)
ALONE_APART = 6.0  # with a single copy, which shows too little of what may happen: hardly any of thousands


def apart(copies: int) -> float:
    return APART if copies > 1 else ALONE_APART


@dataclass(frozen=True)
class Pass:
    """Texts that run together, and the contexts within them that are wanted."""

    texts: list[tuple[int, ...]]
    contexts: list[tuple[int, ...]]
    places: list[int]  # of each context's last token among all tokens

    def logits(self, policy: Policy) -> torch.Tensor:
        """After each of the contexts."""
        packed = PackedAttention([len(text) for text in self.texts], policy.device)
        tokens_T, places_N = (
            torch.tensor(x, device=policy.device)
            for x in ([token for text in self.texts for token in text], self.places)
        )
        return policy.logits(policy(tokens_T, packed.positions_T, packed)[places_N])


def passes(policy: Policy, texts: dict[tuple[int, ...], int]) -> Iterator[Pass]:
    """Texts with the length of their prompt: wanted is every context from the prompt on."""
    waiting = sorted(texts, key=len)
    per_pass = max(
        1, min(PASS_TOKENS // len(waiting[-1]), PASS_LOGITS // (policy.config.vocab_size * len(waiting[-1])))
    )
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
    """One entry per response token N of all completions, in their order."""

    probabilities_NB: torch.Tensor  # by rank; the last bin is the rest
    observed_N: torch.Tensor  # the bin of the token that was sampled
    certain_N: torch.Tensor  # what truncation leaves does not hang on the last digits
    place_N: torch.Tensor  # index within the response
    context_N: torch.Tensor  # equal for tokens with the same text before them
    shaken_NSB: torch.Tensor  # the probabilities of the same bins under each shaken copy

    def where(self, mask_N: torch.Tensor) -> "Expected":
        return Expected(*(x[mask_N] for x in vars(self).values()))


@torch.inference_mode()
def expected_tokens(
    policy: Policy,
    completions: Sequence[Completion],
    sampling: SamplingParams,
    tolerance: float,
    shaken: Sequence[Policy] = (),
) -> Expected:
    """`tolerance`: how far the backend's logits may lie from the policy's at least; contexts where so little,
    or what a shaken copy does there, decides what is kept are not certain.

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
    order_CR, probabilities_CB, certain_C, shaken_CSB = _by_rank(
        policy, shaken, texts, contexts, sampling, tolerance
    )
    context_N, token_N = torch.tensor(context_of), torch.tensor(tokens)
    is_token_NR = order_CR[context_N] == token_N.unsqueeze(1)
    observed_N = torch.where(is_token_NR.any(1), is_token_NR.int().argmax(1), order_CR.shape[1])
    return Expected(
        probabilities_CB[context_N],
        observed_N,
        certain_C[context_N],
        torch.tensor(places),
        context_N,
        shaken_CSB[context_N],
    )


def _by_rank(
    policy: Policy,
    shaken: Sequence[Policy],
    texts: dict[tuple[int, ...], int],
    contexts: dict[tuple[int, ...], int],
    sampling: SamplingParams,
    tolerance: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """By context: the tokens of the first ranks, the probabilities of the bins, whether that is certain, and
    the shaken probabilities.
    """
    ranks = min(RANKS, policy.config.vocab_size)
    order_CR = torch.zeros(len(contexts), ranks, dtype=torch.int64)
    probabilities_CB = torch.zeros(len(contexts), ranks + 1, dtype=torch.float64)
    certain_C = torch.zeros(len(contexts), dtype=torch.bool)
    shaken_CSB = torch.zeros(len(contexts), len(shaken), ranks + 1)
    for part in passes(policy, texts):
        wanted = [contexts[context] for context in part.contexts]
        logits_NV = part.logits(policy)
        p_NV, tolerance_N = _sampled(logits_NV, sampling), torch.full_like(logits_NV[:, 0], tolerance)
        order_NR = p_NV.topk(ranks).indices
        for i, other in enumerate(shaken):
            other_NV = part.logits(other).to(logits_NV)
            tolerance_N = torch.maximum(tolerance_N, apart(len(shaken)) * (other_NV - logits_NV).std(-1))
            shaken_CSB[wanted, i] = _binned(_sampled(other_NV, sampling), order_NR, sampling).float().cpu()
        order_CR[wanted], probabilities_CB[wanted] = (
            order_NR.cpu(),
            _binned(p_NV, order_NR, sampling).double().cpu(),
        )
        certain_C[wanted] = _certain(logits_NV, sampling, tolerance_N).cpu()
    return order_CR, probabilities_CB, certain_C, shaken_CSB


def _sampled(logits_NV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    return sampled_distribution(
        logits_NV, _temperatures(logits_NV, sampling), _truncation(sampling, len(logits_NV), logits_NV.device)
    )


def _temperatures(logits_NV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    return torch.full_like(logits_NV[:, 0], sampling.temperature)


def _binned(p_NV: torch.Tensor, order_NR: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    top_NR = p_NV.gather(1, order_NR)
    rest_N1 = (1 - top_NR.sum(1, keepdim=True)).clamp(min=0)
    if (
        order_NR.shape[1] == p_NV.shape[1] or sampling.truncates
    ):  # what rounding leaves there must not pass for a possible token
        rest_N1 = torch.where(rest_N1 < 1e-6, 0.0, rest_N1)
    return torch.cat((top_NR, rest_N1), 1)


def _truncation(
    sampling: SamplingParams, rows: int, device: torch.device, moved_N: torch.Tensor | None = None
) -> Truncation | None:
    """As scaled logits that moved so far would see it: the mass p of the first tokens changes by p (1 - p) of
    that, a ratio by all of it.
    """
    if not sampling.truncates:
        return None
    moved_N = torch.zeros(rows, dtype=torch.float64, device=device) if moved_N is None else moved_N.double()
    top_p_N = sampling.top_p * (1 + moved_N * (1 - sampling.top_p))
    return Truncation(
        torch.tensor(sampling.top_k, device=device).expand(rows), top_p_N, sampling.min_p * (1 + moved_N)
    )


def _certain(logits_NV: torch.Tensor, sampling: SamplingParams, tolerance_N: torch.Tensor) -> torch.Tensor:
    """Whether the kept tokens stay the same when logits move by that much; at temperature 0, whether the most
    likely token does.
    """
    if sampling.temperature == 0:
        ordered_N2 = logits_NV.topk(2).values
        return ordered_N2[:, 0] - ordered_N2[:, 1] > tolerance_N
    if not sampling.truncates:
        return torch.ones_like(logits_NV[:, 0], dtype=torch.bool)
    scaled_NV, tolerance_N = (
        scaled_logits(logits_NV, _temperatures(logits_NV, sampling)),
        tolerance_N / sampling.temperature,
    )
    logsumexp_N = row_logsumexp(scaled_NV)
    cuts = (
        _truncation(sampling, len(scaled_NV), scaled_NV.device, moved_N)
        for moved_N in (None, -tolerance_N, tolerance_N)
    )
    kept_NV, *others = (
        kept_tokens(scaled_NV, logsumexp_N, cut.top_k_R, cut.top_p_R, cut.min_p_R)[0] for cut in cuts
    )
    last_kept_N = scaled_NV.masked_fill(~kept_NV, torch.inf).amin(1)
    first_dropped_N = scaled_NV.masked_fill(kept_NV, -torch.inf).amax(1)
    return (last_kept_N - first_dropped_N > tolerance_N) & (others[0] == others[1]).all(1)
