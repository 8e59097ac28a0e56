"""The engine's side of the server: one loop that admits requests, steps, and reports what was sampled.

while the server is there:
    read what it sent      all of it, between two steps; waits only while nothing is outstanding
    engine.advance()       one step
    report                 one frame for all requests: tokens of those that stream, and what has ended
"""

import select
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.engine import Engine
from paceline.engine.request_state import RequestState
from paceline.serving.frames import Counters, FrameReader, Message, pack, read_request
from paceline.types import Completion

# Seconds between two reports of the counters.
REPORT_SECONDS = 1.0
RECEIVE_BYTES = 1 << 20


@dataclass
class EngineHost:
    """Runs an engine for one server until the server closes the connection."""

    engine: Engine
    connection: socket.socket
    description: Message
    counters: Counters = field(default_factory=Counters)
    _frames: FrameReader = field(default_factory=FrameReader)
    # Tokens that were reported, by request; those that do not stream are reported when they end.
    _reported: dict[str, int] = field(default_factory=dict)
    _scores: deque[Message] = field(default_factory=deque)
    _counted_at: float = 0.0
    _has_worked: bool = False

    def run(self) -> None:
        self._send({"ready": self.description})
        working = False
        while self._receive(wait=not working):
            working = self.engine.advance()
            self._report(resting=not working)
            while self._scores:
                self._score(self._scores.popleft())
        self.engine.close()

    def _receive(self, wait: bool) -> bool:
        """Handles what the server sent, and waits for the first message; returns False once it is gone."""
        if wait:
            self.engine.resting()
        while select.select([self.connection], [], [], None if wait else 0)[0]:
            try:
                data = self.connection.recv(RECEIVE_BYTES)
            except OSError:
                return False
            if not data:
                return False
            for message in self._frames.feed(data):
                self._handle(message)
                wait = False
        return True

    def _handle(self, message: Message) -> None:
        if "submit" in message:
            requests = [read_request(record) for record in message["submit"]]
            streaming = [record["id"] for record in message["submit"] if record["stream"]]
            self._reported |= dict.fromkeys(streaming, 0)
            self.engine.submit(requests)
        if "abort" in message:
            self.engine.abort(message["abort"])
        if "score" in message:
            self._scores.append(message["score"])

    def _report(self, resting: bool) -> None:
        grown = []
        if self._reported and self.engine.running:
            grown = [g for state in self.engine.read_running() if (g := self._growth(state))]
        ended = []
        while self.engine.finished:
            ended.append(self._end(self.engine.finished.popleft()))
        now = time.monotonic()
        message: Message = {}
        if grown or ended:
            message = {"grown": grown, "ended": ended}
        if now - self._counted_at >= REPORT_SECONDS or (resting and self._has_worked):
            self._counted_at = now
            self._count()
            message["counters"] = vars(self.counters)
        self._has_worked = not resting
        if message:
            self._send(message)

    def _growth(self, state: RequestState) -> list[Any] | None:
        name = state.request.id
        start = self._reported.get(name)
        if start is None or start == len(state.response):
            return None
        self._reported[name] = len(state.response)
        top = [list(t.items()) for t in state.top_logprobs[start : len(state.response)]]
        return [name, state.response[start:], state.logprobs[start:], top]

    def _end(self, completion: Completion) -> Message:
        start = self._reported.pop(completion.request.id, 0)
        return {
            "id": completion.request.id,
            "tokens": completion.tokens[start:],
            "logprobs": completion.logprobs[start:],
            "top": [list(top.items()) for top in completion.top_logprobs[start:]],
            "reason": completion.finish_reason,
            "error": completion.error,
            "segments": [[s.start, s.stop, s.weight_version] for s in completion.segments],
            "reused": completion.reused_tokens,
        }

    def _count(self) -> None:
        stats = self.engine.take_stats()
        counters = self.counters
        counters.generated_tokens += stats.generated_tokens
        counters.prefill_tokens += stats.prefill_tokens
        counters.steps += len(stats.running)
        counters.step_seconds += sum(stats.step_seconds)
        counters.drafts += sum(draft.drafts for draft in stats.drafts.values())
        counters.accepted_tokens += sum(draft.accepted for draft in stats.drafts.values())
        counters.running = len(self.engine.running)
        counters.waiting = len(self.engine.scheduler.sequences)

    def _score(self, asked: Message) -> None:
        self._send(
            {"scored": {"call": asked["call"], "logprobs": self.engine.text_logprobs(asked["tokens"])}}
        )

    def _send(self, message: Message) -> None:
        try:
            self.connection.sendall(pack(message))
        except OSError:  # the server is gone, which the next receive finds as well
            self.engine.abort([*self._reported])
