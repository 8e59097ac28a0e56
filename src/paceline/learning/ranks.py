"""The ranks that learn together, as the learner and its optimiser use them.

A rank is a process that holds a share of the policy, of the optimiser's state and of a step's micro-batches.
All ranks are given the same groups and make the same calls in the same order; what they return is the same on
all of them, metrics included.

    OneRank       a single process: everything is its own, and torch.distributed is never imported
    RankGroup     one of several processes (`distributed/group.py`), over gloo or NCCL

The learner's code is the same for both.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from paceline.learning.batch import MicroBatch
from paceline.policy.decoder import Decoder
from paceline.policy.lora import adapters_off, merge_adapters

# Computes logprobs and entropies of a micro-batch's response tokens.
Logprobs = Callable[[Decoder, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
# Computes them with one policy, given how.
Forward = Callable[[Logprobs, MicroBatch], tuple[torch.Tensor, torch.Tensor]]


class Ranks(Protocol):
    """What one rank shares with the others, and how."""

    rank: int
    count: int

    def shard(self, policy: Decoder) -> Forward:
        """Leaves this rank its share of a policy's parameters, and returns what computes with all of them."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of a sharded tensor, in the same storage; of any other the tensor."""

    def rows(self, tensor: torch.Tensor) -> range:
        """Returns which rows of a sharded tensor are this rank's share; of any other all."""

    def norm(self, norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Returns the norm of everything, given the norms of this rank's shares."""

    def gather(self, own: Sequence[torch.Tensor]) -> list[list[list[float]]]:
        """Returns the numbers of every round and rank, given this rank's of every round."""

    def decide(self, question: Callable[[], None]) -> None:
        """Calls `question` on the first rank; its error is raised on all."""

    def merge_adapters(self, policy: Decoder) -> None:
        """Writes base plus adapters into the weights, if there are adapters."""

    def adapters_off(self, policy: Decoder) -> AbstractContextManager[None]:
        """Makes the policy compute with its base weights while the context is open."""


class OneRank:
    """A single process."""

    rank = 0
    count = 1

    def shard(self, policy: Decoder) -> Forward:
        return lambda logprobs, batch: logprobs(policy, batch)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def rows(self, tensor: torch.Tensor) -> range:
        return range(tensor.shape[0])

    def norm(self, norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros((), device=device)

    def gather(self, own: Sequence[torch.Tensor]) -> list[list[list[float]]]:
        """As in `Ranks`; the host waits once for the numbers of all rounds."""
        if not own:
            return []
        parts = torch.cat(list(own)).cpu().split([len(values) for values in own])
        return [[values.tolist()] for values in parts]

    def decide(self, question: Callable[[], None]) -> None:
        question()

    def merge_adapters(self, policy: Decoder) -> None:
        merge_adapters(policy)

    def adapters_off(self, policy: Decoder) -> AbstractContextManager[None]:
        return adapters_off(policy)


ONE_RANK = OneRank()
