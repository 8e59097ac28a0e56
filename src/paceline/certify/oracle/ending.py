"""Where a response must end and why, from its tokens alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """How many tokens a response has, and the reason: `stop` or `length`; empty: it must continue."""

    tokens: int
    reason: str


def ending(
    tokens: Sequence[int],
    stop_ids: frozenset[int],
    stop_texts: Sequence[str],
    decode: Callable[[list[int]], str] | None,
    limit: int,
) -> Ending:
    """Returns where these tokens must end.

    It is the first that is a stop token, or completes a stop text in everything decoded so far, or is the
    last that `limit` allows. A stop on the last one is a stop.
    """
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] in stop_ids:
            return Ending(count, "stop")
        if stop_texts and any(text in decode(list(tokens[:count])) for text in stop_texts):
            return Ending(count, "stop")
        if count >= limit:
            return Ending(count, "length")
    return Ending(len(tokens), "")
