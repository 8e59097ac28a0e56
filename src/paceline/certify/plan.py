"""How much a certificate does: which settings, how many samples, which scenes."""

from dataclasses import dataclass

from paceline.certify.frequencies import FrequencyPlan
from paceline.certify.requests import SETTINGS
from paceline.types import SamplingParams

# Scenes by name, in the order that they run.
SCENES = (
    "batches",
    "depths",
    "restless",
    "preempted",
    "chunks",
    "paused",
    "aborted",
    "continued",
    "asleep",
    "weights",
    "endings",
    "limit",
    "long",
    "drawn",
)


@dataclass(frozen=True)
class Plan:
    """How much is done."""

    settings: tuple[SamplingParams, ...] = SETTINGS
    samples: int = 24  # completions per setting, the deeper the better tested
    tokens: int = 12  # of each of them
    scenes: tuple[str, ...] = SCENES
    why_fewer: str = "not of this backend"  # where scenes are left out
    drawn: int = 3  # rounds of requests that are drawn at random
    frequencies: FrequencyPlan | None = FrequencyPlan(
        drawn=3
    )  # where tokens depend on the drafter; None: not tested
    frequencies_anyway: bool = True  # also where the oracle can judge every token
    seconds: float = 0.0  # to spend on more samples, once everything has run; 0: none
    seed: int = 0


# The plan of `--quick`, and what it leaves out.
QUICK = Plan(
    samples=8,
    tokens=10,
    scenes=("depths", "preempted", "weights", "endings", "drawn"),
    why_fewer="--quick",
    drawn=2,
    frequencies=FrequencyPlan(samples=300, settings=(SamplingParams(1.0),), drawn=1),
    frequencies_anyway=False,
)
QUICK_LEAVES_OUT = (
    "frequencies where the oracle can tell every token; "
    f"{Plan().samples - QUICK.samples} of {Plan().samples} completions per setting"
)

# The plan of a subject that shares most of its code with one that was certified before it.
FURTHER = Plan(
    samples=12,
    scenes=("depths", "preempted", "weights", "endings", "drawn"),
    why_fewer="shared with the first part",
    drawn=2,
    frequencies=FrequencyPlan(
        samples=300, fewer=150, settings=(SamplingParams(1.0), SamplingParams(2.0, top_k=6)), drawn=1
    ),
)
