"""Where a response's text first holds a stop string, token by token."""

from collections.abc import Sequence

from tokenizers import Tokenizer


def first_stop(
    tokenizer: Tokenizer | None, tokens: Sequence[int], stops: Sequence[str], checked: int
) -> int | None:
    """Returns how many tokens it takes until the text holds one of `stops`; None if it does not.

    The first `checked` tokens are known to hold none. A match that ends in a token begins at most the stop
    string's own bytes before it, and a token holds at least one byte, so only a window is decoded; it is
    wider because special tokens decode to nothing.
    """
    if not stops:
        return None
    window = 4 * max(len(stop.encode()) for stop in stops) + 16
    for end in range(checked + 1, len(tokens) + 1):
        text = tokenizer.decode(tokens[max(0, end - window) : end])
        if any(stop in text for stop in stops):
            return end
    return None
