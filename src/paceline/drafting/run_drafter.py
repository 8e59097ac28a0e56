"""A learning head within a run: what it is told of rollouts, and its folder beside the run's checkpoints."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from paceline.config import FRESH, Config
from paceline.drafting.eagle_folder import eagle_folder, head_for, save_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.model_card import MeasuredAcceptance, read_acceptance, write_card
from paceline.drafting.online import SIGMAS, Accepted, OnlineHead
from paceline.policy.config import DecoderConfig

# The head as vLLM, SGLang and `load_eagle` open it, with its model card.
HEAD_FOLDER = "drafter"
# A first rollout whose share of accepted first tokens is lower by less than this is as expected.
TOLERANCE = 0.01


class Drafts(Protocol):
    """A rollout's counts of a drafter's proposals (`stats.DraftStats`)."""

    drafts: int
    begun: int
    accepted: int
    accepted_at: list[int]

    @property
    def accept_length(self) -> float:
        """Tokens emitted per draft."""

    @property
    def first_accepted(self) -> float:
        """The share of the drafts that were begun whose likeliest first token was right."""

    @property
    def accepted_shares(self) -> list[float]:
        """The share of drafts whose token i was accepted."""


class RunDrafter:
    """An online head and its place in the run's folder."""

    def __init__(
        self,
        online: OnlineHead,
        policy: DecoderConfig,
        head: EagleHead,
        config: Config,
        warn: Callable[[str], None],
    ) -> None:
        """`head` is the one that drafts, or one like it."""
        self.online = online
        self.policy = policy
        self.head = head
        self.config = config
        self.warn = warn
        self.first: MeasuredAcceptance | None = None
        self.last: MeasuredAcceptance | None = None
        speculation = config.rollout.speculation
        # Paced drafts differ in length: what all of them have is a first token.
        self._paced = speculation.pacing == "adaptive" and config.rollout.backend != "vllm"
        # Trees count by number of the node: it is no place in a chain.
        self._has_places = speculation.shape == "chain" and not self._paced

    def begin(self, run: Path) -> None:
        """Sets the run's folder, of a new run or a resumed one, whose card says how the head began."""
        self.folder = run / HEAD_FOLDER
        self.first, self.last = (read_acceptance(self.folder, which) for which in ("first", "last"))

    def follow(self, step: int, drafts: Mapping[str, Drafts], step_seconds: float) -> dict[str, float]:
        """Lets the head learn from a step whose update is made, and look at the drafts of its rollout."""
        own = drafts.get(self.online.name)
        accepted = None
        if own is not None and own.begun:
            accepted = Accepted(own.accepted / own.drafts, own.drafts, len(own.accepted_at))
            if self._paced:
                accepted = Accepted(own.first_accepted, own.begun, 1)
            self._note(step - 1, own)
        return self.online.follow(step, accepted, step_seconds)

    def _note(self, step: int, drafts: Drafts) -> None:
        """Records the acceptance in a rollout for the head's card; `step` is that of the policy."""
        self.last = MeasuredAcceptance(
            self.config.policy.path,
            self.config.task.name,
            self.config.rollout.temperature,
            step,
            drafts.drafts,
            drafts.accept_length,
            drafts.first_accepted,
            tuple(drafts.accepted_shares) if self._has_places else (),
        )
        if self.first is None:
            self.first = self.last
            self._compare(self.last)

    def _compare(self, came: MeasuredAcceptance) -> None:
        """Warns where the first rollout's acceptance differs from what the head's folder promised."""
        expected = expected_acceptance(self.config, self.policy)
        if expected is None:
            return
        chance = SIGMAS * (came.first_accepted * (1 - came.first_accepted) / came.drafts) ** 0.5
        lower = came.first_accepted < expected.first_accepted - max(TOLERANCE, chance)
        if not lower and not self.online.config.is_asked_for:
            return
        verdict = "less than expected: another task or policy" if lower else "as expected"
        self.warn(f"the eagle head's folder says {expected}; the first rollout gives {came}: {verdict}")

    def save_head(self) -> None:
        """Writes what the head has learned for other engines; until then there is no such folder."""
        if not self.online.version:
            return
        try:
            self.folder.mkdir(exist_ok=True)  # a deleted run folder is not recreated
            save_eagle(self._head_with(self.online.weights()), self.folder)
            write_card(self.folder, self.first, self.last)
        except (OSError, SafetensorError) as error:  # the run continues without it
            self.warn(f"the eagle head could not be written to {self.folder}: {error}")

    def _head_with(self, weights: Mapping[str, torch.Tensor]) -> EagleHead:
        """Returns a head on the host with these weights, in the policy's own type."""
        dtype = self.head.fc.weight.dtype
        own = {id(p): nn.Parameter(weights[name].to(dtype)) for name, p in self.head.named_parameters()}
        return copy.deepcopy(self.head, own).to("cpu")


def expected_acceptance(config: Config, policy: DecoderConfig) -> MeasuredAcceptance | None:
    """Returns the acceptance that the starting head's folder records; None where it records none."""
    path = config.rollout.speculation.eagle_path
    if path == FRESH:
        return None
    found = head_for(path, policy)
    return None if found is None else read_acceptance(Path(eagle_folder(found)))
