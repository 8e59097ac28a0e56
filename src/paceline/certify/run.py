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
    """How much is sampled: completions of `max_tokens` for each of `contexts` contexts, `samples` at
    temperature 1 and `fewer` otherwise.
    """

    contexts: int = 2
    samples: int = 3000
    fewer: int = 250
    further: tuple[SamplingParams, ...] = (
        SamplingParams(0.7),
        SamplingParams(1.5),
        SamplingParams(1.0, top_k=5),
        SamplingParams(1.2, top_p=0.9),
        SamplingParams(0.0),
    )
    mixed: int = 36  # completions for equality and parity
    mixed_tokens: int = 32
    seed: int = 0


ALL_AT_ONCE, PACED = 256, 16  # requests that run together; with few, an adaptive pacer has a choice to make
PACED_STEPS = 4  # that a completion lasts at least, so that strategies change within it
QUICK = Plan(samples=300, fewer=100, further=(SamplingParams(1.5, top_k=5),), mixed=12)


def certify(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    settings: dict[str, str],
    say: Callable[[str], None] = lambda _: None,
) -> Certificate:
    start = time.perf_counter()
    requests = mixed_requests(prompts, plan.mixed, plan.mixed_tokens, plan.seed)
    plain = subject.open(0, 64).run(requests)
    checks: list[Check] = []
    say("same bits")
    checks += check_equality(subject, requests, plain)
    opened = subject.open(subject.tokens, PACED if subject.adaptive else ALL_AT_ONCE)
    say("logprobs")
    checks += check_logprobs(subject, plain, "{}, plain", tell_distance=True)
    if subject.tokens:
        checks += check_logprobs(subject, opened.run(requests), "{}, speculating")
    uncertainty = measure(subject, plain)
    rounded = bool(rounded_copies(subject))
    tolerance = uncertainty.tolerance if rounded else LOGIT_TOLERANCE[subject.policy.dtype]
    if rounded:
        checks.append(Check("what rounding moves", None, uncertainty.describe(), promised=False))
    contexts = uncertainty.contested(plan.contexts)
    length = (subject.tokens + 1) * (PACED_STEPS if subject.adaptive else 1) if subject.tokens else 4
    for kind in (SamplingParams(1.0), *plan.further):
        say(f"frequencies, {describe(kind)}")
        checks += check_logprobs(
            subject, opened.run(sampling_requests(prompts, kind, plan.seed)), f"{describe(kind)}: {{}}"
        )
        sampling = replace(kind, max_tokens=length, ignore_eos=True)
        samples = plan.samples if kind == SamplingParams(1.0) else plan.fewer if kind.temperature else 10
        checks += check_frequencies(subject, opened, contexts, samples, sampling, plan.seed, tolerance)
    return Certificate.of(subject.name, settings, checks + subject.own_checks(), time.perf_counter() - start)
