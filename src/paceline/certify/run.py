"""One certification, from the subject to the verdict."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.certify.certificate import Certificate, Check
from paceline.certify.checks import (
    check_equality,
    check_frequencies,
    describe,
    mixed_requests,
    sampling_requests,
)
from paceline.certify.parity import check_logprobs
from paceline.certify.subject import LOGIT_TOLERANCE, Subject, rounded_copies
from paceline.certify.uncertainty import measure
from paceline.types import SamplingParams


@dataclass(frozen=True)
class Plan:
    """How much is sampled."""

    contexts: int = 2  # from which samples for frequencies begin
    samples: int = 3000  # completions per context at temperature 1
    fewer: int = 250  # completions per context with other sampling
    further: tuple[SamplingParams, ...] = (
        SamplingParams(0.7),
        SamplingParams(1.5),
        SamplingParams(1.0, top_k=5),
        SamplingParams(1.2, top_p=0.9),
        SamplingParams(0.0),
    )
    mixed: int = 36  # completions for equality and parity
    mixed_tokens: int = 32  # tokens of those completions at most
    seed: int = 0


# Requests that run together.
MAX_RUNNING = 256

# The same for an adaptive pacer, which speculates only while few requests run.
ADAPTIVE_MAX_RUNNING = 16

# Requests that run together in plain decoding.
PLAIN_MAX_RUNNING = 64

# Steps that a completion lasts at least under an adaptive pacer, so that strategies change within it.
ADAPTIVE_STEPS = 4

# Tokens of a completion without speculation.
PLAIN_TOKENS = 4

# Completions per context at temperature 0, where all are alike.
GREEDY_SAMPLES = 10

# The plan of `--quick`.
QUICK = Plan(samples=300, fewer=100, further=(SamplingParams(1.5, top_k=5),), mixed=12)


def certify(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    settings: dict[str, str],
    progress: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Runs all checks on a subject; `settings` are what the certificate says about it."""
    start = time.perf_counter()
    requests = mixed_requests(prompts, plan.mixed, plan.mixed_tokens, plan.seed)
    plain = subject.open(0, PLAIN_MAX_RUNNING).run(requests)
    checks: list[Check] = []
    progress("same bits")
    checks += check_equality(subject, requests, plain)
    opened = subject.open(subject.tokens, ADAPTIVE_MAX_RUNNING if subject.adaptive else MAX_RUNNING)
    progress("logprobs")
    checks += check_logprobs(subject, plain, "{}, plain", tell_distance=True)
    if subject.tokens:
        checks += check_logprobs(subject, opened.run(requests), "{}, speculating")
    uncertainty = measure(subject, plain)
    rounded = bool(rounded_copies(subject))
    tolerance = uncertainty.tolerance if rounded else LOGIT_TOLERANCE[subject.policy.dtype]
    if rounded:
        checks.append(Check("what rounding moves", None, uncertainty.describe(), promised=False))
    contexts = uncertainty.least_certain(plan.contexts)
    for kind in (SamplingParams(1.0), *plan.further):
        progress(f"frequencies, {describe(kind)}")
        completions = opened.run(sampling_requests(prompts, kind, plan.seed))
        checks += check_logprobs(subject, completions, f"{describe(kind)}: {{}}")
        sampling = replace(kind, max_tokens=_frequency_tokens(subject), ignore_eos=True)
        samples = plan.fewer if kind.temperature else GREEDY_SAMPLES
        if kind == SamplingParams(1.0):
            samples = plan.samples
        checks += check_frequencies(subject, opened, contexts, samples, sampling, plan.seed, tolerance)
    return Certificate.of(subject.name, settings, checks + subject.own_checks(), time.perf_counter() - start)


def _frequency_tokens(subject: Subject) -> int:
    """Returns the tokens of completions for frequencies: one step of them, several if pacing is adaptive."""
    if not subject.tokens:
        return PLAIN_TOKENS
    return (subject.tokens + 1) * (ADAPTIVE_STEPS if subject.adaptive else 1)
