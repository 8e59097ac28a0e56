"""Steps of the policy that a head has yet to process. On a CPU it does so only when it is to propose.

    steps            plain  plain  history:3  plain │ eagle:3
    the head's part  ───────── waits ───────────────▶ once, over what rows kept of all of them

A head needs the policy's states of every token, but only by the time it proposes. A step's share of a head is
a tenth of the step of a small policy, for nothing while another drafter does better. The steps of a
row that has left are never processed. On a GPU the head's part is captured with the step and costs less than
keeping the states would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from paceline.drafting.base import TargetStep

# Bytes of states that wait at most; the built-in policy's rollout of 128 responses stays below.
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class KeptTokens:
    """Tokens that rows kept, in the order of each row's text; no token is there twice."""

    captured: dict[int, torch.Tensor]
    # What followed each of them, where it is, and its place in the cache.
    following_T: torch.Tensor
    positions_T: torch.Tensor
    cache_slots_T: torch.Tensor
    # The last token of each row among them, and the row's slot.
    last_R: torch.Tensor
    slots_R: torch.Tensor


class StepBacklog:
    """Steps that wait, in their order; all of them with as many tokens for every row."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers` are those whose inputs are kept."""
        self.layers = layers
        self._num_bytes = 0
        self._steps: list[tuple[TargetStep, torch.Tensor]] = []  # with how many tokens each row kept
        self._running: set[int] = set()
        self._left: dict[int, int] = {}  # by slot: the steps up to here were those of rows that have left

    @property
    def is_full(self) -> bool:
        """Whether the waiting states exceed MAX_BYTES."""
        return self._num_bytes > MAX_BYTES

    def enter(self, slot: int) -> None:
        self._running.add(slot)

    def leave(self, slot: int) -> None:
        """Records that a row has left; its slot and its blocks may be reused."""
        self._running.discard(slot)
        self._left[slot] = len(self._steps)
        if not self._running:
            self.clear()

    def clear(self) -> None:
        self._steps.clear()
        self._left.clear()
        self._num_bytes = 0

    def add(self, step: TargetStep, length_S: torch.Tensor) -> None:
        """Defers a step, after which the rows have the lengths `length_S`."""
        if not self._running:  # a step that is only timed
            return
        kept_R = length_S[step.slots_R] - step.context_R - 1
        # The engine writes the next step's slots to the same storage.
        step = replace(step, slots_R=step.slots_R.clone())
        self._steps.append((step, torch.where(step.context_R < 0, 0, kept_R)))
        self._num_bytes += sum(step.captured[layer].nbytes for layer in self.layers)

    def take(self) -> KeptTokens | None:
        """Returns the tokens kept by rows that still run, and drops the steps; None if there are none."""
        kept = [self._kept(index) for index in range(len(self._steps))]
        steps = [step for step, _ in self._steps]
        self.clear()
        if not any(len(index_T) for index_T, _ in kept):
            return None

        def gathered(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(
                [x.index_select(0, index_T) for x, (index_T, _) in zip(parts, kept, strict=True)]
            )

        slots = np.concatenate([slot_T.numpy() for _, slot_T in kept])
        slots_R, behind_R = np.unique(slots[::-1], return_index=True)
        return KeptTokens(
            {layer: gathered([step.captured[layer] for step in steps]) for layer in self.layers},
            gathered([step.sampled_T for step in steps]),
            gathered([step.positions_T for step in steps]),
            gathered([step.cache_slots_T for step in steps]),
            torch.from_numpy(len(slots) - 1 - behind_R),
            torch.from_numpy(slots_R),
        )

    def _kept(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which tokens of a step were kept by rows that still run, and whose they are."""
        step, kept_R = self._steps[index]
        gone_R = torch.tensor([self._left.get(slot, 0) > index for slot in step.slots_R.tolist()])
        num_queries = len(step.positions_T) // len(step.slots_R)
        kept_RQ = torch.arange(num_queries) < kept_R.masked_fill(gone_R, 0).unsqueeze(1)
        index_T = kept_RQ.flatten().nonzero().squeeze(1)
        return index_T, step.slots_R[index_T // num_queries]
