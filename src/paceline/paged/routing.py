"""The experts that the rollout chose, kept under the KV cache's block numbers beside keys and values.

    storage_NBLK     block, token within the block, layer with experts, choice (best first)

It is written through the same slot mapping as K and V, at the end of each forward pass: a rejected proposal
is overwritten by the token that takes its place, siblings share their prompt's routing, and recomputing a
cache rewrites it.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from paceline.kernels.move_slots import move_slots
from paceline.paged.storage import PagedStorage
from paceline.policy.config import DecoderConfig
from paceline.types import Routing


class RoutingRecord:
    """The experts of every cached token, by block."""

    def __init__(self, config: DecoderConfig, num_blocks: int, block_size: int, device: torch.device) -> None:
        assert config.expert_layers, "a policy without experts has no routing"
        self.block_size = block_size
        shape = (num_blocks, block_size, len(config.expert_layers), config.num_experts_per_token)
        self.storage = PagedStorage(shape, expert_dtype(config), device)
        self.reader = torch.cuda.Stream(device) if device.type == "cuda" else None

    def write(self, slots_T: torch.Tensor, experts_LTK: Sequence[torch.Tensor]) -> None:
        """Writes one tensor `[T, K]` per layer with experts.

        A slot is block x block size + offset; negative ones are dropped.
        """
        experts_TLK = torch.stack(tuple(experts_LTK), dim=1).to(self.storage.dtype)
        # Dropped tokens go to the null block: skipping them would need a shape that depends on the data.
        self.storage.tensor.flatten(0, 1).index_copy_(0, slots_T.long().clamp(min=0), experts_TLK)

    def read(self, blocks: list[int], tokens: int) -> Routing:
        """Returns the routing of the first `tokens` tokens in `blocks`, on the host.

        Accepted tokens never change while their blocks are owned, so on a GPU a separate stream reads them
        without waiting for the steps launched since.
        """
        with torch.cuda.stream(self.reader) if self.reader is not None else nullcontext():
            used_blocks = blocks[: -(-tokens // self.block_size)]
            used = torch.tensor(used_blocks, dtype=torch.int64).to(self.storage.device)
            experts_TLK = self.storage.tensor[used].flatten(0, 1)[:tokens].cpu()
        _, layers, choices = experts_TLK.shape
        return Routing(experts_TLK.numpy().tobytes(), layers, choices, self.storage.dtype.itemsize)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.storage.tensor[target] = self.storage.tensor[source]

    def move_slots(self, sources_RD: torch.Tensor, targets_RD: torch.Tensor) -> None:
        """Moves single tokens' routing to other slots; a target of -1 is skipped."""
        move_slots(self.storage.tensor.flatten(2).flatten(0, 1).unsqueeze(0), sources_RD, targets_RD)


def expert_dtype(config: DecoderConfig) -> torch.dtype:
    """Returns the smallest integer type that holds an expert's number."""
    return torch.uint8 if config.num_experts <= 256 else torch.int16


def routing_token_bytes(config: DecoderConfig) -> int:
    return len(config.expert_layers) * config.num_experts_per_token * expert_dtype(config).itemsize
