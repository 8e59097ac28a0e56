"""Checks of equality (the same bits in any batch, with any drafter) and of sampled frequencies.

The checks of logprobs are in `parity.py`.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.certify.certificate import Check
from paceline.certify.distribution import Expected, expected_tokens
from paceline.certify.statistics import test_frequencies
from paceline.certify.subject import OpenedBackend, Subject, rounded_copies
from paceline.engine.rows import MAX_QUERY
from paceline.types import Completion, Purpose, Request, SamplingParams, request_seed

# Completions per kind of sampling whose logprobs are compared.
PARITY_COMPLETIONS = 24

# Tokens of each of those completions.
PARITY_TOKENS = 8

# A context with at least this many tokens sampled after it is tested separately.
SAME_CONTEXT = 200

# The kinds of sampling that the checks of equality mix.
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
    """Returns requests of every kind of sampling and length, some of which go on past the end token."""
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
    """Compares tokens and logprobs with plain decoding: in other batches, and with several draft lengths."""
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
    """Returns sampling parameters as a label of checks."""
    extra = ""
    if sampling.top_k:
        extra = f", top-k {sampling.top_k}"
    elif sampling.top_p < 1:
        extra = f", top-p {sampling.top_p}"
    return f"T {sampling.temperature:g}{extra}"


def sampling_requests(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seed: int
) -> list[Request]:
    """Returns requests of one kind of sampling over many prompts.

    Samples of one prompt share whatever rounding did to it, so many prompts show more than many samples.
    """
    label = describe(sampling)
    sampling = replace(sampling, max_tokens=PARITY_TOKENS, ignore_eos=True)
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
    opened: OpenedBackend,
    prompts: Sequence[tuple[int, ...]],
    samples: int,
    sampling: SamplingParams,
    seed: int,
    tolerance: float,
) -> list[Check]:
    """Samples many seeds of few prompts and tests the tokens' frequencies by their place in their step.

    A token is reached because of what was accepted before it, and given that it must have its own context's
    distribution. `tolerance` is how far two computations of the same logits may differ anywhere; contexts in
    which so little decides what truncation keeps are left out.
    """
    label = describe(sampling)
    opened.step_starts.clear()
    completions = opened.run(_frequency_requests(prompts, samples, sampling, seed))
    copies = rounded_copies(subject)
    tokens = expected_tokens(subject.exact_policy, completions, sampling, tolerance, copies)
    certain_N = tokens.certain_N
    uncertain = int((~certain_N).sum())
    if uncertain == len(certain_N):
        detail = f"what rounding does decides all {uncertain} tokens"
        return [Check(f"{label}: nothing to test", None, detail, promised=False)]
    if sampling.temperature == 0:
        name = f"{label}: the most likely token"
        return [_most_likely_check(name, tokens.where(certain_N), bool(copies), uncertain)]
    depth_N = _depths(completions, opened)
    checks = []
    for depth in range(int(depth_N.max()) + 1):
        mask_N = certain_N & (depth_N == depth)
        if mask_N.any():
            name = f"{label}: {_describe_depth(depth, bool(opened.step_starts))}"
            checks.append(_frequency_check(name, tokens, mask_N, uncertain))
    return checks


def _frequency_requests(
    prompts: Sequence[tuple[int, ...]], samples: int, sampling: SamplingParams, seed: int
) -> list[Request]:
    label = describe(sampling)
    return [
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


def _describe_depth(depth: int, steps_known: bool) -> str:
    if not steps_known:
        return "every token"
    return "first of a step" if depth == 0 else f"after {depth} accepted"


def _most_likely_check(name: str, tokens: Expected, by_chance: bool, uncertain: int) -> Check:
    """Checks greedy sampling; `by_chance`: rounding may make another token the most likely one."""
    result = test_frequencies(tokens.probabilities_NB, tokens.observed_N, None, tokens.perturbed_NSB)
    detail = (
        f"{result.ruled_out} of {result.tokens} tokens are not the most likely one "
        f"({uncertain} too close to tell)"
    )
    if not by_chance:
        return Check(name, result.ruled_out == 0, detail)
    return Check(name, None, f"{detail}; rounding may explain {result.explained:.1f}", result.p_value)


def _frequency_check(name: str, tokens: Expected, mask_N: torch.Tensor, uncertain: int) -> Check:
    """Tests the masked tokens; `uncertain` is how many tokens were left out before."""
    part = tokens.where(mask_N)
    result = test_frequencies(
        part.probabilities_NB, part.observed_N, _strata(tokens, mask_N), part.perturbed_NSB
    )
    top = (
        f"most likely token {100 * result.observed_top:.2f}% of {result.tokens}, "
        f"expected {100 * result.expected_top:.2f}%"
    )
    if result.p_value == 1.0 and not result.degrees:
        return Check(name, None, f"{top}: too little randomness to test", promised=False)
    notes = f"5 sigma: {100 * result.resolution:.2f}%"
    if uncertain:
        notes += f", {uncertain} left out"
    if result.shift:
        notes += (
            f", rounding may add {result.shift:.1f} to the chi-square of {result.statistic:.0f} "
            f"({result.degrees} degrees)"
        )
    if result.ruled_out:
        notes += f", {result.ruled_out} ruled out by truncation, {result.explained:.1f} explained"
    return Check(name, None, f"{top} ({notes})", result.p_value)


def _strata(tokens: Expected, mask_N: torch.Tensor) -> torch.Tensor:
    """Groups tokens by their context where it has enough of them, else by `_previous_top`."""
    context_N = tokens.context_N[mask_N]
    _, index_N, count_C = context_N.unique(return_inverse=True, return_counts=True)
    return torch.where(
        count_C[index_N] >= SAME_CONTEXT,
        index_N + 3,
        _previous_top(tokens.observed_N, tokens.place_N)[mask_N],
    )


def _depths(completions: list[Completion], opened: OpenedBackend) -> torch.Tensor:
    """Returns each token's place in its step; 0 where the backend does not say where steps began."""
    depths = []
    for completion in completions:
        starts = set(opened.step_starts.get(completion.request.id, ()))
        first = len(completion.request.prompt)
        depth = 0
        for position in range(first, first + len(completion.tokens)):
            depth = 0 if position in starts or not starts else depth + 1
            depths.append(depth)
    return torch.tensor(depths)


def _previous_top(observed_N: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
    """Returns 0 for a response's first token, 1 after a context's most likely token, 2 after another.

    Noise that is used twice would show here.
    """
    before_N = torch.where(observed_N.roll(1) == 0, 1, 2)
    return torch.where(place_N == 0, 0, before_N)
