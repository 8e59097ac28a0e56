"""Where the policy learns, as the loop sees it: in this process, or in ranks of their own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from paceline.cluster.ranks import LearnerRanks
from paceline.learning.checkpoint import (
    Fingerprint,
    TrainingState,
    checkpoint_bytes,
    load_checkpoint,
    read_state,
    save_checkpoint,
    write_checkpoint,
)
from paceline.learning.learner import Learner
from paceline.learning.mismatch import MismatchCheck
from paceline.policy.decoder import Decoder, not_finite
from paceline.policy.huggingface import save_policy
from paceline.types import Group
from paceline.worker.wire import Message

Tensors = Mapping[str, torch.Tensor]


class LearningHome(ABC):
    """A policy with its optimiser, wherever they lie."""

    @abstractmethod
    def update(self, groups: Sequence[Group], check: MismatchCheck) -> dict[str, float]:
        """Updates the policy from a step's groups; `check` sees the mismatch before the weights move."""

    @property
    @abstractmethod
    def optimiser_steps(self) -> int:
        """The optimiser's steps so far."""

    @abstractmethod
    def not_finite(self) -> list[str]:
        """Returns the names of parameters that are not finite."""

    @abstractmethod
    def num_bytes(self, *others: Tensors) -> int:
        """Returns about how many bytes a checkpoint with these tensors beside the policy's takes."""

    @abstractmethod
    def save(self, folder: Path, state: TrainingState, keep: int, *beside: Any) -> None:
        """Writes a checkpoint with what `write_checkpoint` takes beside policy and optimiser."""

    @abstractmethod
    def load(self, checkpoint: Path) -> TrainingState:
        """Restores policy and optimiser, and returns the counters."""

    def as_learned(self) -> AbstractContextManager[None]:
        """Returns a context in which the shared weights are as they are saved, not rounded for rollouts."""
        return nullcontext()

    @abstractmethod
    def stop_rounding(self) -> None:
        """Called when rollouts have fallen back: the weights are no longer rounded for them."""

    @abstractmethod
    def save_policy(self, folder: Path) -> None:
        """Writes the policy alone, as a Hugging Face folder."""


class OwnProcess(LearningHome):
    """Learning in this process."""

    def __init__(self, learner: Learner, policy: Decoder, tokenizer_from: Path) -> None:
        self.learner = learner
        self.policy = policy
        self.tokenizer_from = tokenizer_from

    def update(self, groups: Sequence[Group], check: MismatchCheck) -> dict[str, float]:
        return self.learner.update(groups, check)

    @property
    def optimiser_steps(self) -> int:
        return self.learner.optimiser.steps

    def not_finite(self) -> list[str]:
        return not_finite(self.policy)

    def num_bytes(self, *others: Tensors) -> int:
        return checkpoint_bytes(self.policy, self.learner.optimiser, *others)

    def save(self, folder: Path, state: TrainingState, keep: int, *beside: Any) -> None:
        optimiser = self.learner.optimiser
        with self.as_learned():
            save_checkpoint(folder, self.policy, optimiser, state, self.tokenizer_from, keep, *beside)

    def as_learned(self) -> AbstractContextManager[None]:
        return self.learner.weights.as_learned()

    def stop_rounding(self) -> None:
        self.learner.weights.stop()

    def load(self, checkpoint: Path) -> TrainingState:
        state = load_checkpoint(checkpoint, self.policy, self.learner.optimiser)
        self.learner.weights.round()
        return state

    def save_policy(self, folder: Path) -> None:
        with self.as_learned():
            save_policy(self.policy, folder, self.tokenizer_from)


class RankProcesses(LearningHome):
    """Learning in ranks, which write their shares of a checkpoint to a shared folder."""

    def __init__(self, ranks: LearnerRanks, policy: Decoder, tokenizer_from: Path) -> None:
        """`policy` gives the shapes; its weights are those that the run began with."""
        self.ranks = ranks
        self.policy = policy
        self.tokenizer_from = tokenizer_from

    def update(self, groups: Sequence[Group], check: MismatchCheck) -> dict[str, float]:
        return self.ranks.update(groups, check)

    @property
    def optimiser_steps(self) -> int:
        return self.ranks.optimiser_steps

    def not_finite(self) -> list[str]:
        return self.ranks.ask_all(Message("not_finite"))[0].fields["names"]

    def num_bytes(self, *others: Tensors) -> int:
        """Returns the bytes of the weights, two moments and, below float32, masters."""
        numbers = sum(parameter.numel() for parameter in self.policy.parameters())
        own = self.policy.dtype.itemsize
        learned = numbers * (own + 8 + (4 if own < 4 else 0))
        return learned + sum(tensor.nbytes for tensors in others for tensor in tensors.values())

    def save(self, folder: Path, state: TrainingState, keep: int, *beside: Any) -> None:
        write_checkpoint(folder, self._write, state, keep, *beside)

    def _write(self, partial: Path) -> Mapping[str, Fingerprint]:
        fields = {"folder": str(partial.absolute()), "tokenizer_from": str(self.tokenizer_from.absolute())}
        answers = self.ranks.ask_all(Message("write", fields))
        return {name: found for answer in answers for name, found in answer.fields["files"].items()}

    def load(self, checkpoint: Path) -> TrainingState:
        self.ranks.ask_all(Message("load", {"folder": str(checkpoint.absolute())}))
        state = read_state(checkpoint)
        self.ranks.optimiser_steps = state.optimiser_steps
        return state

    def stop_rounding(self) -> None:
        self.ranks.ask_all(Message("stop_rounding"))

    def save_policy(self, folder: Path) -> None:
        fields = {"folder": str(folder.absolute()), "tokenizer_from": str(self.tokenizer_from.absolute())}
        self.ranks.ask_all(Message("save_policy", fields))
