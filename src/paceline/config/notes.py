"""Notes on a recipe that is valid but may not do what its reader expects; printed when a run starts."""

from paceline.config.correction import CORRECTION_PRESETS
from paceline.config.learning import ALGORITHM_DEFAULTS, LearningConfig
from paceline.config.rollout import RolloutConfig
from paceline.config.section import Section


def rollout_notes(rollout: RolloutConfig) -> list[str]:
    """Returns a note where the recipe names drafters that the backend does not use."""
    drafters = rollout.speculation.drafters
    if rollout.backend != "reference" or not drafters:
        return []
    return [
        f"rollout.speculation.drafters = {drafters}: not used, rollout.backend = 'reference' "
        "never speculates; rollout.backend=native does"
    ]


def signal_notes(rollout: RolloutConfig, learning: LearningConfig) -> list[str]:
    """Returns a note for each setting that leaves the policy nothing to learn from."""
    notes: list[str] = []
    if learning.algorithm == "distill" and not learning.distill.reward_weight:
        return notes  # the teacher is signal enough
    relative = (
        learning.algorithm != "reinforce++"
    )  # reinforce++ normalises over the whole step, not within a group
    if rollout.temperature == 0:
        consequence = "so each group scores alike and no update is made" if relative else "so none explores"
        notes.append(
            f"rollout.temperature = {rollout.temperature:g}: the samples of a prompt are all the same, "
            f"{consequence}; 1 samples from the policy as it is"
        )
    if rollout.samples_per_prompt == 1 and relative:
        notes.append(
            f"rollout.samples_per_prompt = 1: learning.algorithm = {learning.algorithm!r} compares the "
            "samples of a prompt with each other, so no update is made; sample 2 or more, or use "
            "learning.algorithm=reinforce++"
        )
    return notes


def learning_notes(learning: LearningConfig) -> list[str]:
    """Returns a note for keys that override the algorithm's or the preset's own values.

    They may be intended, or left over in a recipe that spells out every key.
    """
    choices = (
        ("learning", "algorithm", learning, ALGORITHM_DEFAULTS[learning.algorithm]),
        (
            "learning.correction",
            "preset",
            learning.correction,
            CORRECTION_PRESETS[learning.correction.preset],
        ),
    )
    return [note for choice in choices if (note := _departures(*choice))]


def _departures(section: str, choice: str, settings: Section, stands_for: dict[str, object]) -> str:
    own = {
        key: (getattr(settings, key), tuple(value) if isinstance(value, list) else value)
        for key, value in stands_for.items()
    }
    others = ", ".join(
        f"{key} = {_shown(value)} instead of {_shown(usual)}"
        for key, (value, usual) in own.items()
        if value != usual
    )
    if not others:
        return ""
    name = f"{section}.{choice} = {getattr(settings, choice)!r}"
    return f"{name}: the recipe itself says {others}; leave these keys out to have the {choice}'s own"


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
