"""A certificate from its parts: subjects with a plan each, and what is tested without a policy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.certify.certificate import Certificate, Check
from paceline.certify.certification import DEEPEST, Certification, Progress
from paceline.certify.frequencies import frequency_checks
from paceline.certify.kernels_alone import kernel_checks
from paceline.certify.noise_quality import noise_checks
from paceline.certify.plan import Plan
from paceline.certify.requests import varied_prompts
from paceline.certify.subject import Subject
from paceline.certify.uncertainty import Uncertainty

# Rows per setting of the sampler alone, and seeds of the tests of noise.
KERNEL_ROWS = 120
NOISE_SEEDS = 512


@dataclass(frozen=True)
class Part:
    """A part of a certificate: a subject and how much is done with it."""

    title: str
    subject: Subject
    plan: Plan


def certify(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    settings: dict[str, str],
    progress: Progress = lambda _: None,
) -> Certificate:
    """Runs all checks on one subject; `settings` are printed on the certificate."""
    return certify_parts([Part("", subject, plan)], prompts, settings, progress=progress)


def certify_parts(
    parts: Sequence[Part],
    prompts: Sequence[tuple[int, ...]],
    settings: dict[str, str],
    alone: torch.device | None = None,
    left_out: str = "",
    progress: Progress = lambda _: None,
) -> Certificate:
    """Runs several parts; `alone`: the device on which the native kernels are tested by themselves."""
    start = time.perf_counter()
    checks: list[Check] = []
    seconds: dict[str, float] = {}

    def run(title: str, function: Callable[[], list[Check]]) -> None:
        began = time.perf_counter()
        checks.extend(replace(check, part=title) for check in function())
        seconds[title] = time.perf_counter() - began

    seed = parts[0].plan.seed
    if alone is not None:
        run("noise", lambda: _attempt("noise", lambda: noise_checks(NOISE_SEEDS, seed), progress))
        run("kernels", lambda: _attempt("kernels", lambda: kernel_checks(KERNEL_ROWS, alone, seed), progress))
    for part in parts:
        say = (lambda what, title=part.title: progress(f"{title}: {what}")) if part.title else progress
        run(part.title, lambda part=part, say=say: subject_checks(part.subject, prompts, part.plan, say))
    total = time.perf_counter() - start
    return Certificate.of(parts[0].subject.name, settings, checks, total, seconds, left_out)


def subject_checks(
    subject: Subject, prompts: Sequence[tuple[int, ...]], plan: Plan, progress: Progress = lambda _: None
) -> list[Check]:
    end = time.perf_counter() + plan.seconds
    config = subject.policy.config
    longest = config.max_positions - (DEEPEST + 2) * plan.tokens
    chosen = varied_prompts(prompts, config.vocab_size, max(2, min(80, longest)), plan.seed)
    if subject.rejects:  # a draft model has nothing to attend to after one token
        chosen = [prompt for prompt in chosen if len(prompt) > 1]
    own = Certification(subject, plan, chosen, progress)
    if subject.rejects:
        own.leave_out("prompts of one token", "a draft model has nothing to attend to after one")
    found: list[Uncertainty] = []
    own.attempt("plain decoding", lambda: found.append(own.begin()))
    if not found:
        return own.checks
    if subject.tokens:
        own.attempt("speculation", own.speculate)
    own.play()
    if plan.frequencies is not None and not (own.exact and not (subject.rejects and plan.frequencies_anyway)):
        own.attempt(
            "frequencies",
            lambda: own.checks.extend(
                frequency_checks(subject, found[0], plan.frequencies, plan.seed, progress)
            ),
        )
    if plan.seconds and time.perf_counter() < end:
        own.attempt("further samples", lambda: own.more(end))
    own.attempt("conclusion", own.conclude)
    return own.checks + subject.own_checks()


def _attempt(name: str, function: Callable[[], list[Check]], progress: Progress) -> list[Check]:
    progress(name)
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - whatever the kernels raise is their failure
        return [Check(name, False, f"{type(error).__name__}: {error}")]
