"""What the subjects have in common that sample with noise of their own: nothing of them is known but tokens.

They are judged by statistics alone, over settings that every one of them takes, and by the logprobs that
they report.
"""

import random
from collections.abc import Sequence

from paceline.certify.certificate import Check
from paceline.certify.frequencies import FrequencyPlan
from paceline.certify.native import widest
from paceline.certify.plan import Plan
from paceline.certify.requests import SETTINGS, drawn_settings
from paceline.certify.subject import Policy, Snapshot
from paceline.policy.decoder import Decoder
from paceline.types import SamplingParams

# Settings of requests: vLLM takes no temperature above 2, and does not speculate with min-p.
HOTTEST = 2.0
FOREIGN_SETTINGS = tuple(s for s in SETTINGS if not s.min_p and s.temperature <= HOTTEST)

# Settings whose frequencies are tested, the first most thoroughly.
FREQUENCY_SETTINGS = (
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(2.0),
    SamplingParams(1.5, top_k=5),
    SamplingParams(2.0, top_p=0.9),
    SamplingParams(0.0),
)

# Settings that are drawn at random besides: one of each range, of which a quick certificate takes some.
DRAWN_SETTINGS = 9
QUICK_DRAWN = 3

# Completions per context and setting of a quick certificate.
QUICK_SAMPLES = 300


def foreign_plan(quick: bool, samples: int, seed: int, scenes: tuple[str, ...], vocab_size: int) -> Plan:
    """Returns how much is done; `samples` is the number of completions per context, 0: the usual."""
    rng = random.Random(f"certify foreign {seed}")
    drawn = drawn_settings(rng, DRAWN_SETTINGS, vocab_size, HOTTEST, min_p=False)
    drawn = rng.sample(drawn, QUICK_DRAWN) if quick else drawn
    most = samples or (QUICK_SAMPLES if quick else FrequencyPlan().samples)
    fewer = min(most, QUICK_SAMPLES)
    return Plan(
        settings=(*FOREIGN_SETTINGS, *drawn),
        samples=4 if quick else 12,
        scenes=scenes,
        frequencies=FrequencyPlan(samples=most, fewer=fewer, settings=(*FREQUENCY_SETTINGS, *drawn)),
        seed=seed,
    )


class ForeignSubject:
    """A generator that draws as it likes; what it promises is the distribution."""

    name = "generator"
    perturbed: Sequence[Policy] = ()
    draft_policy: Policy | None = None
    same_in_any_batch = False
    same_with_any_drafter = False
    published_noise = False
    tempered_logprobs = True
    exact_rejection = False
    takes_sizes = False
    takes_weights = False
    adaptive = False

    def __init__(self, policy: Decoder, tokens: int) -> None:
        self.policy = policy
        self.exact_policy = widest(policy)
        self.tokens = tokens
        self.rejects = tokens > 0

    def snapshot(self, policy: Decoder) -> Snapshot:
        return Snapshot(widest(policy))

    def with_positions(self, positions: int) -> None:
        """Its policy's positions are those that it was started with."""

    def own_checks(self) -> list[Check]:
        """Says which settings were not asked for."""
        why = f"min-p and temperatures above {HOTTEST:g}, which not every such generator takes"
        return [Check("settings", None, why, promised=False, left_out=True)]
