"""Tells the device which tokens the running rows' grammars allow next."""

from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

from paceline.config.extras import needs_package
from paceline.engine.grammars import Grammars
from paceline.engine.request_state import RequestState
from paceline.engine.rows import Rows
from paceline.policy.config import DecoderConfig


class Masks:
    """The grammars of one engine; llguidance is imported with the first."""

    def __init__(self, tokenizer: Tokenizer | None, policy: DecoderConfig, rows: Rows) -> None:
        self.tokenizer = tokenizer
        self.policy = policy
        self.rows = rows

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.policy.vocab_size, self.policy.eos_token_ids)

    def problem(self, grammar: str) -> str:
        """Returns why no request can be held to a grammar; empty if one can."""
        if not grammar:
            return ""
        if self.tokenizer is None:
            return "a grammar needs an engine with a tokenizer"
        try:
            return self.grammars.problem(grammar)
        except ImportError:
            return f"a grammar {needs_package('llguidance', 'serve')}"

    def write(self, sequences: list[RequestState]) -> None:
        """Sets what rows with a grammar may sample next; the host must know everything they have sampled."""
        held = [sequence for sequence in sequences if sequence.request.grammar]
        for sequence in held:
            if sequence.grammar is None:
                sequence.grammar = self.grammars.start(sequence.request.grammar)
        if held:
            allowed_RW = np.stack([sequence.grammar.allowed(sequence.response) for sequence in held])
            self.rows.allow([sequence.slot for sequence in held], allowed_RW, self.policy.vocab_size)
