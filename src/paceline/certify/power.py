"""Which deviation a check would have found, as total variation between what is sampled and what should be.

Exact checks: if a backend's distribution at some place is off by a total variation of e, then however its
draws are coupled with the right ones, a token differs with probability e or more; so N tokens that all agree
find it with probability 1 - (1 - e)^N.

Statistical checks: a shift of e N tokens between two sets of ranks makes the chi-square noncentral by
(e N)^2 / V, where V is the variance of the count in the set that varies most, the least favourable one.
"""

import math
from dataclasses import dataclass

import torch

from paceline.certify.statistics import chi_square_tail

# The probability with which a stated total variation would have been found.
PROBABILITY = 0.9


@dataclass(frozen=True)
class Power:
    """What one check finds at one place of a step."""

    setting: str
    place: str
    tokens: int
    total_variation: float | None  # the smallest that is found with `probability`; None: none
    probability: float = PROBABILITY

    def __str__(self) -> str:
        found = "nothing" if self.total_variation is None else percent(self.total_variation)
        return f"{self.place} {self.tokens} ({found})"


def percent(share: float) -> str:
    """Returns a share in percent with two digits that count."""
    return f"{100 * share:.2g}%" if share < 1 else "100%"


def found_by_equality(tokens: int) -> float | None:
    """Returns the total variation that so many exact comparisons find with PROBABILITY."""
    return 1 - (1 - PROBABILITY) ** (1 / tokens) if tokens else None


def found_by_chi_square(tokens: int, variance: float, degrees: int, alpha: float) -> float | None:
    """Returns the total variation that a chi-square test at `alpha` finds with PROBABILITY."""
    if not degrees or variance <= 0:
        return None
    critical = _smallest(lambda x: chi_square_tail(x, degrees) <= alpha, 1.0)
    noncentrality = _smallest(lambda x: chi_square_tail(critical, degrees, x) >= PROBABILITY, 1.0)
    return min(1.0, math.sqrt(noncentrality * variance) / tokens)


def _smallest(holds, guess: float) -> float:
    """Returns the smallest number for which a monotone condition holds."""
    while not holds(guess):
        guess *= 2
    low, high = 0.0, guess
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def largest_variance(probabilities_NB: torch.Tensor) -> float:
    """Returns the largest variance of the number of tokens among the first ranks, over how many those are."""
    below_NB = probabilities_NB.double().cumsum(1)
    return float((below_NB * (1 - below_NB)).clamp(min=0).sum(0).max())
