"""One sample over several turns, merged into one completion.

    request    prompt
    turn 1            response 1                                     sampled
    step                         observation                         not sampled: outside the loss, logprob 0
    turn 2            prompt = everything so far ──▶ response 2      sampled, same seed
    completion        response 1 observation response 2

Every turn keeps the id of the original request: only one is running at a time, so aborting
that id aborts the running turn. `max_tokens` bounds the whole, observations included.
"""

from dataclasses import dataclass, replace

from paceline.tasks.base import Turn
from paceline.types import Completion, FinishReason, Request, Routing, Segment


@dataclass
class Dialogue:
    """The turns of one sample so far, and the completion that they add up to."""

    request: Request
    conversation: tuple[Turn, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    segments: tuple[Segment, ...] = ()
    top_logprobs: tuple[dict[int, float], ...] = ()
    # The last turn's routing covers everything: its prompt contains all earlier turns.
    routing: Routing | None = None
    finish_reason: FinishReason = FinishReason.ABORTED
    error: str = ""
    # The observation that the next request ends with, until a response follows it.
    observation: tuple[int, ...] = ()
    observation_text: str = ""

    def add_response(self, completion: Completion, text: str) -> None:
        """Appends a turn's completion, and the observation that its request ended with."""
        self.error = completion.error
        if self.tokens and completion.finish_reason is FinishReason.REFUSED:
            self.finish_reason = FinishReason.LENGTH  # earlier turns remain; there is no room to continue
            return
        self.finish_reason = completion.finish_reason
        if not completion.tokens:
            return
        self._take_observation(completion.segments[0].weight_version)
        start = len(self.tokens)
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        self.segments += tuple(
            replace(s, start=s.start + start, stop=s.stop + start) for s in completion.segments
        )
        self.top_logprobs += completion.top_logprobs
        self.routing = completion.routing
        self.conversation += (Turn(text, sampled=True),)

    def continue_with(self, observation: tuple[int, ...], text: str) -> Request | None:
        """Returns the request of the next turn; None (and the sample is truncated) without tokens for it."""
        remaining = self.request.sampling.max_tokens - len(self.tokens) - len(observation)
        if remaining <= 0:
            self.finish_reason = FinishReason.LENGTH
            return None
        self.observation = observation
        self.observation_text = text
        prompt = self.request.prompt + self.tokens + observation
        return replace(
            self.request,
            prompt=prompt,
            sampling=replace(self.request.sampling, max_tokens=remaining),
            continues=self.request.id,
        )

    def completion(self) -> Completion:
        return Completion(
            self.request,
            self.tokens,
            self.logprobs,
            self.finish_reason,
            self.segments,
            self.error,
            self.top_logprobs,
            self.routing,
        )

    def _take_observation(self, weight_version: int) -> None:
        """Appends the pending observation: it counts once a response follows it."""
        if not self.observation:
            return
        start = len(self.tokens)
        count = len(self.observation)
        self.tokens += self.observation
        self.logprobs += (0.0,) * count
        self.segments += (Segment(start, start + count, weight_version, sampled=False),)
        self.top_logprobs += ({},) * count if self.request.sampling.top_logprobs else ()
        self.conversation += (Turn(self.observation_text, sampled=False),)
        self.observation = ()
        self.observation_text = ""
