"""Sampling noise as a pure function: `gumbel(seed, position, token)`.

A counter-based generator (Philox4x32-7, Salmon et al. 2011) turns (seed, position, token) into 32 bits, and
two polynomial logarithms turn those into a Gumbel variate. Only integer operations and single IEEE additions
and multiplications are used, never a fused multiply-add and never a library `log`, so every device computes
the same bits.

The Gumbel is -ln(E) with E = -ln(1 - v) and v = (bits + 1/2) / 2^32. A token wins where its Gumbel is large,
hence where v is near 0, and that is where floating point resolves v most finely: the largest value is 22.9,
reached with probability 2^-32 per token, and equal values at the winning end are as rare as equal 32-bit
draws.
"""

from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from paceline.kernels.operation import cdiv, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Philox's own constants (Salmon et al. 2011, section 4.2): rounds, multipliers, and Weyl steps of the key.
ROUNDS = 7
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
MASK32 = 0xFFFFFFFF
# One Philox call gives four 32-bit words, hence the noise of four neighbouring tokens.
TOKENS_PER_DRAW = 4

# Independent streams of the same request: what the policy samples with, ...
STREAM_SAMPLE = 0
# ... and what `verify: rejection` needs besides, to accept a proposal and to recover from a rejected one.
STREAM_ACCEPT = 1
STREAM_RECOVER = 2

# ln(1 + f) = f - f^2/2 + f^3 P(f) for sqrt(1/2) <= 1 + f < sqrt(2); the coefficients of P from the highest
# to the lowest degree (Cephes `logf`).
LOG_POLYNOMIAL = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LN2 = 0.693147180559945
# The float32 sqrt(1/2), as an integer.
SQRT_HALF_BITS = 0x3F3504F3
# 1 - sqrt(1/2): below it 1 - v needs no exponent, and f = -v is exact.
SMALL_V = 0.2928932
# Tokens whose noise one program of the stand-alone kernel computes.
NOISE_BLOCK = 1024


# The functions below take arrays of numpy or torch: on a CPU numpy's operations cost a fraction of torch's
# where there are few tokens, and integers, single additions and multiplications have the same bits in both.
Array = TypeVar("Array", torch.Tensor, np.ndarray)


def philox(counter: tuple[Array, ...], key: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns four words from a counter of four words and a key of two, all uint32 values held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # Wraps modulo 2^64, as it should.
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        high_0, high_1 = (product_0 >> 32) & MASK32, (product_1 >> 32) & MASK32
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, product_1 & MASK32, high_0 ^ c3 ^ k1, product_0 & MASK32
        k0, k1 = (k0 + WEYL_0) & MASK32, (k1 + WEYL_1) & MASK32
    return c0, c1, c2, c3


def random_bits(seed: Array, position: Array, vocab_size: int, stream: int = STREAM_SAMPLE) -> Array:
    """Returns uint32 values as int64, shape `[*seed.shape, vocab_size]`.

    `seed` is any int64, `position` the token's absolute index.
    """
    draws = -(-vocab_size // TOKENS_PER_DRAW)
    on_device = {"device": seed.device} if isinstance(seed, torch.Tensor) else {}
    token_group = _library(seed).arange(draws, **on_device)
    seed, position = seed[..., None], position[..., None]
    zero = seed * 0
    words = philox(
        (token_group + zero, position + zero, zero + stream, zero), (seed & MASK32, (seed >> 32) & MASK32)
    )
    bits = _library(seed).stack(words, -1)
    return bits.reshape(*seed.shape[:-1], draws * TOKENS_PER_DRAW)[..., :vocab_size]


def random_bits_of(seed: Array, position: Array, tokens: Array) -> Array:
    """Returns those of `random_bits` for samples that belong to these tokens, `[*seed.shape, N]`."""
    seed, position = seed[..., None], position[..., None]
    zero = seed * 0
    words = philox(
        (tokens // TOKENS_PER_DRAW + zero, position + zero, zero + STREAM_SAMPLE, zero),
        (seed & MASK32, (seed >> 32) & MASK32),
    )
    bits, which = words[0], tokens % TOKENS_PER_DRAW + zero
    for number, word in enumerate(words[1:], start=1):
        bits = _library(seed).where(which == number, word, bits)
    return bits


def _log_reduced(f: Array) -> Array:
    polynomial = f * 0.0 + LOG_POLYNOMIAL[0]
    for coefficient in LOG_POLYNOMIAL[1:]:
        polynomial = polynomial * f + coefficient
    square = f * f
    return f + (square * f * polynomial - square * 0.5)


def _split_exponent(x: Array) -> tuple[Array, Array]:
    """Returns f and e of x = (1 + f) 2^e with sqrt(1/2) <= 1 + f < sqrt(2), both as float32."""
    library = _library(x)
    bits = x.view(library.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(library.float32)
    return mantissa - 1.0, library.asarray(exponent, dtype=library.float32)


def gumbel_from_bits(bits: Array) -> Array:
    library = _library(bits)
    v = library.asarray(bits, dtype=library.float32) * 2.0**-32 + 2.0**-33
    # The losing end, where rounding would reach 1 and the Gumbel minus infinity.
    v = v.clip(max=1.0 - 2.0**-24)
    f, exponent = _split_exponent(1.0 - v)
    small = v < SMALL_V
    f, exponent = library.where(small, -v, f), library.where(small, library.zeros_like(exponent), exponent)
    exponential = -(_log_reduced(f) + exponent * LN2)
    f, exponent = _split_exponent(exponential)
    return -(_log_reduced(f) + exponent * LN2)


def gumbel(
    seed: torch.Tensor, position: torch.Tensor, vocab_size: int, stream: int = STREAM_SAMPLE
) -> torch.Tensor:
    """Returns float32 noise for every token, shape `[*seed.shape, vocab_size]`."""
    if seed.device.type != "cpu":
        return gumbel_from_bits(random_bits(seed, position.long(), vocab_size, stream))
    bits = random_bits(seed.numpy(), position.numpy().astype(np.int64), vocab_size, stream)
    return torch.from_numpy(gumbel_from_bits(bits))


def gumbel_of(seed: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns those of `gumbel` that belong to these tokens, `[*seed.shape, N]`."""
    return gumbel_from_bits(random_bits_of(seed, position.long(), tokens))


def _library(x: Array) -> ModuleType:
    return torch if isinstance(x, torch.Tensor) else np


# The Triton twin, inlined by the sampler. Integers wrap modulo 2^32 as they should. Callers compile with
# `enable_fp_fusion=False`: a fused multiply-add would round once where the reference rounds twice.

_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLIER_0 = tl.constexpr(MULTIPLIER_0)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_WEYL_0 = tl.constexpr(WEYL_0)
_WEYL_1 = tl.constexpr(WEYL_1)
_LN2 = tl.constexpr(LN2)
_SMALL_V = tl.constexpr(SMALL_V)
_SQRT_HALF_BITS = tl.constexpr(SQRT_HALF_BITS)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8 = (tl.constexpr(coefficient) for coefficient in LOG_POLYNOMIAL)


@triton.jit
def _philox_triton(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(_ROUNDS):
        high_0, low_0 = tl.umulhi(c0, _MULTIPLIER_0), c0 * _MULTIPLIER_0
        high_1, low_1 = tl.umulhi(c2, _MULTIPLIER_1), c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def _log_reduced_triton(f):
    p = f * 0.0 + _P0
    p = p * f + _P1
    p = p * f + _P2
    p = p * f + _P3
    p = p * f + _P4
    p = p * f + _P5
    p = p * f + _P6
    p = p * f + _P7
    p = p * f + _P8
    square = f * f
    return f + (square * f * p - square * 0.5)


@triton.jit
def _split_exponent_triton(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return mantissa - 1.0, exponent.to(tl.float32)


@triton.jit
def _gumbel_from_bits_triton(bits):
    # 2^-32 and 2^-33, exactly, and 1 - 2^-24.
    v = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    v = tl.minimum(v, 0.999999940395355224609375)
    f, exponent = _split_exponent_triton(1.0 - v)
    small = v < _SMALL_V
    f, exponent = tl.where(small, -v, f), tl.where(small, 0.0, exponent)
    exponential = -(_log_reduced_triton(f) + exponent * _LN2)
    f, exponent = _split_exponent_triton(exponential)
    return -(_log_reduced_triton(f) + exponent * _LN2)


@triton.jit
def _words_triton(seed, position, token_group, stream):
    zero = token_group * 0
    return _philox_triton(
        token_group,
        zero + position.to(tl.uint32),
        zero + stream,
        zero,
        zero + (seed & 0xFFFFFFFF).to(tl.uint32),
        zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )


@triton.jit
def gumbel_triton(seed, position, first_token, TOKENS: tl.constexpr, stream):
    """Returns float32 noise `[TOKENS]` of the tokens from `first_token` on, for one seed and position.

    `first_token` is a multiple of 4.
    """
    token_group = (first_token // 4 + tl.arange(0, TOKENS // 4)).to(tl.uint32)
    w0, w1, w2, w3 = _words_triton(seed, position, token_group, stream)
    return _gumbel_from_bits_triton(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def gumbel_of_triton(seed, position, token, stream):
    """Returns float32 noise of the tokens, in any order, for one seed and position."""
    w0, w1, w2, w3 = _words_triton(seed, position, (token // 4).to(tl.uint32), stream)
    which = token % 4
    first, second = tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3)
    return _gumbel_from_bits_triton(tl.where(which < 2, first, second))


@triton.jit
def _gumbel_kernel(
    noise_of, noise_ptr, vocab_size, STREAM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    seed_ptr, position_ptr = noise_of
    launch_next(PDL)
    wait_previous(PDL)
    row, first_token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    token = first_token + tl.arange(0, BLOCK)
    values = gumbel_triton(tl.load(seed_ptr + row), tl.load(position_ptr + row), first_token, BLOCK, STREAM)
    tl.store(noise_ptr + row * vocab_size + token, values, mask=token < vocab_size)


def draw_gumbel_triton(seed_R, position_R, vocab_size, stream):
    noise = torch.empty(*seed_R.shape, vocab_size, dtype=torch.float32, device=seed_R.device)
    noise_of, options = (seed_R.contiguous(), position_R.contiguous()), launch_options(num_warps=4)
    _gumbel_kernel[(seed_R.numel(), cdiv(vocab_size, NOISE_BLOCK))](
        noise_of, noise, vocab_size, STREAM=stream, BLOCK=NOISE_BLOCK, **options
    )
    return noise


@reference_of(draw_gumbel_triton)
def draw_gumbel(seed_R: torch.Tensor, position_R: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    """Returns float32 noise `[R, vocab_size]`, in one launch on a GPU."""
    return gumbel(seed_R, position_R, vocab_size, stream)
