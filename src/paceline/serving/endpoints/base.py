"""What an endpoint is."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from paceline.serving.errors import ApiError
from paceline.serving.schemas.base import Body
from paceline.serving.schemas.chat import ChatLogprobs, ChosenLogprob, TokenLogprob
from paceline.serving.service import Call, Piece, Service

# The logprob of what has none: a token that a grammar forbids.
LOWEST_LOGPROB = -9999.0


class Endpoint(ABC):
    """One path that takes a JSON body; an answer is a model, or the events of a stream."""

    path: ClassVar[str]
    body: ClassVar[type[Body]]
    answer: ClassVar[type[BaseModel]]
    summary: ClassVar[str]

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    async def handle(self, body: Any, call: Call) -> BaseModel | AsyncIterator[str]:
        """Answers a request; what it starts in the engine is in `call.batches`."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Returns the API's error object."""
        return error.openai()

    def error_event(self, error: ApiError) -> str:
        """Returns the event that ends a stream which cannot go on."""
        return event(self.error(error))


def event(data: BaseModel | dict[str, Any] | str, name: str = "") -> str:
    """Returns a server-sent event."""
    if isinstance(data, BaseModel):
        text = data.model_dump_json(exclude_unset=True, by_alias=True)
    else:
        text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


DONE = event("[DONE]")


def now() -> int:
    return int(time.time())


class TokenTexts:
    """The texts of single tokens, for logprobs."""

    def __init__(self, service: Service, as_ids: bool = False) -> None:
        self.tokenizer = service.tokenizer
        self.as_ids = as_ids

    def text(self, token: int) -> str:
        if self.as_ids:
            return f"token_id:{token}"
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        return {
            "token": text,
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": None if self.as_ids else list(text.encode()),
        }

    def chat(self, piece: Piece) -> ChatLogprobs:
        """Returns a piece's logprobs as chat completions have them."""
        return ChatLogprobs(
            content=[
                ChosenLogprob(
                    **self.entry(token, logprob),
                    top_logprobs=[TokenLogprob(**self.entry(*pair)) for pair in top.items()],
                )
                for token, logprob, top in of_tokens(piece)
            ],
            refusal=None,
        )


def of_tokens(piece: Piece) -> list[tuple[int, float, dict[int, float]]]:
    """Returns a piece token by token: id, logprob, and the likeliest ones where they were asked for."""
    tops: Sequence[dict[int, float]] = piece.top_logprobs or [{}] * len(piece.tokens)
    return list(zip(piece.tokens, piece.logprobs, tops, strict=True))


def merged(pieces: Sequence[Piece]) -> Piece:
    """Returns several pieces of a choice as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        [logprob for piece in pieces for logprob in piece.logprobs],
        [top for piece in pieces for top in piece.top_logprobs],
        any(piece.ended for piece in pieces),
    )
