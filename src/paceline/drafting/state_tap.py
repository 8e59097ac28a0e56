"""Takes the policy's states along chosen texts out of the learner's own forward pass: no second one."""

import time
from collections.abc import Iterable, Sequence

import torch

from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Capture
from paceline.policy.states import HostBlock, TextCapture, TextPlace, TextStates


class StateTap:
    """Sees the learner's micro-batches (`Learner.capture_states`) and keeps the states of some texts.

    Of several passes over a text the last one counts: its policy is the newest.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.wanted: dict[tuple[int, ...], int] = {}  # prompt tokens, by all tokens
        self.found: dict[tuple[int, ...], TextStates] = {}
        self.block: HostBlock | None = None  # for this step's copies from a GPU
        self._block_bytes = 0  # of the largest so far: what has its size is soon found again
        self.seconds = 0.0  # that copies have taken of the learner's time
        self.pinning_seconds = 0.0  # and memory for them

    def choose(self, sequences: Iterable[TrainingSequence]) -> None:
        """Says whose states are wanted from now on, and forgets all others."""
        self.wanted = {sequence.tokens: sequence.prompt_length for sequence in sequences}
        self.found = {}
        self.block = None

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
        found, self.found, self.wanted, self.block = self.found, {}, {}, None
        return found

    def take_seconds(self) -> tuple[float, float]:
        """Returns what copies have taken since the last call, and pinning memory for them."""
        seconds, self.seconds = self.seconds, 0.0
        pinning_seconds, self.pinning_seconds = self.pinning_seconds, 0.0
        return seconds, pinning_seconds

    def pin(self, state_bytes: int) -> HostBlock:
        """Returns the step's block, with room for the texts that are wanted; a state has so many bytes."""
        if self.block is None:
            began = time.perf_counter()
            states = sum(
                len(tokens) * len(self.layers) + len(tokens) - prompt
                for tokens, prompt in self.wanted.items()
            )
            room = len(self.wanted) * (len(self.layers) + 1) * HostBlock.ALIGNMENT
            self._block_bytes = max(self._block_bytes, states * state_bytes + room)
            self.block = HostBlock(self._block_bytes)
            self.pinning_seconds += time.perf_counter() - began
        return self.block


class _TappedCapture(TextCapture):
    """A capture whose copies are counted, and lie together."""

    def __init__(self, tap: StateTap, places: Sequence[TextPlace]) -> None:
        super().__init__(tap.layers, places, tap.found)
        self.tap = tap

    def finish(self, hidden_TE: torch.Tensor) -> None:
        """Copies what belongs to the texts."""
        began, pinning = time.perf_counter(), self.tap.pinning_seconds
        super().finish(hidden_TE)
        self.tap.seconds += time.perf_counter() - began - (self.tap.pinning_seconds - pinning)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in host memory."""
        if tensor.device.type != "cuda":
            return super().copy(tensor)
        return self.tap.pin(tensor.shape[-1] * tensor.dtype.itemsize).copy(tensor)
