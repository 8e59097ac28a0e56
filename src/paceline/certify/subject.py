"""The subject of a certificate: a backend that can be opened plain and with speculation, and its promises."""

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

# What can compute the logits of a text.
Policy = Decoder | Fp8Policy

# How far two computations of the same logits may differ in a wide type.
LOGIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass
class OpenedBackend:
    """A backend with fixed settings, and what it reports about its steps."""

    backend: Backend
    # By request, the absolute positions at which its steps began; empty where the backend does not say.
    step_starts: dict[str, list[int]] = field(default_factory=dict)
    # The strategies of each run's steps, where a pacer chose them.
    strategies: list[list[Strategy]] = field(default_factory=list)

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns completions in the requests' order; raises ValueError where one was refused."""
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
    """A backend to certify."""

    name: str
    policy: Decoder  # in the backend's own type: what a learner would run
    exact_policy: Policy  # the same weights in the widest type that is worth running
    perturbed: Sequence[Policy]  # copies of an FP8 policy as rounding may move it
    same_in_any_batch: bool  # plain decoding promises the same bits
    same_with_any_drafter: bool  # speculation promises the same bits
    tokens: int  # proposed per step; 0: it does not speculate
    adaptive: bool  # a pacer chooses the drafter and the number of tokens

    def open(self, tokens: int, max_running: int) -> OpenedBackend:
        """Opens a backend that proposes at most `tokens` per step; with 0 it does not speculate."""

    def own_checks(self) -> list[Check]:
        """Returns the checks that only this subject has; called after all others."""


def rounded_copies(subject: Subject) -> Sequence[Policy]:
    """Returns copies of the exact policy as rounding may move it, where that is more than last digits.

    A subject in FP8 has its perturbed copies, one in another narrow type has one: a learner's pass in it.
    """
    if subject.perturbed:
        return subject.perturbed
    return () if subject.policy.dtype in LOGIT_TOLERANCE else (subject.policy,)
