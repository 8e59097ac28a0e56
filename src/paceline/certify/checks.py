"""The same bits, and the right frequencies. Logprobs are in `parity.py`."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.certify.certificate import Check
from paceline.certify.distribution import Expected, expected_tokens
from paceline.certify.statistics import FrequencyTest, test_frequencies
from paceline.certify.subject import Opened, Subject, rounded_copies
from paceline.engine.rows import MAX_QUERY
from paceline.types import Completion, Purpose, Request, SamplingParams, request_seed

PARITY_COMPLETIONS, PARITY_TOKENS = 24, 8  # of each sampling, for the logprobs
SAME_CONTEXT = 200  # tokens, from which on a context is tested for itself
MIXED_SAMPLINGS = (
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(1.5, top_k=7),
    SamplingParams(0.0),
    SamplingParams(1.0, top_p=0.9),
    SamplingParams(1.2, min_p=0.05),
)


def mixed_requests(
    prompts: Sequence[tuple[int, ...]], count: int, max_tokens: int, seed: int
) -> list[Request]:
    """Every kind of sampling, lengths from one token on, some that go on past the end token."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        kind = MIXED_SAMPLINGS[i % len(MIXED_SAMPLINGS)]
        sampling = SamplingParams(
            kind.temperature,
            rng.randint(1, max_tokens),
            kind.top_p,
            kind.top_k,
            kind.min_p,
            ignore_eos=i % 3 > 0,
        )
        requests.append(
            Request(
                f"mixed/{i}",
                prompts[i % len(prompts)],
                request_seed(Purpose.EVAL, seed, 0, "certify", 0, i),
                sampling,
            )
        )
    return requests


def check_equality(subject: Subject, requests: list[Request], plain: list[Completion]) -> list[Check]:
    """Tokens and logprobs against plain decoding: other batches, and every depth of speculation up to the
    subject's.
    """
    runs = [(f"same bits, plain, {n} at a time", 0, n) for n in (1, 5)]
    depths = sorted({1, subject.tokens, min(2 * subject.tokens + 1, MAX_QUERY - 1)}) if subject.tokens else []
    depth = "up to {} proposed" if subject.adaptive else "{} proposed"
    runs += [
        (f"same bits, {depth.format(k)}, {n} at a time", k, n)
        for k, n in zip(depths, (3, 64, 8), strict=False)
    ]
    checks = []
    for name, tokens, max_running in runs:
        some = slice(0, len(requests) if max_running > 1 else 6)
        done = subject.open(tokens, max_running).run(requests[some])
        same = sum(_bits(a) == _bits(b) for a, b in zip(done, plain[some], strict=True))
        promised = subject.same_with_any_drafter if tokens else subject.same_in_any_batch
        checks.append(
            Check(
                name,
                same == len(done) if promised else None,
                f"{same} of {len(done)} completions identical",
                promised=promised,
            )
        )
    return checks


def _bits(completion: Completion) -> tuple:
    return completion.tokens, completion.logprobs, completion.finish_reason


def describe(sampling: SamplingParams) -> str:
    extra = (
        f", top-k {sampling.top_k}"
        if sampling.top_k
        else f", top-p {sampling.top_p}"
        if sampling.top_p < 1
        else ""
    )
    return f"T {sampling.temperature:g}{extra}"


def sampling_requests(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seed: int
) -> list[Request]:
    """Of one kind, over many prompts: those who share one share whatever rounding did to it."""
    label, sampling = describe(sampling), replace(sampling, max_tokens=PARITY_TOKENS, ignore_eos=True)
    chosen = [prompts[i % len(prompts)] for i in range(PARITY_COMPLETIONS)]
    return [
        Request(
            f"{label}/logprobs/{i}",
            prompt,
            request_seed(Purpose.EVAL, seed, 0, f"certify logprobs {label}", 0, i),
            sampling,
        )
        for i, prompt in enumerate(chosen)
    ]


def check_frequencies(
    subject: Subject,
    opened: Opened,
    prompts: Sequence[tuple[int, ...]],
    samples: int,
    sampling: SamplingParams,
    seed: int,
    tolerance: float,
) -> list[Check]:
    """Many seeds over few prompts: are tokens drawn as they should, by their place in the step that made
    them?

    A token is reached because of what was accepted before it, and given that it must have its own context's
    distribution. `tolerance`: how far the same logits may lie apart anywhere; contexts in which so little
    decides what truncation keeps are left out.
    """
    label = describe(sampling)
    requests = [
        Request(
            f"{label}/{p}/{s}",
            prompt,
            request_seed(Purpose.EVAL, seed, 0, f"certify {label}", p, s),
            sampling,
            group=f"{label}/{p}",
        )
        for p, prompt in enumerate(prompts)
        for s in range(samples)
    ]
    opened.step_starts.clear()
    completions = opened.run(requests)
    copies = rounded_copies(subject)
    tokens = expected_tokens(subject.exact_policy, completions, sampling, tolerance, copies)
    depth_N, certain_N = _depths(completions, opened), tokens.certain_N
    uncertain = int((~certain_N).sum())
    if uncertain == len(certain_N):
        return [
            Check(
                f"{label}: nothing to test",
                None,
                f"what rounding does decides all {uncertain} tokens",
                promised=False,
            )
        ]
    if sampling.temperature == 0:
        return [
            _most_likely_check(
                f"{label}: the most likely token", tokens.where(certain_N), bool(copies), uncertain
            )
        ]
    checks = []
    for depth in range(int(depth_N.max()) + 1):
        mask_N = certain_N & (depth_N == depth)
        if mask_N.any():
            part = tokens.where(mask_N)
            result = test_frequencies(
                part.probabilities_NB, part.observed_N, _strata(tokens, mask_N), part.shaken_NSB
            )
            place = (
                "every token"
                if not opened.step_starts
                else "first of a step"
                if depth == 0
                else f"after {depth} accepted"
            )
            checks.append(_frequency_check(f"{label}: {place}", result, uncertain))
    return checks


def _most_likely_check(name: str, tokens: Expected, by_chance: bool, uncertain: int) -> Check:
    result = test_frequencies(tokens.probabilities_NB, tokens.observed_N, None, tokens.shaken_NSB)
    detail = f"{result.ruled_out} of {result.tokens} tokens are not the most likely one ({uncertain} too close to tell)"
    if not by_chance:
        return Check(name, result.ruled_out == 0, detail)
    return Check(name, None, f"{detail}; rounding may explain {result.explained:.1f}", result.p_value)


def _frequency_check(name: str, result: FrequencyTest, uncertain: int) -> Check:
    told = f"most likely token {100 * result.observed_top:.2f}% of {result.tokens}, expected {100 * result.expected_top:.2f}%"
    if result.p_value == 1.0 and not result.degrees:
        return Check(name, None, f"{told}: too little randomness to test", promised=False)
    left_out = f", {uncertain} left out" if uncertain else ""
    rounding = (
        f", rounding may add {result.shift:.1f} to the chi-square of {result.statistic:.0f} "
        f"({result.degrees} degrees)"
        if result.shift
        else ""
    )
    ruled_out = (
        f", {result.ruled_out} ruled out by truncation, {result.explained:.1f} explained"
        if result.ruled_out
        else ""
    )
    return Check(
        name,
        None,
        f"{told} (5 sigma: {100 * result.resolution:.2f}%{left_out}{rounding}{ruled_out})",
        result.p_value,
    )


def _strata(tokens: Expected, mask_N: torch.Tensor) -> torch.Tensor:
    """Tokens with the same text before them together, where there are enough; the others by the token before
    (see `_previous_top`).
    """
    context_N = tokens.context_N[mask_N]
    _, index_N, count_C = context_N.unique(return_inverse=True, return_counts=True)
    return torch.where(
        count_C[index_N] >= SAME_CONTEXT,
        index_N + 3,
        _previous_top(tokens.observed_N, tokens.place_N)[mask_N],
    )


def _depths(completions: list[Completion], opened: Opened) -> torch.Tensor:
    """How many tokens of the same step stand before each one; 0 where nobody says where steps began."""
    depths = []
    for completion in completions:
        starts = set(opened.step_starts.get(completion.request.id, ()))
        depth = 0
        for position in range(
            len(completion.request.prompt), len(completion.request.prompt) + len(completion.tokens)
        ):
            depth = 0 if position in starts or not starts else depth + 1
            depths.append(depth)
    return torch.tensor(depths)


def _previous_top(observed_N: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
    """0: a response's first token; 1: the token before was its context's most likely; 2: it was not. Noise
    used twice would show here.
    """
    before_N = torch.where(observed_N.roll(1) == 0, 1, 2)
    return torch.where(place_N == 0, 0, before_N)
