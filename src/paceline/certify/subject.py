"""The subject of a certificate: a backend that can be opened plain and with speculation, and its promises.

A backend of another kind becomes a subject by naming its policy and opening itself; what it does not promise
(the same bits, the published noise) is then judged by statistics instead.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from paceline.backend import Backend
from paceline.certify.certificate import Check
from paceline.certify.fp8_policy import Fp8Policy
from paceline.pacing.strategy import Strategy
from paceline.policy.decoder import Decoder
from paceline.policy.rope import rope_table
from paceline.types import Completion, Request

# What can compute the logits of a text.
Policy = Decoder | Fp8Policy

# How far two computations of the same logits may differ in a wide type.
LOGIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

# Tokens of an engine's KV pool, unless a scene wants it small.
KV_TOKENS = 65536


@dataclass(frozen=True)
class Opening:
    """How a backend is opened; what it has no such setting for it ignores."""

    tokens: int = 0  # proposed per step; 0: it does not speculate
    max_running: int = 64
    kv_tokens: int = KV_TOKENS
    prefill_tokens: int = 16384  # per chunk
    restless: bool = False  # another drafter and number of tokens at every step


@dataclass
class OpenedBackend:
    """A backend with fixed settings, and what it reports about its steps."""

    backend: Backend
    # By request, the absolute positions at which its steps began; empty where the backend does not report it.
    step_starts: dict[str, list[int]] = field(default_factory=dict)
    # By request and such a position: what was proposed there, where the backend reports it.
    proposals: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    # The strategies of each run's steps, where a pacer chose them.
    strategies: list[list[Strategy]] = field(default_factory=list)
    # How often a running request was preempted so far.
    preemptions: Callable[[], int] = lambda: 0

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns completions in the requests' order; raises BrokenContract where one was refused."""
        self.submit(requests)
        return in_order(requests, list(self.completions()))

    def submit(self, requests: Sequence[Request]) -> None:
        """Submits requests; their strategies are recorded as a run of their own."""
        self.strategies.append([])
        self.backend.submit(requests)

    def completions(self) -> list[Completion]:
        """Returns what finishes until nothing is outstanding."""
        with torch.inference_mode():
            return list(self.backend.completions())


class BrokenContract(ValueError):
    """A backend answered what `backend.py` does not allow."""


def in_order(requests: Sequence[Request], completions: Sequence[Completion]) -> list[Completion]:
    """Returns completions in the requests' order; raises BrokenContract where one is refused or missing."""
    done: dict[str, Completion] = {}
    for completion in completions:
        if completion.error:
            raise BrokenContract(f"the backend refused a request: {completion.error}")
        if completion.request.id in done:
            raise BrokenContract(f"the backend completed {completion.request.id!r} twice")
        done[completion.request.id] = completion
    missing = [request.id for request in requests if request.id not in done]
    if missing or len(done) > len(requests):
        raise BrokenContract(
            f"the backend did not complete {missing[:3]}" if missing else "unknown completions"
        )
    return [done[request.id] for request in requests]


class Subject(Protocol):
    """A backend to certify."""

    name: str
    policy: Decoder  # in the backend's own type: what a learner would run
    exact_policy: Policy  # the same weights in the widest type that is worth running
    perturbed: Sequence[Policy]  # copies of an FP8 policy as rounding may move it
    draft_policy: Policy | None  # what proposals are drawn from, in the widest type, where that is known
    same_in_any_batch: bool  # plain decoding promises the same bits
    same_with_any_drafter: bool  # speculation promises the same bits
    published_noise: bool  # without rejection, tokens are drawn with the noise of `oracle/noise.py`
    tempered_logprobs: bool  # logprobs are at the request's temperature, not always at 1
    rejects: bool  # proposals are verified by rejection
    exact_rejection: bool  # the oracle knows what rejection must choose
    takes_sizes: bool  # the size of its cache and of prefill's chunks can be set
    takes_weights: bool  # weights may change while requests run, and the oracle can follow
    tokens: int  # proposed per step; 0: it does not speculate
    adaptive: bool  # a pacer chooses the drafter and the number of tokens
    decode: Callable[[list[int]], str] | None  # the tokenizer's; None: it has no stop strings

    def open(self, opening: Opening) -> OpenedBackend:
        """Opens a backend."""

    def snapshot(self, policy: Decoder) -> "Snapshot":
        """Returns a snapshot of a policy's weights, kept through updates; only if it `takes_weights`."""

    def with_positions(self, positions: int) -> "Subject | None":
        """Returns the same with so many positions, on the same weights; None if it cannot be had."""

    def own_checks(self) -> list[Check]:
        """Returns the checks that only this subject has; called after all others."""


@dataclass(frozen=True)
class Snapshot:
    """A policy at one weight version: in the widest type, and as rounding may move it in a narrow one."""

    exact: Policy
    copies: Sequence[Policy] = ()


def with_positions(policy: Policy, positions: int) -> Decoder:
    """Returns the policy with so many positions; both share the weights."""
    assert isinstance(policy, Decoder)
    other = copy.copy(policy)
    other.config = config = replace(policy.config, max_positions=positions)
    other.rope_table = rope_table(config.rope, config.head_dim, positions).to(other.rope_table)
    return other


def rounded_copies(subject: Subject) -> Sequence[Policy]:
    """Returns copies of the exact policy as rounding may move it, where that is more than last digits.

    A subject in FP8 has its perturbed copies, one in another narrow type has one: a learner's pass in it.
    """
    if subject.perturbed:
        return subject.perturbed
    return () if subject.policy.dtype in LOGIT_TOLERANCE else (subject.policy,)
