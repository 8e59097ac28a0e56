"""The drafters of one engine: events that all of them receive, and the rows on which each is behind."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from paceline.drafting.base import Drafter, DrafterContext
from paceline.engine.request_state import RequestState
from paceline.engine.sampling import Verify
from paceline.pacing.strategy import Strategy
from paceline.policy.states import TextStates
from paceline.types import Purpose

# The key of a drafter's node counts, beside its own state.
TREE_COUNTS = "tree_counts"


def without_rates(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the state without node counts: loading it keeps what drafters have learned of their trees."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(f".{TREE_COUNTS}")}


class Drafters(dict[str, Drafter]):
    """The engine's drafters by name."""

    def __init__(self, drafters: Sequence[Drafter], slots: int) -> None:
        super().__init__({drafter.name: drafter for drafter in drafters})
        # For each drafter that must catch up: the slots whose rows ran without it.
        self.behind = {
            drafter.name: np.zeros(slots + 1, dtype=bool) for drafter in drafters if drafter.needs_catch_up
        }
        # Node counts from before the current evaluation; empty outside of one.
        self._counts: dict[str, torch.Tensor] = {}

    @property
    def captured_layers(self) -> set[int]:
        return {layer for drafter in self.values() for layer in drafter.captured_layers}

    @property
    def head(self) -> nn.Module | None:
        """The trainable head; None where no drafter has one."""
        return next((drafter.head for drafter in self.values() if drafter.head is not None), None)

    @property
    def have_probabilities(self) -> bool:
        return any(drafter.has_probabilities for drafter in self.values())

    def bind(self, context: DrafterContext) -> None:
        for drafter in self.values():
            drafter.bind(context)

    def verification(self, strategy: Strategy, verify: str) -> Verify:
        """Returns how a step of this strategy verifies; `verify` is the recipe's setting."""
        if verify == Verify.SHARED_NOISE or not strategy.count:
            return Verify.SHARED_NOISE
        assert not strategy.tree, "rejection verifies chains"
        if self[strategy.drafter].has_probabilities:
            return Verify.REJECTION
        return Verify.REJECTION_WITHOUT_PROBABILITIES

    # -- rows -------------------------------------------------------------------------------------

    def enter(self, sequence: RequestState) -> None:
        """Called when a row begins to run; passes the drafters what they kept of its prefill."""
        for drafter in self.values():
            drafter.observe_enter(sequence.slot, sequence.request, sequence.handover.get(drafter.name))
        for behind in self.behind.values():
            behind[sequence.slot] = True
        sequence.handover = {}

    def leave(self, sequence: RequestState, finished: bool) -> None:
        """Called when a row stops running; unless it is `finished`, it will resume."""
        for drafter in self.values():
            drafter.observe_leave(sequence.slot, sequence.request, sequence.length, finished)

    def mark_behind(self, slots: np.ndarray, drafter: str) -> None:
        """Marks every drafter but `drafter` as behind on rows that run a step."""
        for name, behind in self.behind.items():
            if name != drafter:
                behind[slots] = True

    def is_behind(self, name: str, slots: np.ndarray) -> bool:
        return name in self.behind and bool(self.behind[name][slots].any())

    def catch_up(self, name: str, slots: np.ndarray, length: np.ndarray) -> bool:
        """Lets a drafter catch up on the rows of `slots` that ran without it; returns whether there were any.

        `length` is the known length of every slot's row.
        """
        slots = np.sort(slots[self.behind[name][slots]])
        self.behind[name][:] = False
        if len(slots):
            self[name].catch_up(slots.tolist(), length[slots].tolist())
        return bool(len(slots))

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copies blocks of the drafters' own caches, as was done in the pool."""
        for drafter in self.values():
            drafter.copy_blocks(sources, targets)

    # -- between rollouts -------------------------------------------------------------------------

    def sleep(self) -> None:
        for drafter in self.values():
            drafter.sleep()

    def wake(self) -> None:
        for drafter in self.values():
            drafter.wake()

    def take_head(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies weights into the trainable head, in place: captured steps read its storage."""
        head = self.head
        assert head is not None, "no drafter of this engine has a head to publish to"
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.copy_(weights[name])
        for drafter in self.values():
            drafter.observe_head()

    def record_states(self, max_bytes: int) -> None:
        for drafter in self.values():
            drafter.record_states(max_bytes)

    def take_states(self) -> Mapping[tuple[int, ...], TextStates]:
        taken = [drafter.take_states() for drafter in self.values()]
        return next(filter(None, taken), {})  # one of them sees the policy's states

    def note_purpose(self, purpose: Purpose) -> None:
        """Called with the purpose of the next steps: what is learned in an evaluation is dropped after it."""
        if purpose is Purpose.TRAIN:
            for name, counts_2C in self._counts.items():
                self[name].calibration.load_counts(counts_2C)
            self._counts = {}
        elif not self._counts:
            self._counts = {
                name: drafter.calibration.counts()
                for name, drafter in self.items()
                if drafter.calibration is not None
            }

    def state(self) -> dict[str, torch.Tensor]:
        self.note_purpose(Purpose.TRAIN)
        kept: dict[str, torch.Tensor] = {}
        for name, drafter in self.items():
            kept |= {f"{name}.{key}": tensor for key, tensor in drafter.state().items()}
            if drafter.calibration is not None:
                kept[f"{name}.{TREE_COUNTS}"] = drafter.calibration.counts().cpu()
        return kept

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state` returned; drafters that are not in it keep their state."""
        self.note_purpose(Purpose.TRAIN)
        for name, drafter in self.items():
            own = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            counts = own.pop(TREE_COUNTS, None)
            if counts is not None and drafter.calibration is not None:
                drafter.calibration.load_counts(counts)
            if own:
                drafter.load_state(own)
