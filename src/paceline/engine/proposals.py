"""The buffers that drafters write proposals to, for every slot, and a separate graph verifies."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Proposals:
    """The proposed tokens, and the parents of a tree's nodes."""

    tokens_SK: torch.Tensor
    parents_SK: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, count: int, device: torch.device) -> "Proposals":
        tokens_SK = torch.zeros(num_slots, count, dtype=torch.int64, device=device)
        return cls(tokens_SK, torch.zeros_like(tokens_SK))
