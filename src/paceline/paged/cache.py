"""The paged KV cache, addressed in blocks of BLOCK_SIZE tokens. Most often all layers share one tensor:

storage_L2NBHD   layer, K or V, block, token within the block, kv head, head dim

Layers may differ in type (E4M3, or the policy's own where FP8 was too coarse); each type has a tensor of its
own then. E4M3 comes with a scale per layer, K or V, and kv head, which lies on the device and is whatever
calibration last wrote there. Where the rollout's routing is recorded (`routing.py`), it lies beside, under
the same block numbers.
"""

from collections.abc import Sequence

import torch

from paceline.kernels.fp8_format import E4M3
from paceline.paged.routing import RoutingRecord
from paceline.paged.storage import PagedStorage
from paceline.policy.config import DecoderConfig
from paceline.types import Routing

BLOCK_SIZE = 16


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


class KVCache:
    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        dtype: torch.dtype | Sequence[torch.dtype],
        device: torch.device,
        scales_L2H: torch.Tensor | None = None,
        records_routing: bool = False,
    ) -> None:
        """One type for all layers, or one for each; E4M3 wants `scales_L2H`. `records_routing`: also which
        experts each token was sent to.
        """
        self.config, self.num_blocks, self.device, self.scales_L2H = config, num_blocks, device, scales_L2H
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
        """How many blocks a cache of these types has in the same memory; `at_least` may ask for more, and
        there are never more than now.
        """
        block_bytes = (
            sum(token_bytes(1, self.config.num_kv_heads, self.config.head_dim, dtype) for dtype in dtypes)
            * BLOCK_SIZE
        )
        return min(self.num_blocks, max(self.num_bytes // block_bytes, at_least))

    @property
    def storage_L2NBHD(self) -> torch.Tensor | None:
        """The one tensor of a cache whose layers share a type; None while it sleeps on a CPU."""
        (storage,) = self.storages.values()
        return storage.tensor

    def wake(self) -> None:
        for storage in self._all_storages():
            storage.wake()

    def sleep(self) -> None:
        for storage in self._all_storages():
            storage.sleep()

    def _all_storages(self) -> list[PagedStorage]:
        return [*self.storages.values(), *([] if self.routing is None else [self.routing.storage])]

    def routing_of(self, blocks: list[int], tokens: int) -> Routing | None:
        """Of the first tokens in `blocks`; None where nobody wants it."""
        return None if self.routing is None else self.routing.read(blocks, tokens)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        kind, place = self.places[index]
        storage_2NBHD = self.storages[kind].tensor[place]
        return storage_2NBHD[0], storage_2NBHD[1]

    def scales(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of K and V of this layer, per kv head; None where the layer is not in E4M3."""
        if self.places[index][0] != E4M3:
            return None, None
        return self.scales_L2H[index, 0], self.scales_L2H[index, 1]

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """All layers at once; no target may be a source."""
        source, target = (torch.tensor(x, device=self.device) for x in (sources, targets))
        for storage in self.storages.values():
            # As integers of the same width: not every torch can index E4M3.
            whole = storage.tensor.view(torch.uint8) if storage.dtype == E4M3 else storage.tensor
            whole[:, :, target] = whole[:, :, source]
        if self.routing is not None:
            self.routing.copy_blocks(source, target)


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize
