"""The host's state of one request in the engine."""

import time
from dataclasses import dataclass, field, replace

import torch

from paceline.engine.grammars import GrammarState
from paceline.stats import RequestTrace
from paceline.types import Completion, FinishReason, Request, Routing, Segment

# Moments kept of a request: a bound, for requests that are preempted over and over.
MOST_MOMENTS = 64


@dataclass(eq=False)
class RequestState:
    """A request with its samples so far, its slot and its blocks."""

    request: Request
    # The order of arrival.
    order: int
    # The length of prompt and response at which it must end.
    limit: int
    # As known to the host; the row on the device may have more.
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    # -1: it has none.
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    # Leading tokens whose keys and values are in `blocks`.
    cached: int = 0
    # Leading tokens whose keys and values an earlier request had left when it was first admitted.
    reused: int = 0
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    # As of its last run.
    routing: Routing | None = None
    # Where in its grammar it is, if it has one and has run.
    grammar: GrammarState | None = None
    # Response tokens that have been searched for stop strings.
    checked: int = 0
    aborted: bool = False
    # By drafter: its state after the prefill, passed on when the row enters.
    handover: dict[str, torch.Tensor] = field(default_factory=dict)
    # Stage, its begin on the host's clock, and the slot at that time.
    moments: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.response]

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.request.prompt) + len(self.response)

    def begin(self, stage: str) -> None:
        """Records the start of a stage: waiting, prefill or decode."""
        if len(self.moments) < MOST_MOMENTS:
            self.moments.append((stage, time.perf_counter(), self.slot))

    def trace(self, reason: FinishReason) -> RequestTrace:
        """Returns the request's stages in the engine; the last one ends now."""
        moments = (*self.moments, ("left", time.perf_counter(), -1))
        return RequestTrace(self.request.id, moments, len(self.request.prompt), len(self.response), reason)

    def append(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        if not tokens:
            return
        start = len(self.response)
        self.response.extend(tokens)
        self.logprobs.extend(logprobs)
        if self.segments and self.segments[-1].weight_version == version:
            start = self.segments.pop().start
        self.segments.append(Segment(start, len(self.response), version))

    def drop_blocks(self) -> list[int]:
        """Clears the blocks, and with them what was cached, and returns them for the caller to release."""
        blocks = self.blocks
        self.blocks = []
        self.cached = 0
        return blocks

    def shorten(self, count: int) -> None:
        """Drops what was sampled beyond the first `count` tokens."""
        del self.response[count:], self.logprobs[count:], self.top_logprobs[count:]
        self.segments = [replace(s, stop=min(s.stop, count)) for s in self.segments if s.start < count]

    def complete(self, reason: FinishReason, error: str = "") -> Completion:
        return Completion(
            self.request,
            tuple(self.response),
            tuple(self.logprobs),
            reason,
            tuple(self.segments),
            error,
            tuple(self.top_logprobs),
            self.routing,
            self.reused,
        )
