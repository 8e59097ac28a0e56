"""A learning head within a run: where its states come from, when it has time, what is saved of it.

`online.py` learns; this file connects it with the generator, the run's folder and the records.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from paceline.config import FRESH, Config
from paceline.drafting.eagle_folder import eagle_folder, head_for
from paceline.drafting.follower import HeadFollower
from paceline.drafting.model_card import MeasuredAcceptance, read_acceptance
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.online_state import (
    LASTING,
    load_early_state,
    load_online_state,
    online_state,
    what_is_wrong,
)
from paceline.drafting.saving import DrafterSaver
from paceline.drafting.when import SIGMAS, TOLERANCE
from paceline.policy.states import TextStates

# Share of the buffer's bytes that the engine may use of its device, to record states of running rows.
RECORD_SHARE = 0.25


class Recording(Protocol):
    """The part of a generator's speculation that keeps states (`backend.Speculation`)."""

    def record_states(self, max_bytes: int) -> None:
        """Begins to record the states of some requests."""

    def want_states(self, wanted: bool) -> None:
        """Sets whether requests that begin from now on are recorded."""

    def take_states(self) -> Mapping[tuple[int, ...], TextStates]:
        """Returns the states of responses that have finished, by their tokens."""


class Drafts(Protocol):
    """A rollout's counts of a drafter's proposals (`stats.DraftStats`)."""

    drafts: int
    begun: int

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
    """An online drafter, its place in the run's folder and its time."""

    def __init__(
        self, online: HeadFollower, recording: Recording, config: Config, warn: Callable[[str], None]
    ) -> None:
        self.online = online
        self.recording = recording
        self.config = config
        self.warn = warn
        self.saver: DrafterSaver | None = None
        self._kept: list[int] = []  # steps whose saves belong to checkpoints
        self._compared = False
        self._closed = False
        self._offered_idle_time = False
        self._check: Callable[[], None] = lambda: None
        recording.record_states(record_bytes(config))
        recording.want_states(online.wants_states)

    def begin(self, run: Path, step: int, check: Callable[[], None] = lambda: None) -> None:
        """Sets the run's folder, to save in; `step` is the last completed one.

        `check` raises where the folder is no longer the run's to write in.
        """
        self._check = check
        self.saver = self.saver or DrafterSaver(run, self.warn)
        self.saver.expect(sum(p.numel() for p in self.online.head.parameters()))
        self._kept = [step]
        self._compared = step > 0
        self.recording.want_states(self.online.wants_states)

    def restore(self, run: Path, step: int, drafters: Mapping[str, torch.Tensor]) -> None:
        """Resumes from what was saved with a step; from the head alone where only a checkpoint has it."""
        self.saver = DrafterSaver(run, self.warn)
        saved = self.saver.load(step)
        problem = None if saved is None else what_is_wrong(self.online, saved)
        if problem:
            self.warn(f"{self.saver.training_folder}: {problem}; left out")
        if saved is not None and not problem:
            load_online_state(self.online, saved)
        else:
            load_early_state(self.online, drafters)

    def observe(self, step: int, drafts: Mapping[str, Drafts], reward_wait_seconds: float = 0.0) -> None:
        """Records a rollout's drafts by drafter, and its reward wait.

        `step` is that of the policy that generated it.
        """
        if self._offered_idle_time:
            self.online.note_wait(reward_wait_seconds)
        own = drafts.get(self.online.name)
        if own is None or not own.begun:
            return
        self.online.observe(own.first_accepted, own.begun)
        measured = self._measured(step, own)
        if self.saver is not None:
            self.saver.note(measured)
        if not self._compared:
            self._compared = True
            self._compare(measured)

    def follow(self, step: int, step_seconds: float) -> dict[str, float]:
        """Lets the head learn from a step whose update is made; saves now and then."""
        began = time.perf_counter()
        recorded = self.recording.take_states()
        self.online.charge(time.perf_counter() - began)
        metrics = self.online.follow(step, recorded, step_seconds)
        self.recording.want_states(self.online.wants_states)
        if self.saver is not None and self.saver.due and metrics["drafter/updates"]:
            self.save(step, self._kept)
        return metrics

    def save(self, step: int, kept: Sequence[int]) -> int:
        """Saves what a run needs to resume from this step; older saves stay for the steps in `kept`.

        Returns its bytes. As long as `auto` has learned nothing there is nothing: the checkpoint has what
        drafts. Later a step without a save would resume from an older one.
        """
        assert self.saver is not None, "the run has begun"
        self._kept = list(kept)
        if self.online.config.when == "auto" and not (self.online.has_learned or self.saver.has_saved):
            return 0
        self._check()
        began = time.monotonic()
        state = online_state(self.online)
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        lasting = {name: state.pop(name) for name in [*state] if name.startswith(LASTING)}
        head = self.online.head_to_keep() if self.online.has_learned else None
        self.saver.save(step, head, state, kept, lasting)
        self.saver.waited = time.monotonic() - began
        return num_bytes

    def flush(self) -> None:
        if self.saver is not None:
            self.saver.flush()

    def keep(self, steps: Sequence[int]) -> None:
        """Drops saves that belong to none of these steps."""
        assert self.saver is not None, "the run has begun"
        self._kept = list(steps)
        self.saver.keep(steps)

    def close(self) -> None:
        """Waits until everything is written; nothing is learned any more."""
        self._closed = True
        self.flush()

    def work_in(
        self, context: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[Callable[[], bool]], None]:
        """Returns a function that learns, within a context, as long as its argument returns True."""
        online = self.online
        assert isinstance(online, OnlineDrafter), "who learns elsewhere has no use for time here"
        self._offered_idle_time = True

        def work(waiting: Callable[[], bool]) -> None:
            if waiting() and online.has_work and not self._closed:
                with context():
                    online.learn_while(waiting)

        return work

    def _measured(self, step: int, drafts: Drafts) -> MeasuredAcceptance:
        speculation = self.config.rollout.speculation
        # Trees count by number of the node, and paced drafts differ in length: neither is a chain's place.
        by_place = speculation.shape == "chain" and speculation.pacing == "fixed"
        return MeasuredAcceptance(
            self.config.policy.path,
            self.config.task.name,
            self.config.rollout.temperature,
            step,
            drafts.drafts,
            drafts.accept_length,
            drafts.first_accepted,
            tuple(drafts.accepted_shares) if by_place else (),
        )

    def _compare(self, came: MeasuredAcceptance) -> None:
        """Warns where the first rollout's acceptance differs from what the head's folder promised."""
        expected = expected_acceptance(self.config, self.online)
        if expected is None:
            return
        chance = SIGMAS * (came.first_accepted * (1 - came.first_accepted) / came.drafts) ** 0.5
        lower = came.first_accepted < expected.first_accepted - max(TOLERANCE, chance)
        if not lower and not self.online.config.is_asked_for:
            return
        verdict = "less than expected: another task or policy" if lower else "as expected"
        self.warn(f"the eagle head's folder says {expected}; the first rollout gives {came}: {verdict}")


def expected_acceptance(config: Config, online: HeadFollower) -> MeasuredAcceptance | None:
    """Returns the acceptance that the starting head's folder records; None where it records none."""
    path = config.rollout.speculation.eagle_path
    if path == FRESH:
        return None
    found = head_for(path, online.policy.config)
    return None if found is None else read_acceptance(Path(eagle_folder(found)))


def record_bytes(config: Config) -> int:
    """Returns the bytes of a device that recorded states may take; replicas share what the recipe grants."""
    share = RECORD_SHARE / max(1, config.cluster.replicas)
    return int(share * config.rollout.speculation.online.buffer_gb * 1e9)
