"""Tests of sampled frequencies, for tokens that no oracle can judge one by one.

Those are tokens by rejection, which depend on the drafter, and tokens of a backend with noise of its own.
Many seeds of few prompts are sampled, and the tokens tested by their place in their step: a token is reached
because of what was accepted before it, and given that it must have its own context's distribution. A place
that has too little randomness under one setting is tested over all settings together.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.certify.certificate import ALPHA, Check
from paceline.certify.distribution import Expected, expected_tokens
from paceline.certify.judge import steps_of
from paceline.certify.oracle.seeds import seed_of
from paceline.certify.power import Power, found_by_chi_square, largest_variance
from paceline.certify.requests import RANGES, describe, drawn_settings
from paceline.certify.scenes import patience
from paceline.certify.statistics import test_frequencies
from paceline.certify.subject import LOGIT_TOLERANCE, OpenedBackend, Opening, Subject, rounded_copies
from paceline.certify.tally import place_name
from paceline.certify.uncertainty import Uncertainty
from paceline.types import Completion, Request, SamplingParams

# A context with at least this many tokens sampled after it is tested separately.
SAME_CONTEXT = 200

# Tests that share the error rate, about; what power is stated for.
TESTS = 50

# Requests that run together, and with an adaptive pacer, which speculates only while few run.
MAX_RUNNING = 256
ADAPTIVE_MAX_RUNNING = 16

# Steps that a completion lasts at least under an adaptive pacer, so that strategies change within it.
ADAPTIVE_STEPS = 4

# Tokens of a completion without speculation.
PLAIN_TOKENS = 4

# Completions per context at temperature 0, where all are alike.
GREEDY_SAMPLES = 10


@dataclass(frozen=True)
class FrequencyPlan:
    """How much is sampled for frequencies."""

    contexts: int = 2  # from which samples begin
    samples: int = 1200  # completions per context at the first of the settings
    fewer: int = 300  # at the others
    settings: tuple[SamplingParams, ...] = (
        SamplingParams(1.0),
        SamplingParams(2.0),
        SamplingParams(0.7),
        SamplingParams(1.5, top_k=5),
        SamplingParams(2.0, top_p=0.9),
        SamplingParams(2.0, min_p=0.1),
        SamplingParams(2.5, top_k=12, top_p=0.9, min_p=0.05),
        SamplingParams(0.0),
    )
    drawn: int = 0  # settings at random besides


@dataclass(frozen=True)
class Tested:
    """What was sampled with one setting: each token's distribution, and its place in its step."""

    tokens: Expected
    depth_N: torch.Tensor


def frequency_checks(
    subject: Subject,
    uncertainty: Uncertainty,
    plan: FrequencyPlan,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Check]:
    """Samples every setting and tests it, place by place; at the end each place over all settings."""
    tolerance = uncertainty.tolerance if rounded_copies(subject) else LOGIT_TOLERANCE[subject.policy.dtype]
    contexts = uncertainty.least_certain(plan.contexts)
    opened = subject.open(Opening(subject.tokens, ADAPTIVE_MAX_RUNNING if subject.adaptive else MAX_RUNNING))
    checks: list[Check] = []
    every: list[Tested] = []
    rng = random.Random(f"certify frequencies {seed}")
    ranges = drawn_settings(rng, RANGES, subject.policy.config.vocab_size)
    for setting in (*plan.settings, *rng.sample(ranges, plan.drawn)):
        progress(f"frequencies, {describe(setting)}")
        samples = plan.fewer if setting.temperature else GREEDY_SAMPLES
        if setting == plan.settings[0]:
            samples = plan.samples
        sampling = replace(setting, max_tokens=_frequency_tokens(subject), ignore_eos=True)
        own, tested = check_frequencies(subject, opened, contexts, samples, sampling, seed, tolerance)
        checks += own
        every += [] if tested is None or not setting.temperature else [tested]
    return checks + _pooled_checks(subject, every, bool(opened.step_starts))


def check_frequencies(
    subject: Subject,
    opened: OpenedBackend,
    prompts: Sequence[tuple[int, ...]],
    samples: int,
    sampling: SamplingParams,
    seed: int,
    tolerance: float,
) -> tuple[list[Check], Tested | None]:
    """Samples many seeds of few prompts with one setting and tests the tokens by their place.

    `tolerance` is how far two computations of the same logits may differ anywhere; contexts in which so
    little decides what truncation keeps are left out.
    """
    label = describe(sampling)
    opened.step_starts.clear()
    with patience(opened):
        completions = opened.run(frequency_requests(prompts, samples, sampling, seed))
    copies = rounded_copies(subject)
    tokens = expected_tokens(subject.exact_policy, completions, sampling, tolerance, copies)
    certain_N = tokens.certain_N
    uncertain = int((~certain_N).sum())
    if uncertain == len(certain_N):
        detail = f"what rounding does decides all {uncertain} tokens"
        return [Check(f"frequencies, {label}: nothing to test", None, detail, promised=False)], None
    if sampling.temperature == 0:
        name = f"frequencies, {label}: the most likely token"
        return [_most_likely_check(name, tokens.where(certain_N), bool(copies), uncertain)], None
    depth_N = _depths(completions, opened)
    known = bool(opened.step_starts)
    tested = Tested(tokens, depth_N)
    checks = []
    for depth in range(int(depth_N.max()) + 1):
        mask_N = certain_N & (depth_N == depth)
        if mask_N.any():
            checks.append(
                _place_check(f"frequencies, {label}", _place(subject, depth, known), [(tested, mask_N)])
            )
    return checks, tested


def frequency_requests(
    prompts: Sequence[tuple[int, ...]], samples: int, sampling: SamplingParams, seed: int
) -> list[Request]:
    label = describe(sampling)
    return [
        Request(
            f"{label}/{p}/{s}",
            prompt,
            seed_of("eval", seed, 0, f"certify {label}", p, s),
            sampling,
            group=f"{label}/{p}",
        )
        for p, prompt in enumerate(prompts)
        for s in range(samples)
    ]


def _frequency_tokens(subject: Subject) -> int:
    """Returns the tokens of a completion: one step of them, several if pacing is adaptive."""
    if not subject.tokens:
        return PLAIN_TOKENS
    return (subject.tokens + 1) * (ADAPTIVE_STEPS if subject.adaptive else 1)


def _pooled_checks(subject: Subject, every: list[Tested], steps_known: bool) -> list[Check]:
    deepest = max((int(tested.depth_N.max()) for tested in every), default=-1)
    checks = []
    for depth in range(deepest + 1):
        masked = [(t, t.tokens.certain_N & (t.depth_N == depth)) for t in every]
        place = _place(subject, depth, steps_known)
        checks.append(_place_check("frequencies, all settings", place, [m for m in masked if m[1].any()]))
    return checks


def _place(subject: Subject, depth: int, steps_known: bool) -> str:
    if subject.tokens and not steps_known:
        return "any place"
    return place_name(depth, subject.tokens if steps_known else 0)


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


def _place_check(setting: str, place: str, masked: list[tuple[Tested, torch.Tensor]]) -> Check:
    name = f"{setting}: {place}"
    parts = [tested.tokens.where(mask_N) for tested, mask_N in masked]
    probabilities_NB = torch.cat([part.probabilities_NB for part in parts])
    observed_N = torch.cat([part.observed_N for part in parts])
    strata = []
    offset = 0
    for tested, mask_N in masked:
        own_N = _strata(tested.tokens, mask_N)
        strata.append(own_N + offset)
        offset += int(own_N.max()) + 1
    perturbed_NSB = torch.cat([part.perturbed_NSB for part in parts])
    # Together, contexts are too few each: one stratum a setting has more power.
    stratum_N = torch.cat(strata) if len(masked) == 1 else None
    result = test_frequencies(probabilities_NB, observed_N, stratum_N, perturbed_NSB)
    top = (
        f"most likely token {100 * result.observed_top:.2f}% of {result.tokens}, "
        f"expected {100 * result.expected_top:.2f}%"
    )
    if result.p_value == 1.0 and not result.degrees:
        return Check(name, None, f"{top}: too little randomness to test alone", promised=False)
    found = found_by_chi_square(
        result.tokens, largest_variance(probabilities_NB), result.degrees, ALPHA / TESTS
    )
    notes = []
    left_out = sum(int((~tested.tokens.certain_N).sum()) for tested, _ in masked)
    notes += [f"{left_out} left out"] if left_out else []
    if result.shift:
        notes.append(
            f"rounding may add {result.shift:.1f} to the chi-square of {result.statistic:.0f} "
            f"({result.degrees} degrees)"
        )
    if result.ruled_out:
        notes.append(f"{result.ruled_out} ruled out by truncation, {result.explained:.1f} explained")
    power = (Power(setting, place, result.tokens, found),)
    more = f" ({', '.join(notes)})" if notes else ""
    return Check(name, None, top + more, result.p_value, power=power)


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
    """Returns each token's place in its step; 0 where the backend does not report where steps began."""
    return torch.tensor([step.depth for completion in completions for step in steps_of(completion, opened)])


def _previous_top(observed_N: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
    """Returns 0 for a response's first token, 1 after a context's most likely token, 2 after another.

    Noise that is used twice would show here.
    """
    before_N = torch.where(observed_N.roll(1) == 0, 1, 2)
    return torch.where(place_N == 0, 0, before_N)
