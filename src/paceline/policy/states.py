"""The policy's states along one text, captured from passes that run anyway.

    text       p0 p1 p2 r0 r1 r2        prompt, then response
    captured    x  x  x  x  x  x        what entered each captured layer, of all tokens
    hidden            x  x  x           the last states that predict the response's tokens

They are copies without a gradient: what is learned from them reaches no tensor of the policy.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from paceline.policy.decoder import Capture


@dataclass(frozen=True)
class TextStates:
    """What a policy computed along a prompt and its response."""

    hidden_RE: torch.Tensor
    captured_TE: tuple[torch.Tensor, ...]  # in the order of the layers

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.hidden_RE, *self.captured_TE))


class StateRecording:
    """The capability to record the policy's states while it generates; this one records nothing."""

    def record_states(self, max_bytes: int) -> None:
        """Starts recording the states of some requests, in at most `max_bytes` of device memory.

        Called before the first request.
        """

    def take_states(self) -> Mapping[tuple[int, ...], TextStates]:
        """Returns the states of responses finished since the last call, keyed by prompt + response."""
        return {}


@dataclass(frozen=True)
class TextPlace:
    """Where a text lies within packed ones."""

    key: tuple[int, ...]  # its tokens
    start: int
    prompt: int


class TextCapture(Capture):
    """A capture of some of the texts of a packed pass, which it hands over when the pass is complete."""

    def __init__(
        self,
        layers: tuple[int, ...],
        places: Sequence[TextPlace],
        found: dict[tuple[int, ...], TextStates],
    ) -> None:
        """`found` receives the states under each text's tokens, where the pass computes them."""
        super().__init__(layers)
        self.places = places
        self.found = found

    def finish(self, hidden_TE: torch.Tensor) -> None:
        for place in self.places:
            stop = place.start + len(place.key)
            predictors = slice(place.start + place.prompt - 1, stop - 1)
            self.found[place.key] = TextStates(
                hidden_TE.detach()[predictors].clone(),
                tuple(states_TE.detach()[place.start : stop].clone() for states_TE in self.states_TE),
            )
        self.states_TE = []


class HostBlock:
    """Pinned memory for copies from a GPU that come and go together.

    Pinning takes longer than copying, so copies of their own would cost more to make room for than to make.
    When all copies are released, torch reuses the block for a request of the same size.
    """

    # Bytes that copies begin at multiples of.
    ALIGNMENT = 256

    def __init__(self, num_bytes: int) -> None:
        self.bytes_B = _pinned((num_bytes,), torch.uint8)
        self.used = 0

    @classmethod
    def needed(cls, texts: Sequence[tuple[int, int]], layers: int, state_bytes: int) -> int:
        """Returns the bytes needed for texts of (tokens, of these the prompt's)."""
        states = sum(layers * length + length - prompt for length, prompt in texts)
        return states * state_bytes + len(texts) * (layers + 1) * cls.ALIGNMENT

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy, complete in stream order; in memory of its own if it does not fit."""
        start, self.used = self.used, self.used + -(-tensor.nbytes // self.ALIGNMENT) * self.ALIGNMENT
        if start + tensor.nbytes > len(self.bytes_B):
            return to_host(tensor)
        host = self.bytes_B[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return host.copy_(tensor.detach(), non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory; from a GPU, complete in stream order."""
    if tensor.device.type != "cuda":
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return _pinned(tensor.shape, tensor.dtype).copy_(tensor.detach(), non_blocking=True)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to the device; to a GPU through pinned memory, so that the host does not wait for it."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # as in `_pinned`
            host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocates host memory, pinned where possible, which makes copies faster."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)
