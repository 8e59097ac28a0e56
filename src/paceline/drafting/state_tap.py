"""Takes the policy's states along chosen texts out of the learner's own forward pass: no second one."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Capture
from paceline.policy.states import HostBlock, TextCapture, TextPlace, TextStates


class StateTap:
    """Receives the learner's micro-batches (`Learner.capture_states`) and keeps the states of some texts.

    Of several passes over a text the first one counts: it is the one before the update.
    """

    def __init__(self, layers: tuple[int, ...], max_bytes: int) -> None:
        """A step's copies from a GPU share one block of up to `max_bytes`; further ones are separate."""
        self.layers = layers
        self.max_bytes = max_bytes
        self.wanted: dict[tuple[int, ...], int] = {}  # prompt tokens, by all tokens
        self.found: dict[tuple[int, ...], TextStates] = {}
        self.block: HostBlock | None = None
        self._block_bytes = 0  # of the largest so far: a block of the same size is reused quickly
        self._copying: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0  # that copies have taken of a CPU
        self._pinning_seconds = 0.0

    def choose(self, sequences: Iterable[TrainingSequence]) -> None:
        """Sets the texts whose states are wanted from now on, in place of all others."""
        self.wanted = {sequence.tokens: sequence.prompt_length for sequence in sequences}
        self.found = {}
        self.block = None

    def watch(self, sequences: Sequence[TrainingSequence]) -> Capture | None:
        """Returns the capture of a pass over these sequences, packed in this order, or None."""
        places: dict[tuple[int, ...], TextPlace] = {}
        start = 0
        for sequence in sequences:
            if sequence.tokens in self.wanted and sequence.tokens not in self.found:
                places[sequence.tokens] = TextPlace(sequence.tokens, start, sequence.prompt_length)
            start += len(sequence.tokens)
        return _TappedCapture(self, [*places.values()]) if places else None

    def take(self) -> dict[tuple[int, ...], TextStates]:
        """Returns the states by tokens; no more texts are wanted."""
        found, self.found, self.wanted, self.block = self.found, {}, {}, None
        return found

    def take_seconds(self) -> tuple[float, float]:
        """Returns the seconds of copies since the last call, and of pinning memory for them."""
        seconds, self._seconds = self._seconds, 0.0
        pinning_seconds, self._pinning_seconds = self._pinning_seconds, 0.0
        copying, self._copying = self._copying, []
        for began, ended in copying:
            ended.synchronize()
            seconds += began.elapsed_time(ended) / 1e3
        return seconds, pinning_seconds

    def pin(self, state_bytes: int) -> HostBlock:
        """Returns the step's block, with room for the texts that are wanted; a state has so many bytes."""
        if self.block is None:
            began = time.perf_counter()
            sizes = [(len(tokens), prompt) for tokens, prompt in self.wanted.items()]
            needed = min(HostBlock.needed(sizes, len(self.layers), state_bytes), self.max_bytes)
            self._block_bytes = max(self._block_bytes, needed)
            self.block = HostBlock(self._block_bytes)
            self._pinning_seconds += time.perf_counter() - began
        return self.block

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Counts what runs within: a GPU's own time, since the host may only wait for what came before."""
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            yield
            ended.record()
            self._copying.append((began, ended))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start


class _TappedCapture(TextCapture):
    """A capture whose copies are counted, and lie together."""

    def __init__(self, tap: StateTap, places: Sequence[TextPlace]) -> None:
        super().__init__(tap.layers, places, tap.found)
        self.tap = tap

    def finish(self, hidden_TE: torch.Tensor) -> None:
        if hidden_TE.is_cuda:
            self.block = self.tap.pin(hidden_TE.shape[-1] * hidden_TE.dtype.itemsize)
        with self.tap.counted(hidden_TE.device):
            super().finish(hidden_TE)
