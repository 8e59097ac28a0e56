"""A digest of weights, computed where they lie: on a GPU at the speed of its memory, and waiting for it once.

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
    words, rest = _words(tensor)
    plain, weighted = word_sums(words).tolist()
    return (plain + _rest_sum(rest)) % MODULUS, weighted % MODULUS


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns the digest of named tensors, which depends on their names, types, shapes and bits."""
    named = list(weights)
    bits = [_words(tensor) for _, tensor in named]
    # All that a GPU does is under way before the first sum is asked for.
    sums = [word_sums(words) for words, _ in bits]
    digest = hashlib.blake2b(digest_size=16)
    for (name, tensor), (_, rest), (plain, weighted) in zip(named, bits, _numbers(sums), strict=True):
        found = (plain + _rest_sum(rest)) % MODULUS, weighted % MODULUS
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape), found)).encode())
    return digest.hexdigest()


def _numbers(sums: list[torch.Tensor]) -> list[list[int]]:
    """Returns what tensors of the same length hold, with one copy from each device."""
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(sums):
        by_device.setdefault(tensor.device, []).append(i)
    found: list[list[int]] = [[] for _ in sums]
    for indices in by_device.values():
        for i, numbers in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            found[i] = numbers
    return found


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bits of a tensor as whole words, and the bytes that are left."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // WORD * WORD
    words = flat[:whole]
    if words.data_ptr() % WORD:
        words = words.clone()
    return words.view(torch.int64), flat[whole:]


def _rest_sum(rest: torch.Tensor) -> int:
    return sum(byte * (place + 1) for place, byte in enumerate(rest.tolist() if len(rest) else ()))
