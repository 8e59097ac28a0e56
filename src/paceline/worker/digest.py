"""A digest of weights, computed where they lie: on a GPU at the speed of its memory.

Integer sums that wrap around, so the order of the additions does not matter and every device finds the same:
of the bits of each tensor, plainly and weighted by position, so that neither a changed bit nor a piece of
another version nor two pieces in each other's place goes unnoticed. It guards against faults, not against
somebody who forges weights.
"""

import hashlib
from collections.abc import Iterable

import torch

# Words per piece: bounds the memory that the products take.
PIECE = 1 << 22
# A prime, so that the period of the weights falls on no power of two.
PERIOD = 65_521


def tensor_digest(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns two sums over the bits of a tensor."""
    words = _words(tensor)
    plain = weighted = 0
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE].to(torch.int64)
        places = torch.arange(start, start + len(piece), device=piece.device) % PERIOD + 1
        plain += int(piece.sum())
        weighted += int((piece * places).sum())
    return plain & (2**64 - 1), weighted & (2**64 - 1)


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns the digest of named tensors, which depends on their names, types, shapes and bits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in weights:
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor))).encode())
    return digest.hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor as 32-bit words, or bytes where it has no whole number of them."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.view(torch.int32) if len(flat) % 4 == 0 and flat.data_ptr() % 4 == 0 else flat
