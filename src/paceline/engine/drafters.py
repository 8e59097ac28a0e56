"""The drafters of one engine: what all of them are told, and which rows each of them has yet to look at."""

from collections.abc import Mapping
from collections.abc import Sequence as Listing

import numpy as np
import torch
from torch import nn

from paceline.drafting.base import Drafter, DrafterContext
from paceline.engine.sampling import Verify
from paceline.engine.sequence import Sequence
from paceline.pacing.strategy import Strategy


class Drafters(dict[str, Drafter]):
    """By name."""

    def __init__(self, drafters: Listing[Drafter], slots: int) -> None:
        super().__init__({drafter.name: drafter for drafter in drafters})
        # Of those that must be told: the slots whose rows ran without them.
        self.behind = {
            drafter.name: np.zeros(slots + 1, dtype=bool) for drafter in drafters if drafter.needs_catch_up
        }

    @property
    def captured_layers(self) -> set[int]:
        return {layer for drafter in self.values() for layer in drafter.captured_layers}

    @property
    def head(self) -> nn.Module | None:
        return next((drafter.head for drafter in self.values() if drafter.head is not None), None)

    @property
    def have_probabilities(self) -> bool:
        return any(drafter.has_probabilities for drafter in self.values())

    def bind(self, context: DrafterContext) -> None:
        for drafter in self.values():
            drafter.bind(context)

    def verification(self, strategy: Strategy, verify: str) -> Verify:
        """How a step of this strategy decides, where `verify` is what was asked for."""
        if verify == Verify.SHARED_NOISE or not strategy.count:
            return Verify.SHARED_NOISE
        return Verify.REJECTION if self[strategy.drafter].has_probabilities else Verify.REJECTION_OF_CERTAIN

    # -- rows -------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        for drafter in self.values():
            drafter.observe_enter(sequence.slot, sequence.request, sequence.handover.get(drafter.name))
        for behind in self.behind.values():
            behind[sequence.slot] = True
        sequence.handover = {}

    def leave(self, sequence: Sequence, over: bool) -> None:
        for drafter in self.values():
            drafter.observe_leave(sequence.slot, sequence.request, sequence.length, over)

    def ran(self, slots: np.ndarray, drafter: str) -> None:
        """Rows took a step that `drafter` knows of, and the others do not."""
        for name, behind in self.behind.items():
            if name != drafter:
                behind[slots] = True

    def is_behind(self, name: str, slots: np.ndarray) -> bool:
        return name in self.behind and bool(self.behind[name][slots].any())

    def catch_up(self, name: str, slots: np.ndarray, length: np.ndarray) -> bool:
        """Before it drafts for `slots`, of which `length` (of every slot) is known; whether there was
        anything to do.
        """
        slots = np.sort(slots[self.behind[name][slots]])
        self.behind[name][:] = False
        if len(slots):
            self[name].catch_up(slots.tolist(), length[slots].tolist())
        return bool(len(slots))

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        for drafter in self.values():
            drafter.copy_blocks(sources, targets)

    # -- between rollouts -------------------------------------------------------------------------

    def sleep(self) -> None:
        for drafter in self.values():
            drafter.sleep()

    def wake(self) -> None:
        for drafter in self.values():
            drafter.wake()

    def state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": tensor
            for name, drafter in self.items()
            for key, tensor in drafter.state().items()
        }

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, drafter in self.items():
            own = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            if own:
                drafter.load_state(own)
