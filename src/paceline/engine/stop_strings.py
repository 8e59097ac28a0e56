"""Finds the token at which a response's text first holds a stop string."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from tokenizers import Tokenizer


def first_stop(
    tokenizer: Tokenizer | None, tokens: Sequence[int], stops: Sequence[str], checked: int
) -> int | None:
    """Returns how many tokens it takes until the text holds one of `stops`; None if it holds none.

    The first `checked` tokens are known to hold none. A match that ends in a token begins at most the stop
    string's own bytes before it, and a token holds at least one byte, so only a window is decoded. Tokens
    without text are left out of it: a match may contain any number of them.
    """
    if not stops:
        return None
    assert tokenizer is not None, "requests with stop strings are refused without a tokenizer"
    # Some more, because a decoder holds back the bytes of an incomplete character.
    size = 4 * max(len(stop.encode()) for stop in stops) + 16
    before = (tokens[i] for i in range(checked - 1, -1, -1) if _has_text(tokenizer, tokens[i]))
    window = deque(reversed(list(islice(before, size))), size)
    for end, token in enumerate(tokens[checked:], start=checked + 1):
        if _has_text(tokenizer, token):
            window.append(token)
            text = tokenizer.decode(list(window))
            if any(stop in text for stop in stops):
                return end
    return None


def _has_text(tokenizer: Tokenizer, token: int) -> bool:
    """Returns whether decoding writes a token; special ones and ids beyond the vocabulary are skipped."""
    return token not in _special_tokens(tokenizer) and tokenizer.id_to_token(token) is not None


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(number for number, token in added.items() if token.special)
