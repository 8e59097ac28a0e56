"""Attention for learning: causal within each of the packed sequences, nothing across them.

    tokens    [ a0 a1 a2 | b0 b1 | c0 c1 c2 c3 ]        boundaries [0, 3, 5, 9]

On a GPU the variable-length flash kernel takes this as it is, grouped heads included. Elsewhere the sequences
are laid out right-padded for the attention alone; the causal mask already keeps the padding, which comes
last, out of every real token's view.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from paceline.kernels.fp8_format import round_to_e4m3
from paceline.kernels.training_launch import takes_kernels

# Takes the layer, q_THD, k_THD and v_THD.
AttentionObserver = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
# Returns the scales by head of a layer's K and V in a rollout's cache; None where that is not in E4M3.
CacheScales = Callable[[int], tuple[torch.Tensor, torch.Tensor] | None]


class PackedAttention:
    """An `attend` for `Decoder.forward` over packed sequences."""

    # Sees each layer's q, k and v, normed and rotated, as they are before a cache rounds them.
    observe: AttentionObserver | None = None
    # Where rollouts keep K and V in E4M3, with which scales: exact numerics attend over the same.
    kv_scales: CacheScales = staticmethod(lambda layer: None)
    # On a GPU: whether gradients are added up in a fixed order, so that the same inputs give the same bits.
    deterministic: bool = True

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths = lengths
        lengths_B = torch.tensor(lengths)
        self.longest = int(lengths_B.max())
        boundaries = F.pad(lengths_B.cumsum(0), (1, 0))
        self.positions_T = torch.cat([torch.arange(n) for n in lengths]).to(device)
        self.boundaries_B1 = boundaries.to(device, torch.int32)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths_B)
        self.padded_index_T = rows.to(device) * self.longest + self.positions_T
        self.shape = (len(lengths), self.longest)

    def __call__(
        self, layer: int, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> torch.Tensor:
        """Returns causal attention within each sequence, `[T, H, D]`."""
        if self.observe is not None:
            self.observe(layer, q_THD, k_THD, v_THD)
        return self.attend(q_THD, k_THD, v_THD)

    def as_cached(
        self, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V with the numbers that the rollout's cache has of them; gradients pass."""
        scales = self.kv_scales(layer)
        if scales is None:
            return k_THD, v_THD
        k_scale_H, v_scale_H = scales
        return _Round.apply(k_THD, k_scale_H), _Round.apply(v_THD, v_scale_H)

    def attend(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        if takes_kernels(q_THD):
            return self._varlen(q_THD, k_THD, v_THD)
        q, k, v = (self.pad(x) for x in (q_THD, k_THD, v_THD))
        out_BHLD = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.unpad(out_BHLD)

    def pad(self, x_THD: torch.Tensor) -> torch.Tensor:
        """Returns `[B, H, L, D]`, with zeros behind each sequence."""
        flat = x_THD.new_zeros(self.shape[0] * self.longest, *x_THD.shape[1:])
        flat = flat.index_copy(0, self.padded_index_T, x_THD)
        return flat.unflatten(0, self.shape).transpose(1, 2)

    def unpad(self, x_BHLD: torch.Tensor) -> torch.Tensor:
        return x_BHLD.transpose(1, 2).flatten(0, 1)[self.padded_index_T]

    def _varlen(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        return _Flash.apply(q_THD, k_THD, v_THD, self.boundaries_B1, self.longest, self.deterministic)


class _Round(torch.autograd.Function):
    """E4M3's nearest numbers, with gradients as if they were the given ones."""

    @staticmethod
    def forward(ctx, x_THD, scale_H):
        return round_to_e4m3(x_THD, scale_H)

    @staticmethod
    def backward(ctx, d_THD):
        return d_THD, None


class _Flash(torch.autograd.Function):
    """The variable-length flash kernel, which takes grouped heads as they are."""

    @staticmethod
    def forward(ctx, q_THD, k_THD, v_THD, bounds_B1, longest, deterministic):
        out_THD, normalisers_HT, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_THD, v_THD, bounds_B1, bounds_B1, longest, longest, 0.0, True, False
        )
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, normalisers_HT, bounds_B1, rng_state, unused)
        ctx.longest, ctx.deterministic = longest, deterministic
        return out_THD

    @staticmethod
    def backward(ctx, d_out_THD):
        q_THD, k_THD, v_THD, out_THD, normalisers_HT, bounds_B1, rng_state, unused = ctx.saved_tensors
        sizes = (bounds_B1, bounds_B1, ctx.longest, ctx.longest, 0.0, True, rng_state, unused)
        with deterministic_flash(ctx.deterministic):
            gradients = torch.ops.aten._flash_attention_backward(
                d_out_THD.contiguous(), q_THD, k_THD, v_THD, out_THD, normalisers_HT, *sizes
            )
        return *gradients, None, None, None


@contextmanager
def deterministic_flash(wanted: bool) -> Iterator[None]:
    """The flash kernel asks torch's own setting whether to add up in a fixed order.

    That setting would have torch fill what it allocates, too, which the kernel writes whole.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled
