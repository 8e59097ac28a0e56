"""A digest of weights, computed where they lie: on a GPU at the speed of its memory.

Integer sums that wrap around, so the order of the additions does not matter and every device finds the same:
of the bits of each tensor, plainly and weighted by position, so that neither a changed bit nor a piece of
another version nor two pieces in each other's place goes unnoticed. It guards against faults, not against
somebody who forges weights.
"""

import hashlib
from collections.abc import Iterable

import torch

# A prime, so that the period of the weights falls on no power of two.
PERIOD = 65_521
# Words of 64 bits per piece, which bounds the memory that products take; all pieces have the same weights.
PIECE = 64 * PERIOD
WORD = 8
MODULUS = 2**64


def tensor_digest(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns two sums over the bits of a tensor."""
    words, rest = _words(tensor)
    places = torch.arange(min(len(words), PIECE), device=words.device) % PERIOD + 1
    plain = weighted = 0
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE]
        plain += int(piece.sum())
        weighted += int((piece * places[: len(piece)]).sum()) * (start // PIECE + 1)
    plain += sum(byte * (place + 1) for place, byte in enumerate(rest))
    return plain % MODULUS, weighted % MODULUS


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns the digest of named tensors, which depends on their names, types, shapes and bits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in weights:
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor))).encode())
    return digest.hexdigest()


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Returns the bits of a tensor as whole words, and the bytes that are left."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // WORD * WORD
    words = flat[:whole]
    if words.data_ptr() % WORD:
        words = words.clone()
    return words.view(torch.int64), flat[whole:].tolist()
