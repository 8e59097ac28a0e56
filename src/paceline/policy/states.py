"""The policy's states along one text, taken out of passes that somebody makes anyway.

    text       p0 p1 p2 r0 r1 r2        prompt, then response
    captured    x  x  x  x  x  x        what entered each captured layer, of all tokens
    hidden            x  x  x           the last states that predict the response's tokens

They are copies on the host, without a gradient: what is learned from them reaches nobody else's tensors.
"""

from collections.abc import Sequence
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
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (self.hidden_RE, *self.captured_TE))


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
        """`found` receives the states under each text's tokens."""
        super().__init__(layers)
        self.places = places
        self.found = found

    def finish(self, hidden_TE: torch.Tensor) -> None:
        """Copies what belongs to the texts, and lets go of the rest."""
        wholes = [slice(place.start, place.start + len(place.key)) for place in self.places]
        predictors = [
            slice(p.start + p.prompt - 1, w.stop - 1) for p, w in zip(self.places, wholes, strict=True)
        ]
        hidden = _rows_on_host(hidden_TE.detach(), predictors)
        captured = [_rows_on_host(states_TE, wholes) for states_TE in self.states_TE]
        for place, hidden_RE, *captured_TE in zip(self.places, hidden, *captured, strict=True):
            self.found[place.key] = TextStates(hidden_RE, tuple(captured_TE))
        self.states_TE = []


def _rows_on_host(states_TE: torch.Tensor, parts: Sequence[slice]) -> Sequence[torch.Tensor]:
    """Returns copies of these rows in host memory, by way of one: pinned memory takes long to get."""
    joined_TE = torch.cat([states_TE[part] for part in parts])
    return to_host(joined_TE).split([part.stop - part.start for part in parts])


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory; from a GPU, complete when the current stream has got there."""
    if tensor.device.type != "cuda":
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to the device; to a GPU through pinned memory, so that the host does not wait for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
