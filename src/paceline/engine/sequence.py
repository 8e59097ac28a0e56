"""The host's view of one request on its way through the engine."""

from dataclasses import dataclass, field

from paceline.types import Completion, FinishReason, Request, Segment


@dataclass(eq=False)
class Sequence:
    request: Request
    order: int  # of arrival
    limit: int  # length of prompt and response at which it must end
    response: list[int] = field(default_factory=list)  # what the host knows; the row on the device may have more
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # leading tokens whose keys and values are in `blocks`
    aborted: bool = False

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

    def complete(self, reason: FinishReason, error: str = "") -> Completion:
        return Completion(self.request, tuple(self.response), tuple(self.logprobs), reason, tuple(self.segments), error)
