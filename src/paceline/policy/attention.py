"""Attention for learning: causal within each of the packed sequences, nothing across them.

    tokens    [ a0 a1 a2 | b0 b1 | c0 c1 c2 c3 ]        boundaries [0, 3, 5, 9]

On a GPU the variable-length flash kernel takes this as it is. Elsewhere the sequences are laid out
right-padded for the attention alone; the causal mask already keeps the padding, which comes last, out of
every real token's view.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

# Takes the layer, q_THD, k_THD and v_THD.
AttentionObserver = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class PackedAttention:
    """An `attend` for `Decoder.forward` over packed sequences."""

    # Sees each layer's q, k and v, normed and rotated.
    observe: AttentionObserver | None = None

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
        if (q_THD.is_cuda or q_THD.is_meta) and q_THD.dtype in (torch.bfloat16, torch.float16):
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
        """Undoes `pad`."""
        return x_BHLD.transpose(1, 2).flatten(0, 1)[self.padded_index_T]

    def _varlen(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # The kernel takes no grouped heads.
        repeats = q_THD.shape[1] // k_THD.shape[1]
        k_THD, v_THD = k_THD.repeat_interleave(repeats, 1), v_THD.repeat_interleave(repeats, 1)
        bounds = self.boundaries_B1
        return varlen_attn(
            q_THD, k_THD, v_THD, bounds, bounds, self.longest, self.longest, window_size=(-1, 0)
        )
