"""Takes the policy's states along chosen texts out of the learner's own forward pass: no second one."""

import time
from collections.abc import Iterable, Sequence

import torch

from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Capture
from paceline.policy.states import TextCapture, TextPlace, TextStates


class StateTap:
    """Sees the learner's micro-batches (`Learner.capture_states`) and keeps the states of some texts.

    Of several passes over a text the last one counts: its policy is the newest.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.wanted: set[tuple[int, ...]] = set()
        self.found: dict[tuple[int, ...], TextStates] = {}
        self.seconds = 0.0  # that copies have taken of the learner's time

    def choose(self, sequences: Iterable[TrainingSequence]) -> None:
        """Says whose states are wanted from now on, and forgets all others."""
        self.wanted = {sequence.tokens for sequence in sequences}
        self.found = {}

    def watch(self, sequences: Sequence[TrainingSequence]) -> Capture | None:
        """Returns what takes the states out of a pass over these sequences, packed in this order."""
        places = []
        start = 0
        for sequence in sequences:
            if sequence.tokens in self.wanted:
                places.append(TextPlace(sequence.tokens, start, sequence.prompt_length))
            start += len(sequence.tokens)
        return _TappedCapture(self, places) if places else None

    def take(self) -> dict[tuple[int, ...], TextStates]:
        """Returns the states by tokens, and expects nothing more."""
        found, self.found, self.wanted = self.found, {}, set()
        return found

    def take_seconds(self) -> float:
        """Returns what copies have taken since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class _TappedCapture(TextCapture):
    """A capture whose copies are counted."""

    def __init__(self, tap: StateTap, places: Sequence[TextPlace]) -> None:
        super().__init__(tap.layers, places, tap.found)
        self.tap = tap

    def finish(self, hidden_TE: torch.Tensor) -> None:
        """Copies what belongs to the texts."""
        began = time.perf_counter()
        super().finish(hidden_TE)
        self.tap.seconds += time.perf_counter() - began
