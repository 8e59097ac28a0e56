"""Rollout correction as its formulas say, token by token in plain Python floats."""

import math
from dataclasses import dataclass

from paceline.config import CorrectionConfig


@dataclass(frozen=True)
class Drawn:
    """A response: the logprobs of both policies, and which tokens were sampled."""

    learner: list[float]
    rollout: list[float]
    sampled: list[bool]

    @property
    def deltas(self) -> list[float]:
        return [
            a - b for a, b, sampled in zip(self.learner, self.rollout, self.sampled, strict=True) if sampled
        ]


def bounded_exp(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def k3(delta: float) -> float:
    delta = max(-20.0, min(20.0, delta))
    return math.exp(delta) - 1 - delta


def expected(config: CorrectionConfig, response: Drawn) -> list[tuple[float, bool]]:
    """Weight and whether it stays in the loss, for each sampled token of the response."""
    deltas = response.deltas
    low, high = config.reject_bounds
    keep_response = not any(bounded_exp(d) < config.veto for d in deltas)
    if config.reject == "sequence":
        keep_response &= low <= bounded_exp(sum(deltas)) <= high
    elif config.reject == "geometric":
        keep_response &= low <= math.exp(sum(deltas) / len(deltas)) <= high
    elif config.reject == "k3":
        keep_response &= sum(map(k3, deltas)) / len(deltas) <= high
    tokens = []
    for delta in deltas:
        keep = keep_response and not (config.reject == "token" and not low <= bounded_exp(delta) <= high)
        weight = {"none": 1.0, "token": bounded_exp(delta), "sequence": bounded_exp(sum(deltas))}[
            config.weight
        ]
        lowest, highest = config.weight_bounds
        if config.weight != "none" and config.weight_outside == "zero":
            weight = weight if lowest <= weight <= highest else 0.0
        elif config.weight != "none":
            weight = min(max(weight, lowest), highest)
        tokens.append((weight, keep))
    return tokens


def correction_config(**keys) -> CorrectionConfig:
    return CorrectionConfig.model_validate(keys)
