"""The host's view of one request on its way through the engine."""

from dataclasses import dataclass, field, replace

import torch

from paceline.types import Completion, FinishReason, Request, Routing, Segment


@dataclass(eq=False)
class Sequence:
    request: Request
    order: int  # of arrival
    limit: int  # length of prompt and response at which it must end
    response: list[int] = field(
        default_factory=list
    )  # what the host knows; the row on the device may have more
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # leading tokens whose keys and values are in `blocks`
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    routing: Routing | None = None  # as of when it last ran
    checked: int = 0  # response tokens that have been searched for stop strings
    aborted: bool = False
    handover: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # by drafter: what it needs of the prefill when the row enters

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.response]

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.response)

    def append(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Tokens sampled under weight `version`."""
        if not tokens:
            return
        start = len(self.response)
        self.response.extend(tokens)
        self.logprobs.extend(logprobs)
        if self.segments and self.segments[-1].weight_version == version:
            start = self.segments.pop().start
        self.segments.append(Segment(start, len(self.response), version))

    def drop_blocks(self) -> list[int]:
        """Gives up its blocks, and with them what was cached."""
        blocks, self.blocks, self.cached = self.blocks, [], 0
        return blocks

    def shorten(self, count: int) -> None:
        """Forgets what was sampled beyond the first `count` tokens."""
        del self.response[count:], self.logprobs[count:], self.top_logprobs[count:]
        self.segments = [replace(s, stop=min(s.stop, count)) for s in self.segments if s.start < count]

    def complete(self, reason: FinishReason, error: str = "") -> Completion:
        response, logprobs, segments = tuple(self.response), tuple(self.logprobs), tuple(self.segments)
        return Completion(
            self.request, response, logprobs, reason, segments, error, tuple(self.top_logprobs), self.routing
        )
