"""The paged KV cache: one tensor for all layers, addressed in blocks of BLOCK_SIZE tokens.

storage_L2NBHD   layer, K or V, block, token within the block, kv head, head dim
"""

import math

import torch

from paceline.paged.virtual_memory import ReservedMemory
from paceline.policy.config import DecoderConfig

BLOCK_SIZE = 16


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


class KVCache:
    """On a GPU its address never changes: graphs that captured it stay valid while its memory is lent out."""

    def __init__(self, config: DecoderConfig, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.dtype, self.device = dtype, device
        self.num_bytes = math.prod(self.shape) * dtype.itemsize
        self.reserved = ReservedMemory(self.num_bytes, device) if device.type == "cuda" else None
        if self.reserved is not None:
            self.storage_L2NBHD = self.reserved.tensor.view(dtype).view(self.shape).zero_()
        else:
            self.wake()

    def wake(self) -> None:
        """Zeros, not garbage: a masked key must not meet a NaN."""
        if self.reserved is None:
            self.storage_L2NBHD = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        else:
            self.reserved.back()
            self.storage_L2NBHD.zero_()

    def sleep(self) -> None:
        if self.reserved is None:
            self.storage_L2NBHD = None
        else:
            self.reserved.release()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.storage_L2NBHD[index, 0], self.storage_L2NBHD[index, 1]

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """All layers at once; no target may be a source."""
        source, target = (torch.tensor(x, device=self.device) for x in (sources, targets))
        self.storage_L2NBHD[:, :, target] = self.storage_L2NBHD[:, :, source]


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize
