"""The three kinds of check: the same bits, the right frequencies, the learner's logprobs."""

import random
from collections.abc import Sequence

import torch

from paceline.certify.certificate import Check
from paceline.certify.distribution import Expected, expected_tokens
from paceline.certify.statistics import FrequencyTest, test_frequencies
from paceline.certify.subject import Opened, Subject
from paceline.engine.rows import MAX_QUERY
from paceline.learning.batch import TrainingSequence, micro_batches
from paceline.learning.logprobs import token_logprobs
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Purpose, Request, SamplingParams, request_seed

# (largest, mean) difference of a logprob between backend and learner. bf16 keeps 8 bits, so logits of about 10 are off by a few hundredths.
PARITY_LIMITS = {torch.float64: (1e-8, 1e-9), torch.float32: (1e-3, 1e-5), torch.bfloat16: (1.0, 0.03)}
# How far apart the same logits may come out in this type; contexts that hang on less are left out.
LOGIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
PARITY_COMPLETIONS = 64  # of each sampling, for the logprobs
SAME_CONTEXT = 200  # tokens, from which on a context is tested for itself
MIXED_SAMPLINGS = (
    SamplingParams(1.0), SamplingParams(0.7), SamplingParams(1.5, top_k=7),
    SamplingParams(0.0), SamplingParams(1.0, top_p=0.9), SamplingParams(1.2, min_p=0.05),
)  # fmt: skip


def mixed_requests(prompts: Sequence[tuple[int, ...]], count: int, max_tokens: int, seed: int) -> list[Request]:
    """Every kind of sampling, lengths from one token on, some that go on past the end token."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        kind = MIXED_SAMPLINGS[i % len(MIXED_SAMPLINGS)]
        sampling = SamplingParams(kind.temperature, rng.randint(1, max_tokens), kind.top_p, kind.top_k, kind.min_p, ignore_eos=i % 3 > 0)
        requests.append(Request(f"mixed/{i}", prompts[i % len(prompts)], request_seed(Purpose.EVAL, seed, 0, "certify", 0, i), sampling))
    return requests


def check_equality(subject: Subject, requests: list[Request], plain: list[Completion]) -> list[Check]:
    """Tokens and logprobs against plain decoding: other batches, and every depth of speculation up to the subject's."""
    runs = [(f"same bits, plain, {n} at a time", 0, n) for n in (1, 5)]
    depths = sorted({1, subject.tokens, min(2 * subject.tokens + 1, MAX_QUERY - 1)}) if subject.tokens else []
    runs += [(f"same bits, {k} proposed, {n} at a time", k, n) for k, n in zip(depths, (3, 64, 8), strict=False)]
    checks = []
    for name, tokens, max_running in runs:
        some = slice(0, len(requests) if max_running > 1 else 6)
        done = subject.open(tokens, max_running).run(requests[some])
        same = sum(_bits(a) == _bits(b) for a, b in zip(done, plain[some], strict=True))
        promised = subject.same_with_any_drafter if tokens else subject.same_in_any_batch
        checks.append(Check(name, same == len(done) if promised else None, f"{same} of {len(done)} completions identical", promised=promised))
    return checks


def _bits(completion: Completion) -> tuple:
    return completion.tokens, completion.logprobs, completion.finish_reason


def check_parity(policy: Decoder, completions: list[Completion], name: str) -> Check:
    """The logprobs that came with the tokens against a learner's forward pass over the same text."""
    differences = []
    with torch.inference_mode():
        for batch in micro_batches([_text(c) for c in completions if c.tokens], 4096, policy.device):
            logprobs_R, _ = token_logprobs(policy, batch)
            differences.append((logprobs_R.double() - batch.rollout_logprobs_R).abs())
    difference_R = torch.cat(differences)
    largest, mean = float(difference_R.max()), float(difference_R.mean())
    limit_largest, limit_mean = PARITY_LIMITS[policy.dtype]
    detail = f"differ by {largest:.1e} at most and {mean:.1e} on average over {len(difference_R)} tokens (allowed: {limit_largest:g}, {limit_mean:g})"
    return Check(name, largest <= limit_largest and mean <= limit_mean, detail)


def _text(completion: Completion) -> TrainingSequence:
    """As a learner sees it; truncated samples too, since what is compared is the full vocabulary's logprob."""
    prompt, temperature = completion.request.prompt, completion.request.sampling.temperature or 1.0
    return TrainingSequence(prompt + completion.tokens, len(prompt), tuple(completion.loss_mask), completion.logprobs, 0.0, temperature)


def describe(sampling: SamplingParams) -> str:
    extra = f", top-k {sampling.top_k}" if sampling.top_k else f", top-p {sampling.top_p}" if sampling.top_p < 1 else ""
    return f"T {sampling.temperature:g}{extra}"


def check_frequencies(
    subject: Subject, opened: Opened, prompts: Sequence[tuple[int, ...]], samples: int, sampling: SamplingParams, seed: int
) -> list[Check]:
    """Many seeds over few prompts: are tokens drawn as they should, by their place in the step that made them?

    A token is reached because of what was accepted before it, and given that it must have its own context's distribution.
    """
    label = describe(sampling)
    requests = [
        Request(f"{label}/{p}/{s}", prompt, request_seed(Purpose.EVAL, seed, 0, f"certify {label}", p, s), sampling, group=f"{label}/{p}")
        for p, prompt in enumerate(prompts)
        for s in range(samples)
    ]
    opened.step_starts.clear()
    completions = opened.run(requests)
    tokens = expected_tokens(subject.exact_policy, completions, sampling, LOGIT_TOLERANCE[subject.policy.dtype])
    depth_N, certain_N = _depths(completions, opened), tokens.certain_N
    uncertain = int((~certain_N).sum())
    checks = [check_parity(subject.policy, completions[:: max(1, len(completions) // PARITY_COMPLETIONS)], f"{label}: logprobs of a learner")]
    if sampling.temperature == 0:
        wrong = int((tokens.observed_N[certain_N] != 0).sum())
        detail = f"{wrong} of {int(certain_N.sum())} tokens are not the most likely one ({uncertain} too close to tell)"
        return [*checks, Check(f"{label}: the most likely token", wrong == 0, detail)]
    for depth in range(int(depth_N.max()) + 1):
        mask_N = certain_N & (depth_N == depth)
        if mask_N.any():
            part = tokens.where(mask_N)
            result = test_frequencies(part.probabilities_NB, part.observed_N, _strata(tokens, mask_N))
            place = "every token" if not opened.step_starts else "first of a step" if depth == 0 else f"after {depth} accepted"
            checks.append(_frequency_check(f"{label}: {place}", result, uncertain))
    return checks


def _frequency_check(name: str, result: FrequencyTest, uncertain: int) -> Check:
    told = f"most likely token {100 * result.observed_top:.2f}% of {result.tokens}, expected {100 * result.expected_top:.2f}%"
    if result.p_value == 1.0 and not result.degrees:
        return Check(name, None, f"{told}: too little randomness to test", promised=False)
    left_out = f", {uncertain} left out" if uncertain else ""
    return Check(name, None, f"{told} (5 sigma: {100 * result.resolution:.2f}%{left_out})", result.p_value)


def _strata(tokens: Expected, mask_N: torch.Tensor) -> torch.Tensor:
    """Tokens with the same text before them together, where there are enough; the others by the token before (see `_previous_top`)."""
    context_N = tokens.context_N[mask_N]
    _, index_N, count_C = context_N.unique(return_inverse=True, return_counts=True)
    return torch.where(count_C[index_N] >= SAME_CONTEXT, index_N + 3, _previous_top(tokens.observed_N, tokens.place_N)[mask_N])


def _depths(completions: list[Completion], opened: Opened) -> torch.Tensor:
    """How many tokens of the same step stand before each one; 0 where nobody says where steps began."""
    depths = []
    for completion in completions:
        starts = set(opened.step_starts.get(completion.request.id, ()))
        depth = 0
        for position in range(len(completion.request.prompt), len(completion.request.prompt) + len(completion.tokens)):
            depth = 0 if position in starts or not starts else depth + 1
            depths.append(depth)
    return torch.tensor(depths)


def _previous_top(observed_N: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
    """0: a response's first token; 1: the token before was its context's most likely; 2: it was not. Noise used twice would show here."""
    before_N = torch.where(observed_N.roll(1) == 0, 1, 2)
    return torch.where(place_N == 0, 0, before_N)
