"""The paged KV cache, addressed in blocks of BLOCK_SIZE tokens.

Most often all layers share one tensor (`PagedStorage.tensor`):

    L2NBHD   layer, K or V, block, token within the block, kv head, head dim

Layers may differ in type (E4M3, or the policy's own where FP8 was too coarse); each type has a tensor of its
own then. E4M3 has a scale per layer, K or V, and kv head, which lies on the device and is updated in place by
calibration. Where the rollout's routing is recorded (`routing.py`), it is kept beside, under the same block
numbers.
"""

from collections.abc import Sequence

import torch

from paceline.kernels.fp8_format import E4M3
from paceline.kernels.move_slots import move_slots
from paceline.paged.routing import RoutingRecord
from paceline.paged.storage import PagedStorage
from paceline.policy.config import DecoderConfig
from paceline.types import Routing

# Tokens of a block.
BLOCK_SIZE = 16


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


class KVCache:
    """Keys and values of every layer in blocks; on a GPU its addresses never change (`storage.py`)."""

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        dtype: torch.dtype | Sequence[torch.dtype],
        device: torch.device,
        scales_L2H: torch.Tensor | None = None,
        records_routing: bool = False,
    ) -> None:
        """Allocates `num_blocks` blocks, with one type for all layers or one for each.

        E4M3 needs `scales_L2H`. With `records_routing` the cache also keeps the experts of each token.
        """
        self.config = config
        self.num_blocks = num_blocks
        self.device = device
        self.scales_L2H = scales_L2H
        dtypes = [dtype] * config.num_layers if isinstance(dtype, torch.dtype) else list(dtype)
        self.storages = {
            kind: PagedStorage(
                (dtypes.count(kind), 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim),
                kind,
                device,
            )
            for kind in dict.fromkeys(dtypes)
        }
        self.places = [(kind, dtypes[:index].count(kind)) for index, kind in enumerate(dtypes)]
        self.num_bytes = sum(storage.num_bytes for storage in self.storages.values())
        self.routing = RoutingRecord(config, num_blocks, BLOCK_SIZE, device) if records_routing else None

    def blocks_with(self, dtypes: Sequence[torch.dtype], at_least: int) -> int:
        """Returns how many blocks a cache of these types has in the same memory.

        `at_least` may ask for more; there are never more than now.
        """
        shape = self.config
        layer_bytes = (token_bytes(1, shape.num_kv_heads, shape.head_dim, dtype) for dtype in dtypes)
        block_bytes = sum(layer_bytes) * BLOCK_SIZE
        return min(self.num_blocks, max(self.num_bytes // block_bytes, at_least))

    def wake(self) -> None:
        for storage in self._all_storages():
            storage.wake()

    def sleep(self) -> None:
        """Releases the memory; what was cached is lost."""
        for storage in self._all_storages():
            storage.sleep()

    def _all_storages(self) -> list[PagedStorage]:
        return [*self.storages.values(), *([] if self.routing is None else [self.routing.storage])]

    def routing_of(self, blocks: list[int], tokens: int) -> Routing | None:
        """Returns the routing of the first `tokens` tokens in `blocks`; None where it is not recorded."""
        return None if self.routing is None else self.routing.read(blocks, tokens)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's K and V, `[num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]` each."""
        kind, place = self.places[index]
        storage_2NBHD = self.storages[kind].tensor[place]
        return storage_2NBHD[0], storage_2NBHD[1]

    def scales(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the scales of a layer's K and V, per kv head; None where the layer is not in E4M3."""
        if self.places[index][0] != E4M3:
            return None, None
        return self.scales_L2H[index, 0], self.scales_L2H[index, 1]

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copies blocks of all layers at once; no target may be a source."""
        source, target = (torch.tensor(x, device=self.device) for x in (sources, targets))
        for storage in self.storages.values():
            # As integers of the same width: not every torch can index E4M3.
            whole = storage.tensor.view(torch.uint8) if storage.dtype == E4M3 else storage.tensor
            whole[:, :, target] = whole[:, :, source]
        if self.routing is not None:
            self.routing.copy_blocks(source, target)

    def move_slots(self, sources_RD: torch.Tensor, targets_RD: torch.Tensor) -> None:
        """Moves single tokens of all layers, with their routing, to other slots; -1 is skipped.

        A row's sources may also be targets: everything is read before it is written.
        """
        for storage in self.storages.values():
            numbers = storage.tensor.view(torch.int32)
            move_slots(numbers.flatten(4).flatten(2, 3).flatten(0, 1), sources_RD, targets_RD)
        if self.routing is not None:
            self.routing.move_slots(sources_RD, targets_RD)


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize
