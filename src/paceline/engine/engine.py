"""The native engine: a backend whose running requests live on the device.

    submit ──▶ waiting ──admit──▶ prefilling ──enter──▶ running ──▶ finished ──▶ completions()
                  ▲                                        │
                  └────────────── preempted ◀──────────────┘  blocks ran out, or the weights changed

The host only decides which requests run: it admits, allocates blocks ahead of need, launches several steps
before it reads the first one's outcome, and retires what has finished. What a step does is in `step.py`, how
its outcome is read in `outcomes.py`.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from tokenizers import Tokenizer

from paceline.drafting.base import Drafter
from paceline.engine.device_side import DeviceSide
from paceline.engine.launcher import Launcher
from paceline.engine.outcomes import Batch, Launched, Outcomes
from paceline.engine.prefill import run_chunk
from paceline.engine.refusal import Limits, refusal
from paceline.engine.request_state import RequestState
from paceline.engine.reservation import RESERVED_STEPS, Reservation
from paceline.engine.rows import NewRow
from paceline.engine.scheduler import Scheduler
from paceline.engine.settings import EngineSettings
from paceline.engine.start_timing import time_steps
from paceline.engine.step_timer import StepTimer
from paceline.pacing.strategy import PLAIN, Decision, Pacer
from paceline.paged.cache import BLOCK_SIZE
from paceline.policy.decoder import Decoder
from paceline.policy.states import to_device
from paceline.precision.rollout import RolloutPrecision
from paceline.stats import RolloutStats
from paceline.types import Completion, FinishReason, Precision, Request

# The decision for every step without a pacer.
PLAIN_DECISION = Decision(PLAIN)


class Engine(DeviceSide):
    """Implements `Backend` and its capabilities `Speculation` and `LowPrecision`."""

    def __init__(
        self,
        policy: Decoder,
        settings: EngineSettings,
        tokenizer: Tokenizer | None = None,
        drafters: Sequence[Drafter] = (),
        pacer: Pacer | None = None,
        version: int = 0,
    ) -> None:
        super().__init__(policy, settings, tokenizer, drafters, version)
        self._open_host(pacer)

    def _open_host(self, pacer: Pacer | None) -> None:
        settings = self.settings
        device = self.policy.device
        self.pacer = pacer
        self.timer = StepTimer(device)
        self.launcher = Launcher(self.runner, self.drafters, self.timer, settings)
        self.steps_ahead = settings.steps_ahead if device.type == "cuda" else 0
        self.arrivals = 0
        self.scheduler = Scheduler(self.pool, settings.max_running, settings.admission == "longest")
        self.running: dict[int, RequestState] = {}  # by slot
        self.outcomes = Outcomes(self.rows, self.tokenizer)
        self.finished: deque[Completion] = deque()
        self.reservation = Reservation(self.rows, self.pool, settings.max_running)
        self.batch = Batch.of([], self.outcomes.slot_generation)
        self.num_queries = 1  # of one row, in the last step
        self.paused = False
        self.preemptions = 0
        self.stats = RolloutStats()
        self._last_outcome = 0.0
        self._told_capture_seconds = 0.0  # of the runner's, already reported in statistics

    def _rebuild_cache(self, num_blocks: int = 0) -> None:
        """Replaces the KV cache after layer types changed; nothing may be running."""
        queued = [sequence.limit for sequence in self.scheduler.sequences]
        self._replace_cache(max([self.settings.request_tokens, *queued]), num_blocks)

    # -- the contract (backend.py) ----------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        accepted = []
        for request in requests:
            limit = min(len(request.prompt) + request.sampling.max_tokens, self.max_length)
            sequence = RequestState(request, self.arrivals, limit)
            self.arrivals += 1
            sequence.begin("waiting")
            problem = refusal(sequence, self._stop_ids(request), self._limits)
            if problem:
                self._complete(sequence, FinishReason.REFUSED, problem)
            else:
                accepted.append(sequence)
        self.scheduler.add(accepted)

    @torch.inference_mode()
    def completions(self) -> Iterator[Completion]:
        """Yields each completion as it finishes.

        Each iteration: yield what has finished, calibrate the KV scales if that is due, admit, prefill one
        chunk, launch one step, and read the outcomes of steps that are more than `steps_ahead` behind.
        """
        self._last_outcome = time.perf_counter()
        self.timer.pause()
        while not self.paused:
            while self.finished:
                yield self.finished.popleft()
                if not self.outcomes.unread:
                    self.timer.pause()
                if self.paused:
                    return
            if self.rollout_precision.wants_prompts and self.rollout_precision.calibrate_from(
                [s.tokens for s in self.scheduler.sequences]
            ):
                self._rebuild_cache()
            self.time_steps()
            # What `_reserve` will ask for.
            blocks_to_keep = self._missing_blocks(self.num_queries) if self.scheduler.may_admit else 0
            lookahead = RESERVED_STEPS * self.num_queries
            for sequence in self.scheduler.admit(not self.running, lookahead, blocks_to_keep):
                self._complete(sequence, FinishReason.ABORTED)
            if self.scheduler.prefills:
                with self.timer.prefill():
                    self._prefill()
            if self.running:
                self._launch()
                while len(self.outcomes.unread) > self.steps_ahead:
                    self._read_outcome()
            elif self.outcomes.unread:
                self._read_outcome()
            elif self.scheduler.idle and not self.finished:
                return

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        for sequence in [*self.scheduler.sequences, *self.running.values()]:
            sequence.aborted |= sequence.request.id in ids
        self._drain()
        self.scheduler.drop_held(ids)  # also those that have just finished
        for sequence in [s for s in self.running.values() if s.aborted]:
            self._leave(sequence, finished=True)
            self.scheduler.release(sequence)
            self._complete(sequence, FinishReason.ABORTED)

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Updates the weights; running requests recompute their cache, or keep it if so configured."""
        if self.settings.keeps_cache:
            self._drain()
            self.outcomes.take_tokens(list(self.running.values()), self.stats, self.version)
        else:
            self._preempt_all()
        if self._take_weights(weights):
            self._rebuild_cache()
        self.version = version

    def fall_back_to_base_precision(self) -> None:
        self._preempt_all()
        self.rollout_precision.fall_back()
        self._rebuild_cache()
        if self.pacer is not None:
            self.pacer.forget_times()

    @contextmanager
    def in_base_precision(self) -> Iterator[None]:
        self._preempt_all()
        low, num_blocks = self.rollout_precision, self.cache.num_blocks
        self.rollout_precision = RolloutPrecision(self.policy, Precision.BASE)
        self._rebuild_cache()
        try:
            yield
        finally:
            self._preempt_all()
            self.rollout_precision = low
            self._rebuild_cache(num_blocks)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def sleep(self) -> None:
        self._preempt_all()
        self.cache.sleep()
        self.drafters.sleep()

    def wake(self) -> None:
        self.cache.wake()
        self.drafters.wake()

    def training(self) -> AbstractContextManager[None]:
        return self.runner.guard.training()

    def take_stats(self) -> RolloutStats:
        stats, self.stats = self.stats, RolloutStats()
        stats.capture_seconds = self.runner.capture_seconds - self._told_capture_seconds
        self._told_capture_seconds = self.runner.capture_seconds
        stats.graph_pool_bytes = self.runner.memory.pool_bytes if self.policy.device.type == "cuda" else None
        stats.precision = self.rollout_precision.stats() if self.low_precision else None
        stats.drafter_version = self.drafter_version if self.drafters.head is not None else None
        return stats

    def live_stats(self) -> RolloutStats | None:
        return self.stats

    def load_calibration_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.rollout_precision.load_state(tensors):
            self._rebuild_cache()

    def admission_state(self) -> dict[str, torch.Tensor]:
        return self.scheduler.expected_lengths.state() if self.scheduler.longest_first else {}

    def load_admission_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.scheduler.expected_lengths.load_state(tensors)

    def close(self) -> None:
        self.sleep()  # releases the memory to the policy's next user
        self.scheduler.waiting.clear()
        self.scheduler.waiting_prompts.clear()

    # -- entering ---------------------------------------------------------------------------------

    @property
    def _limits(self) -> Limits:
        pool_tokens = (self.pool.num_blocks - 1) * BLOCK_SIZE
        return Limits(
            self.max_length, pool_tokens, self.policy.config.vocab_size, reads_text=self.tokenizer is not None
        )

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        end = () if request.sampling.ignore_eos else self.policy.config.eos_token_ids
        return tuple(dict.fromkeys(request.sampling.stop_token_ids + end))

    def _prefill(self) -> None:
        self.stats.prefill_tokens += run_chunk(
            self.runner.forward, self.scheduler.prefills, self.settings.prefill_tokens, self.runner.followers
        )
        ready = self.scheduler.take_ready()
        if ready.copy_from:
            for cache in (self.cache, self.drafters):
                cache.copy_blocks(ready.copy_from, ready.copy_to)
        for sequence in [s for s in ready.sequences if s.aborted]:
            self.scheduler.release(sequence)
            self._complete(sequence, FinishReason.ABORTED)
        self._enter([sequence for sequence in ready.sequences if not sequence.aborted])

    def _enter(self, sequences: list[RequestState]) -> None:
        if not sequences:
            return
        self.rows.enter(
            [
                NewRow(
                    s.slot,
                    s.tokens,
                    s.limit,
                    s.request.seed,
                    s.request.sampling,
                    self._stop_ids(s.request),
                    s.blocks,
                )
                for s in sequences
            ]
        )
        self.reservation.enter(sequences)
        for sequence in sequences:
            self.running[sequence.slot] = sequence
            sequence.begin("decode")
            self.outcomes.enter(sequence)
            self.drafters.enter(sequence)
        self._running_changed()

    # -- steps ------------------------------------------------------------------------------------

    def time_steps(self) -> None:
        """Times steps for a pacer that has no times yet; only while nothing runs."""
        seconds = self.settings.start_seconds
        if self.pacer is None or self.running or self.outcomes.unread or not seconds:
            return
        if strategies := self.pacer.untimed():
            begun = time.perf_counter()
            self.pacer.take_times(time_steps(self.launcher, strategies, seconds))
            self._last_outcome = time.perf_counter()
            self.stats.timing_seconds += self._last_outcome - begun

    def _launch(self) -> None:
        decision = PLAIN_DECISION
        if self.pacer is not None:
            decision = self.pacer.choose(self.launcher.moment(self.batch, self.outcomes.length))
        strategy = decision.strategy
        num_queries = strategy.queries
        if self.reservation.left < num_queries and not self._reserve(num_queries):
            return
        if self.drafters.is_behind(strategy.drafter, self.batch.slots) and not self._catch_up(
            strategy.drafter
        ):
            return
        self.num_queries = num_queries
        status = self.launcher.launch(self.batch, strategy)
        self.outcomes.unread.append(Launched.now(self.batch, decision, status, self.timer))
        self.reservation.launched(self.batch, num_queries)

    def _catch_up(self, name: str) -> bool:
        """Lets a drafter catch up on rows that ran without it; returns False if they all ended meanwhile."""
        self._drain()
        if self.drafters.catch_up(name, self.batch.slots, self.outcomes.length):
            self.timer.note_switch()
        return bool(self.running)

    def _reserve(self, num_queries: int) -> bool:
        """Reserves blocks for the next steps of all running rows; returns False if no row is left running."""
        if self._missing_blocks(num_queries) > self.pool.free:
            self._drain()  # the bounds become lengths, and finished requests release their blocks
            self.scheduler.drop_idle()
            while self.running and self._missing_blocks(num_queries) > self.pool.free:
                self._preempt(max(self.running.values(), key=lambda s: s.order))
            if not self.running:
                return False
        self.reservation.hand_out(self.batch, num_queries)
        return True

    def _missing_blocks(self, num_queries: int) -> int:
        return int(self.reservation.missing(self.batch, num_queries).sum())

    def _read_outcome(self) -> None:
        timing = self.outcomes.unread[0].timing
        outcome = self.outcomes.read(self.stats, self.version)
        now = time.perf_counter()
        prefill = timing.prefill_seconds()
        self.stats.prefill_seconds += prefill
        self.stats.step_seconds.append(now - self._last_outcome - prefill)
        self._last_outcome = now
        if self.pacer is not None:
            self.pacer.observe(outcome.observation)
        for entry in outcome.ended:
            self._finish(entry.sequence, entry.reason)
        if outcome.ended:
            self._running_changed()

    def _finish(self, sequence: RequestState, reason: FinishReason) -> None:
        self._retire(sequence, finished=True)
        self.scheduler.note_finished(sequence)
        if sequence.request.hold:
            self.scheduler.hold(sequence)
        self.scheduler.release(sequence)
        self._complete(sequence, reason)

    def _complete(self, sequence: RequestState, reason: FinishReason, error: str = "") -> None:
        self.finished.append(sequence.complete(reason, error))
        self.stats.note_request(sequence.trace(reason))

    # -- leaving ----------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Reads every outstanding outcome, so that the host's state is the device's."""
        while self.outcomes.unread:
            self._read_outcome()
        self.reservation.settle(self.batch, self.outcomes.length)

    def _leave(self, sequence: RequestState, finished: bool) -> None:
        """Removes a running row from the device and keeps its tokens; the pipeline must be drained."""
        self.outcomes.take_tokens([sequence], self.stats, self.version)
        self.rows.deactivate([sequence.slot])
        self._retire(sequence, finished)
        self._running_changed()

    def _retire(self, sequence: RequestState, finished: bool) -> None:
        """Removes a row from the running set; its slot and blocks stay allocated."""
        sequence.routing = self.cache.routing_of(sequence.blocks, sequence.length - 1)
        self.drafters.leave(sequence, finished)
        self.outcomes.leave(sequence)
        del self.running[sequence.slot]

    def _preempt(self, sequence: RequestState) -> None:
        self._leave(sequence, finished=False)
        self.scheduler.requeue(sequence)
        self.preemptions += 1

    def _preempt_all(self) -> None:
        self._drain()
        for sequence in sorted(self.running.values(), key=lambda s: s.order, reverse=True):
            self._preempt(sequence)
        self.scheduler.drop_all()

    def _running_changed(self) -> None:
        self.batch = Batch.of(list(self.running.values()), self.outcomes.slot_generation)
        self.reservation.left = 0
        self.launcher.note_change()
        if self.running:
            self.drafters.note_purpose(self.batch.purpose)
        padded = np.full(self.settings.max_running, self.rows.null_slot, dtype=np.int64)
        padded[: len(self.batch)] = self.batch.slots
        self.runner.slots.copy_(to_device(torch.from_numpy(padded), self.rows.device), non_blocking=True)
