"""The verifiers of reasoning-gym's datasets (optional extra `reasoning`), without their consolation scores.

A module of its own, so that a worker imports the package when it starts and not within the first call's time
limit.
"""

import functools
import json
from typing import Any

import reasoning_gym


def verify(
    extracted: str | None, extra: dict[str, Any], dataset: str, options: str, threshold: float
) -> float:
    """Returns the dataset's own score, 0 below `threshold`: some give 0.01 to 0.05 for anything at all."""
    if extracted is None:
        return 0.0
    score = float(_dataset(dataset, options).score_answer(extracted, extra["entry"]))
    return score if score >= threshold else 0.0


@functools.cache
def _dataset(name: str, options: str) -> Any:
    return reasoning_gym.create_dataset(name, **json.loads(options))
