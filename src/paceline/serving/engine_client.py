"""The server's side of the engine: requests out, and for each one what it has sampled so far."""

import asyncio
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from paceline.serving.frames import HEADER, Counters, Message, pack, request_record
from paceline.types import FinishReason, Request, Segment


class EngineLost(RuntimeError):
    """The engine's process has ended."""


@dataclass
class Generation:
    """One request in the engine: everything it has sampled so far, for a reader that comes when it can."""

    request: Request
    # Set when there is something new; requests that are read together share one.
    changed: asyncio.Event
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    segments: tuple[Segment, ...] = ()
    reason: FinishReason | None = None  # None: it has not ended
    error: str = ""
    reused_tokens: int = 0

    def grow(self, tokens: list[int], logprobs: list[float], top: list[list[Any]]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.top_logprobs += [dict(pairs) for pairs in top]
        self.changed.set()


class EngineClient:
    """Connects the server's event loop to an `EngineHost`."""

    def __init__(self) -> None:
        self.description: Message = {}
        self.counters = Counters()
        self.outstanding: dict[str, Generation] = {}
        self.lost = asyncio.Event()
        self._ids = count()
        self._scores: dict[int, asyncio.Future[list[float]]] = {}

    async def connect(self, connection: socket.socket, recipe: str = "") -> None:
        """Waits until the engine is ready; raises `EngineLost` with the reason if it ends before.

        A process that makes its engine itself gets the recipe.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=connection)
        if recipe:
            self._send({"recipe": recipe})
        try:
            first = await self._receive()
        except (asyncio.IncompleteReadError, OSError):
            raise EngineLost("the engine's process ended before it was ready") from None
        if "failed" in first:
            raise EngineLost(first["failed"])
        self.description = first["ready"]
        self._listening = asyncio.create_task(self._listen())

    def new_id(self) -> str:
        return str(next(self._ids))

    def submit(self, requests: Sequence[Request], stream: bool, changed: asyncio.Event) -> list[Generation]:
        """Sends requests; `changed` is set whenever one of them has grown (with `stream`) or ended."""
        if self.lost.is_set():
            raise EngineLost("the engine has ended")
        generations = [Generation(request, changed) for request in requests]
        self.outstanding |= {g.request.id: g for g in generations}
        self._send({"submit": [request_record(request, stream) for request in requests]})
        return generations

    def abort(self, generations: Iterable[Generation]) -> None:
        """Ends those that have not ended; nothing more is heard of them."""
        ids = [g.request.id for g in generations if self.outstanding.pop(g.request.id, None)]
        if ids and not self.lost.is_set():
            self._send({"abort": ids})

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Returns the logprobs of all tokens but the first, at temperature 1."""
        call = next(self._ids)
        self._scores[call] = asyncio.get_running_loop().create_future()
        self._send({"score": {"call": call, "tokens": list(tokens)}})
        try:
            return await self._scores[call]
        finally:
            del self._scores[call]

    async def close(self) -> None:
        """Lets the engine end."""
        self._listening.cancel()
        self._writer.close()

    def _send(self, message: Message) -> None:
        self._writer.write(pack(message))

    async def _receive(self) -> Message:
        (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        message: Message = json.loads(await self._reader.readexactly(size))
        return message

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._receive())
        except (asyncio.IncompleteReadError, OSError):
            self._lose()

    def _take(self, message: Message) -> None:
        for name, tokens, logprobs, top in message.get("grown", ()):
            if name in self.outstanding:
                self.outstanding[name].grow(tokens, logprobs, top)
        for record in message.get("ended", ()):
            generation = self.outstanding.pop(record["id"], None)
            if generation is None:
                continue
            generation.reason = FinishReason(record["reason"])
            generation.error = record["error"]
            generation.segments = tuple(Segment(*segment) for segment in record["segments"])
            generation.reused_tokens = record["reused"]
            generation.grow(record["tokens"], record["logprobs"], record["top"])
        if "counters" in message:
            self.counters = Counters(**message["counters"])
        if "scored" in message:
            future = self._scores.get(message["scored"]["call"])
            if future is not None:
                future.set_result(message["scored"]["logprobs"])

    def _lose(self) -> None:
        self.lost.set()
        for generation in self.outstanding.values():
            generation.reason = FinishReason.ABORTED
            generation.error = "the engine has ended"
            generation.changed.set()
        self.outstanding.clear()
        for future in self._scores.values():
            future.set_exception(EngineLost("the engine has ended"))
