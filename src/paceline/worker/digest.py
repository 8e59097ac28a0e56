"""A digest of weights, computed where they lie: one pass over the memory, and a GPU is waited for once.

Integer sums that wrap around, so the order of the additions does not matter and every device finds the same:
of the bits of each tensor, plainly and weighted by position, so that neither a changed bit nor a piece of
another version nor two pieces in each other's place goes unnoticed. It guards against faults, not against
somebody who forges weights.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch

from paceline.kernels.word_sums import word_sums

WORD = 8
MODULUS = 2**64


def tensor_digest(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns two sums over the bits of a tensor."""
    ((plain, weighted),) = _sums([tensor]).tolist()
    return plain % MODULUS, weighted % MODULUS


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns the digest of named tensors of one device, which depends on names, types, shapes and bits."""
    named = list(weights)
    digest = hashlib.blake2b(digest_size=16)
    sums = _sums([tensor for _, tensor in named]).tolist() if named else []
    for (name, tensor), (plain, weighted) in zip(named, sums, strict=True):
        facts = name, str(tensor.dtype), tuple(tensor.shape), (plain % MODULUS, weighted % MODULUS)
        digest.update(repr(facts).encode())
    return digest.hexdigest()


def _sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns both sums of each, `[N, 2]`; the bytes behind the last whole word count by their place."""
    words, rests = zip(*map(_words, tensors), strict=True)
    sums_N2 = word_sums(words)
    for number, rest in enumerate(rests):
        if rest is not None:
            sums_N2[number, 0] += (rest * torch.arange(1, len(rest) + 1, device=rest.device)).sum()
    return sums_N2


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a tensor's whole words, and the bytes behind them if there are any."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = len(flat) % WORD
    words = flat[: len(flat) - rest] if rest else flat
    if words.data_ptr() % WORD:
        words = words.clone()
    return words.view(torch.int64), flat[len(flat) - rest :] if rest else None
