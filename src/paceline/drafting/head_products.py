"""The products of an eagle head, in the policy's type or in FP8.

A pass that proposes reads all weights for a few rows, so its time is that of reading them: FP8 halves it.
What is drafted is verified all the same. Following the policy, which writes the entries that later passes
attend to, stays in the policy's type.
"""

import torch

from paceline.drafting.eagle_head import EagleHead
from paceline.kernels.fp8_format import BlockMatrix, QuantisedRows
from paceline.kernels.fp8_linear import fp8_linear
from paceline.kernels.fp8_quantise import quantise_blocks, quantise_rows
from paceline.kernels.linear import linear


class HeadProducts:
    """Multiplies by a head's weights; by those that have one, by their FP8 copy."""

    def __init__(self, head: EagleHead, fp8: bool, deterministic: bool) -> None:
        self.deterministic = deterministic
        attention, feed_forward = head.attention, head.feed_forward
        projections = attention.qkv, attention.output, feed_forward.gate_up, feed_forward.down, head.head
        weights = [projection.weight for projection in projections]
        self.copies = [(w, BlockMatrix.poisoned(w.shape, w.device)) for w in weights] if fp8 else []
        self.refresh()

    def refresh(self) -> None:
        """Quantises the weights again, in place: captured steps read the copies."""
        for weight, copy in self.copies:
            if not weight.is_meta:
                quantise_blocks(weight.detach(), copy)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The storage of the FP8 copies."""
        return [tensor for _, copy in self.copies for tensor in (copy.values, copy.scales)]

    def __call__(
        self,
        x_TE: torch.Tensor | QuantisedRows,
        weight_NE: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        in_parts: bool = False,
    ) -> torch.Tensor:
        """Returns x times weight transposed; with `in_parts`, what follows can add up a product in parts."""
        copy = next((copy for weight, copy in self.copies if weight is weight_NE), None)
        if copy is None:
            return linear(x_TE, weight_NE, out_dtype, self.deterministic)
        x = x_TE if isinstance(x_TE, QuantisedRows) else quantise_rows(x_TE.contiguous())
        return fp8_linear(x, copy, self.deterministic, in_parts, out_dtype)
