"""The host's view of one request on its way through the engine."""

import time
from dataclasses import dataclass, field, replace

import torch

from paceline.stats import RequestTrace
from paceline.types import Completion, FinishReason, Request, Routing, Segment

# Moments of a request that are kept: one that is preempted over and over must not grow without end.
MOST_MOMENTS = 64


@dataclass(eq=False)
class RequestState:
    """A request with what it has sampled so far and what it occupies."""

    request: Request
    # The order of arrival.
    order: int
    # The length of prompt and response at which it must end.
    limit: int
    # What the host knows; the row on the device may have more.
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    # -1: it has none.
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    # Leading tokens whose keys and values are in `blocks`.
    cached: int = 0
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    # As of when it last ran.
    routing: Routing | None = None
    # Response tokens that have been searched for stop strings.
    checked: int = 0
    aborted: bool = False
    # By drafter: what it needs of the prefill when the row enters.
    handover: dict[str, torch.Tensor] = field(default_factory=dict)
    # Stage, its begin on the host's clock, and the slot at that time.
    moments: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.response]

    @property
    def length(self) -> int:
        """The number of tokens of prompt and response."""
        return len(self.request.prompt) + len(self.response)

    def begin(self, stage: str) -> None:
        """Notes that the request waits, prefills or decodes from now on."""
        if len(self.moments) < MOST_MOMENTS:
            self.moments.append((stage, time.perf_counter(), self.slot))

    def trace(self, reason: FinishReason) -> RequestTrace:
        """Returns the request's way through the engine, which ends now."""
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
        """Gives up the blocks, and with them what was cached, and returns them."""
        blocks = self.blocks
        self.blocks = []
        self.cached = 0
        return blocks

    def shorten(self, count: int) -> None:
        """Forgets what was sampled beyond the first `count` tokens."""
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
        )
