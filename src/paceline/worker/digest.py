"""A digest of weights, computed where they lie: one pass over the memory, and a GPU is waited for once.

Integer sums that wrap around, so the order of the additions does not matter and every device finds the same:
of the bits of each tensor, plainly and weighted by position, so that neither a changed bit nor a piece of
another version nor two pieces in each other's place goes unnoticed. It guards against faults, not against
somebody who forges weights.
"""

import hashlib
from collections.abc import Iterable

import torch

from paceline.kernels.word_sums import word_sums

WORD = 8
MODULUS = 2**64


def tensor_digest(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns two sums over the bits of a tensor."""
    plain, weighted = _sums(tensor).tolist()
    return plain % MODULUS, weighted % MODULUS


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns the digest of named tensors of one device, which depends on names, types, shapes and bits."""
    described: list[tuple] = []
    sums: list[torch.Tensor] = []
    for name, tensor in weights:
        described.append((name, str(tensor.dtype), tuple(tensor.shape)))
        sums.append(_sums(tensor))
    digest = hashlib.blake2b(digest_size=16)
    for facts, (plain, weighted) in zip(described, torch.stack(sums).tolist() if sums else (), strict=True):
        digest.update(repr((*facts, (plain % MODULUS, weighted % MODULUS))).encode())
    return digest.hexdigest()


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns both sums on the tensor's device; the bytes behind the last whole word count by their place."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // WORD * WORD
    words, rest = flat[:whole], flat[whole:]
    if words.data_ptr() % WORD:
        words = words.clone()
    sums_2 = word_sums(words.view(torch.int64))
    if len(rest):
        sums_2[0] += (rest * torch.arange(1, len(rest) + 1, device=rest.device)).sum()
    return sums_2
