"""Grammars that responses must follow, through llguidance: which tokens may come next.

A grammar masks the distribution: a token that it forbids is never sampled, and logprobs are those of what is
left. It knows its place in a response from the tokens, so a row that has one decodes a token per step, and
the host sees each before the next step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer


class Grammars:
    """Compiles grammars for one tokenizer; raises ImportError without llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self._matcher = LLMatcher
        self.words = -(-vocab_size // 32)
        self._problem = ""
        try:
            self._tokenizer = LLTokenizer(
                tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
            )
        except ValueError as error:
            self._problem = f"this model's tokenizer takes no grammar: {error}"

    def problem(self, grammar: str) -> str:
        """Returns why no response can be held to this grammar; empty if one can."""
        return self._problem or self._matcher.validate_grammar(grammar, self._tokenizer).strip()

    def start(self, grammar: str) -> "GrammarState":
        """Returns the state before a response's first token."""
        return GrammarState(self._matcher(self._tokenizer, grammar, log_level=0), self.words)


class GrammarState:
    """Where in its grammar a response is."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._words = words
        self._seen = 0

    def allowed(self, response: Sequence[int]) -> np.ndarray:
        """Returns the tokens that may follow a response, 32 in a word, the lowest in its lowest bit.

        `response` begins with the one given last.
        """
        self._matcher.consume_tokens(list(response[self._seen :]))
        self._seen = len(response)
        bits = np.zeros(self._words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits
