"""What is certified: a backend that can be opened plain and with speculation, and what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.backend import Backend
from paceline.certify.certificate import Check
from paceline.certify.fp8_policy import Fp8Policy
from paceline.pacing.strategy import Strategy
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Request

Policy = Decoder | Fp8Policy
# How far apart the same logits may come out in a wide type.
LOGIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass
class Opened:
    """A backend that runs one way. `step_starts` fills where the backend says where its steps began: by
    request, absolute positions.
    """

    backend: Backend
    step_starts: dict[str, list[int]] = field(default_factory=dict)
    strategies: list[list[Strategy]] = field(
        default_factory=list
    )  # of the steps of each run, where a pacer chose them

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the requests' order; one that was refused is an error."""
        self.strategies.append([])
        self.backend.submit(requests)
        with torch.inference_mode():
            done = {completion.request.id: completion for completion in self.backend.completions()}
        completions = [done[request.id] for request in requests]
        for completion in completions:
            if completion.error:
                raise ValueError(f"the backend refused a request: {completion.error}")
        return completions


class Subject(Protocol):
    name: str
    policy: Decoder  # in the backend's own type: what a learner would run
    exact_policy: Policy  # the same weights in the widest type that is worth running
    shaken: Sequence[Policy]  # copies of an FP8 policy as rounding may move it
    same_in_any_batch: bool  # bit for bit, promised of plain decoding
    same_with_any_drafter: bool  # bit for bit, promised of speculation
    tokens: int  # proposed per step
    adaptive: bool  # a pacer chooses who proposes, and how many

    def open(self, tokens: int, max_running: int) -> Opened:
        """At most `tokens` proposed per step; 0: without speculation."""

    def own_checks(self) -> list[Check]:
        """What only this subject can say, after everything else ran."""


def rounded_copies(subject: Subject) -> Sequence[Policy]:
    """The exact policy as rounding may move it, where that is more than last digits: a narrow type has one
    copy, a learner's pass in it.
    """
    return subject.shaken or (() if subject.policy.dtype in LOGIT_TOLERANCE else (subject.policy,))
