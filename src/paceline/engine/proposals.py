"""Where drafters leave what they propose, for every slot; the step that verifies it is a graph of its own."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Proposals:
    """The proposed tokens, and of a tree's nodes the parents."""

    tokens_SK: torch.Tensor
    parents_SK: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, count: int, device: torch.device) -> "Proposals":
        tokens_SK = torch.zeros(num_slots, count, dtype=torch.int64, device=device)
        return cls(tokens_SK, torch.zeros_like(tokens_SK))
