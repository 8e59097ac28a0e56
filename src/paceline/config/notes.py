"""Notes on a recipe that is valid but may not do what its reader expects; printed when a run starts."""

from paceline.config.correction import CORRECTION_PRESETS
from paceline.config.learning import ALGORITHM_DEFAULTS, LearningConfig
from paceline.config.rollout import RolloutConfig
from paceline.config.section import Section


def rollout_notes(rollout: RolloutConfig) -> list[str]:
    """Returns a note where drafters are named that the backend does not use."""
    drafters = rollout.speculation.drafters
    if rollout.backend != "reference" or not drafters:
        return []
    return [
        f"rollout.speculation.drafters = {drafters}: not used, rollout.backend = 'reference' "
        "never speculates; rollout.backend=native does"
    ]


def learning_notes(learning: LearningConfig) -> list[str]:
    """Returns a note for keys that override the algorithm's or the preset's own values.

    They may be meant, or left over in a recipe that spells out every key.
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
