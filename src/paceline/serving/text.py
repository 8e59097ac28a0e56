"""Tokens to text while they arrive: whole characters only, and nothing of a stop text."""

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

# What a decoder writes for bytes that are no whole character yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens that one character may take; more are no character.
LONGEST_CHARACTER = 8


class TextStream:
    """Decodes a response token by token, so that the text is the same however the tokens arrive.

    A token's text may depend on those before it (decoders strip the first space), so it is decoded behind the
    last ones that gave text.
    """

    def __init__(self, tokenizer: Tokenizer, keep: frozenset[str] = frozenset()) -> None:
        """`keep` are special tokens that are part of the text; the others are left out."""
        self.tokenizer = tokenizer
        self._silent = special_tokens(tokenizer) - {tokenizer.token_to_id(token) for token in keep}
        # The last tokens that gave text, `_told` many, and behind them those that have not yet.
        self._window: list[int] = []
        self._told = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the text that they complete."""
        return "".join(self._push(token) for token in tokens)

    def _push(self, token: int) -> str:
        if token in self._silent or self.tokenizer.id_to_token(token) is None:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(INCOMPLETE) and len(self._window) - self._told < LONGEST_CHARACTER:
            return ""
        return self._tell(text)

    def finish(self) -> str:
        """Returns what is left: bytes that never became a character."""
        return self._tell(self._decode(self._window))

    def _tell(self, text: str) -> str:
        known = self._decode(self._window[: self._told])
        del self._window[: self._told]
        self._told = len(self._window)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


@lru_cache(maxsize=4)
def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the ids of tokens that control a conversation and are no text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(number for number, token in added.items() if token.special)


class StopFilter:
    """Ends a text before the stop text that is whole first, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.found = ""  # the stop text that ended it
        self._held = ""

    def push(self, text: str) -> str:
        """Adds text and returns what can no longer be part of a stop text."""
        if self.found or not self.stops:
            return "" if self.found else text
        self._held += text
        places = [(at + len(stop), at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if places:
            _, at, self.found = min(places)
            done, self._held = self._held[:at], ""
            return done
        keep = max(overlap(self._held, stop) for stop in self.stops)
        done = self._held[: len(self._held) - keep]
        self._held = self._held[len(done) :]
        return done

    def finish(self) -> str:
        """Returns what was held back: nothing more will come."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
