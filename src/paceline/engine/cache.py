"""The paged KV cache: one tensor for all layers, addressed in blocks of BLOCK_SIZE tokens.

    storage_L2NBHD   layer, K or V, block, token within the block, kv head, head dim
"""

import torch

from paceline.policy.config import DecoderConfig

BLOCK_SIZE = 16


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


class KVCache:
    def __init__(self, config: DecoderConfig, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.dtype, self.device = dtype, device
        self.storage_L2NBHD: torch.Tensor | None = None
        self.allocate()

    def allocate(self) -> None:
        # Zeros, not garbage: a masked key must not meet a NaN.
        self.storage_L2NBHD = torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def free(self) -> None:
        self.storage_L2NBHD = None

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.storage_L2NBHD[index, 0], self.storage_L2NBHD[index, 1]

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """All layers at once; no target may be a source."""
        source, target = (torch.tensor(x, device=self.device) for x in (sources, targets))
        self.storage_L2NBHD[:, :, target] = self.storage_L2NBHD[:, :, source]

    @property
    def num_bytes(self) -> int:
        return token_bytes(self.shape[0], self.shape[4], self.shape[5], self.dtype) * self.shape[2] * BLOCK_SIZE


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize
