"""Messages between the server and its engine: JSON behind four bytes of length.

to the engine      once: {"recipe": text}
                   {"submit": [requests]}   {"abort": [ids]}   {"score": {"call": n, "tokens": [...]}}
from the engine    once: {"ready": {...}} or {"failed": why}
                   {"grown": [...], "ended": [...], "counters": {...}}, after a step
                   {"scored": {"call": n, "logprobs": [...]}}
"""

import json
import struct
from dataclasses import dataclass
from typing import Any

from paceline.types import Request, SamplingParams

HEADER = struct.Struct("!I")
Message = dict[str, Any]


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Adds bytes and returns the messages that are now complete."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, start)
            stop = start + HEADER.size + size
            if len(self._buffer) < stop:
                break
            messages.append(json.loads(bytes(self._buffer[start + HEADER.size : stop])))
            start = stop
        del self._buffer[:start]
        return messages


@dataclass
class Counters:
    """What the engine has done since it started."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    drafts: int = 0
    accepted_tokens: int = 0
    step_seconds: float = 0.0
    running: int = 0  # now
    waiting: int = 0  # now


def request_record(request: Request, stream: bool) -> Message:
    """Returns a request as `read_request` reads it; `stream`: its tokens are wanted as they are sampled."""
    return {
        "id": request.id,
        "prompt": request.prompt,
        "seed": request.seed,
        "sampling": vars(request.sampling),
        "scope": request.scope,
        "grammar": request.grammar,
        "stream": stream,
    }


def read_request(record: Message) -> Request:
    sampling = record["sampling"] | {
        name: tuple(record["sampling"][name]) for name in ("stop_token_ids", "stop")
    }
    return Request(
        record["id"],
        tuple(record["prompt"]),
        record["seed"],
        SamplingParams(**sampling),
        scope=record["scope"],
        grammar=record["grammar"],
    )
