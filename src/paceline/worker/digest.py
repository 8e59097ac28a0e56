"""A digest of weights, computed where they lie: one pass over the memory, and a GPU is waited for once.

Integer sums that wrap around, so the order of the additions does not matter and every device finds the same:
of the bits of each tensor, plainly and weighted by position, so that neither a changed bit nor a piece of
another version nor two pieces in each other's place goes unnoticed. It guards against faults, not against
forged weights.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.kernels.word_sums import WordSums

WORD = 8
MODULUS = 2**64


def tensor_digest(tensor: torch.Tensor) -> tuple[int, int]:
    ((plain, weighted),) = _Sums([tensor]).compute()
    return plain, weighted


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns the digest of named tensors on one device: of their names, types, shapes and bits."""
    return WeightsDigest().of(weights)


class WeightsDigest:
    """Digests of weights that mostly stay where they are.

    What follows from their names, types, shapes and addresses is computed once, and again when one of those
    changes.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None  # in one piece: several threads may ask at once

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
        named = list(weights)
        facts = [(name, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in named]
        known = self._known
        if known is None or known.facts != facts:
            beginnings = [f"({name!r}, {str(t.dtype)!r}, {tuple(t.shape)!r}, " for name, t in named]
            known = _Known(facts, beginnings, _Sums([tensor for _, tensor in named]))
        # A copy holds what the tensor held now, and is memory.
        self._known = None if known.sums.has_copies else known
        pairs = zip(known.beginnings, known.sums.compute(), strict=True)
        text = "".join(f"{beginning}{sums!r})" for beginning, sums in pairs)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Known:
    """What is known of tensors that stay: each one's text is the `repr` of name, type, shape and sums."""

    facts: list[Any]
    beginnings: list[str]  # of the texts, up to the sums
    sums: "_Sums"


class _Sums:
    """Both sums over the bits of tensors; the bytes behind the last whole word count by their place."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Words lie one behind the other at an address of their own. A copy of others is good for once.
        lies_well = [tensor.is_contiguous() and not tensor.data_ptr() % WORD for tensor in tensors]
        self.has_copies = not all(lies_well)
        flat = [
            (tensor.detach() if well else tensor.detach().clone(memory_format=torch.contiguous_format))
            .view(-1)
            .view(torch.uint8)
            for tensor, well in zip(tensors, lies_well, strict=True)
        ]
        words = [data[: len(data) // WORD * WORD].view(torch.int64) for data in flat]
        self._words = WordSums(words) if words else None
        self._rests = [
            (number, data[len(data) // WORD * WORD :]) for number, data in enumerate(flat) if len(data) % WORD
        ]

    def compute(self) -> list[tuple[int, int]]:
        if self._words is None:
            return []
        sums_N2 = self._words.compute()
        for number, rest in self._rests:
            sums_N2[number, 0] += (rest * torch.arange(1, len(rest) + 1, device=rest.device)).sum()
        return [(plain % MODULUS, weighted % MODULUS) for plain, weighted in sums_N2.tolist()]
