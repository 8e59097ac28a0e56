"""The sampling noise by its published definition, in integers and float64.

    words  = Philox4x32-7 of the counter (token // 4, position, stream, 0)
             under the key (low 32 bits of the seed, high 32 bits of the seed)
    bits   = words[token % 4]
    v      = (bits + 1/2) / 2^32
    gumbel = -ln(-ln(1 - v))

Philox is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
Streams: 0 samples (and drafts), 1 accepts a proposal, 2 recovers from a rejected one.
"""

import torch

SAMPLE, ACCEPT, RECOVER = 0, 1, 2

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
HALF_WORD = 0xFFFF

# The resolution of v in float32 just below 1, in which a backend may compute it.
COARSE_V = 2.0**-24

# What a backend's float32 arithmetic may add to a Gumbel besides, over its own magnitude.
FLOAT32_GUMBEL = 1e-6


def high_and_low(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both words of a product of two 32-bit numbers, by halves that 64 bits hold."""
    low_part = (word & HALF_WORD) * multiplier
    high_part = (word >> 16) * multiplier
    high = (high_part + (low_part >> 16)) >> 16
    return high, (((high_part & HALF_WORD) << 16) + low_part) & WORD


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the four words of a counter of four words and a key of two."""
    x0, x1, x2, x3 = counter
    key_0, key_1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = high_and_low(x0, MULTIPLIERS[0])
        high_1, low_1 = high_and_low(x2, MULTIPLIERS[1])
        x0, x1, x2, x3 = high_1 ^ x1 ^ key_0, low_1, high_0 ^ x3 ^ key_1, low_0
        key_0 = (key_0 + KEY_STEPS[0]) & WORD
        key_1 = (key_1 + KEY_STEPS[1]) & WORD
    return [x0, x1, x2, x3]


def noise_bits(
    seeds_N: torch.Tensor, positions_N: torch.Tensor, vocab_size: int, stream: int = SAMPLE
) -> torch.Tensor:
    """Returns the 32 bits of every token at each seed and position, `[N, vocab_size]`."""
    groups = torch.arange((vocab_size + 3) // 4, device=seeds_N.device).expand(len(seeds_N), -1)
    same = torch.ones_like(groups)
    counter = [groups, same * (positions_N.unsqueeze(1) & WORD), same * stream, same * 0]
    key = [same * (seeds_N.unsqueeze(1) & WORD), same * ((seeds_N.unsqueeze(1) >> 32) & WORD)]
    words = torch.stack(philox(counter, key), dim=2)
    return words.reshape(len(seeds_N), -1)[:, :vocab_size]


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Returns the Gumbel variates of 32-bit numbers."""
    v = (bits.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log1p(-v))


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Returns the uniform variates of 32-bit numbers; a proposal is accepted where they are small."""
    return (bits.double() + 0.5) / 2.0**32


def gumbel_error(bits: torch.Tensor) -> torch.Tensor:
    """Returns how far a Gumbel in float32 may be off: a last digit, more at the losing end, where v is 1."""
    v = (bits.double() + 0.5) / 2.0**32
    value = gumbel(bits)
    coarse = -torch.log(-torch.log((1 - v - COARSE_V).clamp(min=2.0**-33)))
    fine = -torch.log(-torch.log((1 - v + COARSE_V).clamp(max=1 - 2.0**-33)))
    spread = torch.where(v < 0.5, torch.zeros_like(v), torch.maximum((coarse - value).abs(), (fine - value)))
    return spread + FLOAT32_GUMBEL * (1 + value.abs())
