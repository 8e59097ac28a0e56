"""The outcomes of launched steps: the host reads each one late, and retires the rows that have ended.

    launch   batch 7 ──▶ batch 7 ──▶ batch 7 ──▶ batch 8        the device is here
    read        ▲ the host is here

A batch is rebuilt only when a row enters or leaves; between those the host's work per step is a few numpy
operations over the whole batch, and Python handles single rows only where one ended, or has stop strings or
top logprobs. Steps launched after a row's end still carry it: by the time they are read its slot may belong
to another request. So a batch keeps each slot's generation, a number that grows when a row leaves, and an
outcome counts only where the generation is still the same.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from paceline.engine.request_state import RequestState
from paceline.engine.rows import Rows
from paceline.engine.sampling import StepVariant
from paceline.engine.step import RowState, StepStatus
from paceline.engine.step_timer import StepTimer, StepTiming
from paceline.engine.stop_strings import first_stop
from paceline.pacing.strategy import Decision, Observation
from paceline.stats import RolloutStats
from paceline.types import FinishReason, Purpose

# Why a row ended, by the state that the step reports.
FINISH_REASON = {RowState.ENDED_AT_LIMIT: FinishReason.LENGTH, RowState.STOPPED: FinishReason.STOP}


@dataclass(frozen=True)
class Batch:
    """The running rows in the order that steps see them."""

    sequences: list[RequestState]
    slots: np.ndarray
    slot_generations: np.ndarray
    # Indices of the rows that need the host's attention at every step.
    watched: np.ndarray
    variant: StepVariant

    @classmethod
    def of(cls, sequences: list[RequestState], slot_generation: np.ndarray) -> "Batch":
        """Makes a batch of running sequences; `slot_generation` is that of every slot."""
        samplings = [sequence.request.sampling for sequence in sequences]
        slots = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
        watched = np.array([i for i, s in enumerate(samplings) if s.stop or s.top_logprobs], dtype=np.int64)
        variant = StepVariant(
            any(s.truncates for s in samplings),
            max((s.top_logprobs for s in samplings), default=0),
            masked=any(sequence.request.grammar for sequence in sequences),
        )
        return cls(sequences, slots, slot_generation[slots], watched, variant)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def purpose(self) -> Purpose:
        """The purpose of all its rows: training and evaluation never share a batch."""
        return self.sequences[0].request.purpose


@dataclass(frozen=True)
class Launched:
    """A step whose outcome the host has not read yet."""

    batch: Batch
    decision: Decision
    # On the host, valid once the timing is `ready`.
    status: StepStatus
    timing: StepTiming

    @classmethod
    def now(cls, batch: Batch, decision: Decision, status: StepStatus, timer: StepTimer) -> "Launched":
        """Ends the step's launch; on a GPU, enqueues the copy of its outcome to the host."""
        if status.status_3R.device.type == "cuda":
            status = status.to_host()
        return cls(batch, decision, status, timer.finish())


@dataclass(frozen=True)
class Ended:
    """A sequence that has finished, and why."""

    sequence: RequestState
    reason: FinishReason


@dataclass(frozen=True)
class StepOutcome:
    """What one step did: the sequences it ended, and the pacer's observation."""

    ended: list[Ended]
    observation: Observation


class Outcomes:
    """The steps whose outcome is still unread, oldest first."""

    def __init__(self, rows: Rows, tokenizer: Tokenizer | None) -> None:
        self.rows = rows
        # Needed only for stop strings.
        self.tokenizer = tokenizer
        self.unread: deque[Launched] = deque()
        self.slot_generation = np.zeros(rows.null_slot + 1, dtype=np.int64)
        # The length of each slot's row as of the last outcome read.
        self.length = np.zeros(rows.null_slot + 1, dtype=np.int64)
        # Callback after each step, with the sequences, their lengths and how many tokens are new: `certify`
        # needs to know where steps began.
        self.observer: Callable[[list[RequestState], np.ndarray, np.ndarray], None] | None = None

    def enter(self, sequence: RequestState) -> None:
        self.length[sequence.slot] = sequence.length

    def leave(self, sequence: RequestState) -> None:
        """Invalidates unread outcomes of this row."""
        self.slot_generation[sequence.slot] += 1

    def read(self, stats: RolloutStats, version: int) -> StepOutcome:
        """Waits for the oldest unread step and returns what it did.

        The sequences that it ended have received everything they sampled, under weight `version`.
        """
        launched = self.unread.popleft()
        launched.timing.wait()
        batch = launched.batch
        status = launched.status
        lengths = status.lengths_R[: len(batch)].numpy()
        states = status.states_R[: len(batch)].numpy()
        proposed = status.proposed_R[: len(batch)].numpy()
        here = self.slot_generation[batch.slots] == batch.slot_generations
        path = None if status.path_RQ is None else status.path_RQ[: len(batch)].numpy()[here]
        observation = _observation(launched, self._note_lengths(batch, lengths, here), proposed[here], path)
        stats.note(observation)
        watched = batch.watched[here[batch.watched]].tolist()
        for i in watched:
            status.append_top_logprobs(i, batch.sequences[i], int(lengths[i]))
        has_ended = here & (states != RowState.RUNNING)
        ended = [Ended(batch.sequences[i], FINISH_REASON[states[i]]) for i in has_ended.nonzero()[0].tolist()]
        if ended:
            self.take_tokens([entry.sequence for entry in ended], stats, version)
            ended = [Ended(e.sequence, self._cut_at_text(e.sequence) or e.reason) for e in ended]
        running = [batch.sequences[i] for i in watched if states[i] == RowState.RUNNING]
        ended += self._ended_by_text(running, stats, version)
        return StepOutcome(ended, observation)

    def take_tokens(self, sequences: list[RequestState], stats: RolloutStats, version: int) -> None:
        """Copies to the host what rows have sampled, up to their known lengths."""
        if not sequences:
            return
        slots = [sequence.slot for sequence in sequences]
        starts = [sequence.length for sequence in sequences]
        counts = (self.length[slots] - starts).clip(min=0).tolist()
        tokens, logprobs = self.rows.read(slots, starts, max(counts))
        for sequence, count, row, scores in zip(sequences, counts, tokens, logprobs, strict=True):
            sequence.append(row[:count], scores[:count], version)
            stats.generated_tokens += count

    def _note_lengths(self, batch: Batch, lengths: np.ndarray, here: np.ndarray) -> np.ndarray:
        """Updates the rows' lengths and returns how many tokens each row that still runs gained."""
        slots, lengths = batch.slots[here], lengths[here]
        gained = lengths - self.length[slots]
        self.length[slots] = lengths
        if self.observer is not None:
            self.observer([batch.sequences[i] for i in here.nonzero()[0].tolist()], lengths, gained)
        return gained

    def _ended_by_text(self, running: list[RequestState], stats: RolloutStats, version: int) -> list[Ended]:
        """Ends the rows whose text now holds one of their stop strings; later tokens are dropped."""
        running = [sequence for sequence in running if sequence.request.sampling.stop]
        if not running:
            return []
        self.take_tokens(running, stats, version)
        ended = [Ended(sequence, FinishReason.STOP) for sequence in running if self._cut_at_text(sequence)]
        self.rows.deactivate([entry.sequence.slot for entry in ended])
        return ended

    def _cut_at_text(self, sequence: RequestState) -> FinishReason | None:
        """Cuts the response after the token that completes a stop string; None if there is no such token."""
        end = first_stop(self.tokenizer, sequence.response, sequence.request.sampling.stop, sequence.checked)
        sequence.checked = len(sequence.response)
        if end is None:
            return None
        sequence.shorten(end)
        return FinishReason.STOP


def _observation(
    launched: Launched, gained: np.ndarray, proposed: np.ndarray, path: np.ndarray | None
) -> Observation:
    """Returns the pacer's observation of a step.

    `gained` and `proposed` are the tokens that each row gained, none where it had ended before this step, and
    those that were proposed for it; `path` are the nodes on its samples' path, where trees were proposed.
    """
    decision = launched.decision
    count = decision.strategy.count
    drafts = 0
    proposed_tokens = 0
    accepted_at = ()
    begun = 0
    if count:
        alive = gained > 0
        drafts = int(alive.sum())
        proposed_tokens = int(proposed[alive].sum())
        if path is None:
            path = np.broadcast_to(np.arange(count + 1), (len(gained), count + 1))
        # The last of the gained tokens is the policy's own.
        accepted = np.arange(1, path.shape[1]) < gained[:, np.newaxis]
        accepted_at = tuple(np.bincount(path[:, 1:][accepted] - 1, minlength=count).tolist())
        begun = int((alive & (proposed > 0)).sum())
    timing = launched.timing
    draft_seconds, verify_seconds = timing.seconds()
    return Observation(
        decision,
        running=len(launched.batch),
        context=decision.context,
        draft_seconds=draft_seconds,
        verify_seconds=verify_seconds,
        tokens=int(gained.sum()),
        drafts=drafts,
        accepted_at=accepted_at,
        switched=timing.switched,
        disturbed=timing.disturbed,
        proposed=proposed_tokens,
        begun=begun,
    )
