"""Advantages within a group: how much better than its siblings a sample did."""

from collections.abc import Sequence

EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], normalise: bool) -> list[float]:
    """A = r - mean(r), divided by the sample standard deviation where `normalise` (GRPO, arXiv 2402.03300, eq. 3)."""
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalise or len(rewards) < 2:
        return centred
    deviation = (sum(x * x for x in centred) / (len(rewards) - 1)) ** 0.5
    return [x / (deviation + EPSILON) for x in centred]
