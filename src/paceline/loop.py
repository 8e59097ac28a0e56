"""The RL loop, top to bottom: roll out, learn, hand the new weights over; evaluate and save when it is time.

    tasks ──prompts──▶ backend ──completions──▶ rewards ──▶ learner ──weights──▶ backend

What generates, what scores and what learns are parts of their own; this file only says in which order they
work. `Sentinel.supervise` wraps rollout and update: where low-precision rollouts cannot be trusted it falls
back and makes the step again. A killed run continues from its newest checkpoint and computes what it would
have computed.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.backend import WeightsNotFinite
from paceline.certify.closing_check import check_speculation
from paceline.config import (
    RESUME_MAY_CHANGE,
    Config,
    ConfigError,
    changed_keys,
    learning_notes,
    rollout_notes,
)
from paceline.drafting.online import OnlineDrafter, make_online
from paceline.learning.algorithms.dapo import punish_overlong
from paceline.learning.checkpoint import (
    TrainingState,
    load_calibration,
    load_checkpoint,
    load_drafters,
    newest_checkpoint,
    replace_folder,
    save_best,
    save_checkpoint,
    whole_checkpoints,
)
from paceline.learning.learner import Learner
from paceline.learning.mismatch import MismatchCheck
from paceline.learning.sentinel import Sentinel, TrainingFailed, training_failed
from paceline.pacing.store import load_pacing, save_pacing
from paceline.pacing.trace import append_trace
from paceline.policy.decoder import not_finite
from paceline.report.clock import StageClock
from paceline.report.console import Console
from paceline.report.html_report import OwnReport
from paceline.report.metrics import rollout_metrics
from paceline.report.profiler import StepProfiler
from paceline.report.run_directory import RunDirectory
from paceline.report.step_trace import write_step_trace
from paceline.report.summary import Summary, summarise_run
from paceline.report.writers import make_writers
from paceline.rollout.dynamic_sampling import DynamicSampling, sampling_metrics
from paceline.rollout.evaluation import evaluate
from paceline.rollout.samples import write_groups
from paceline.rollout.sources import LiveRollouts, RolloutSource, SavedRollouts
from paceline.session import Session, open_session
from paceline.stats import RolloutStats
from paceline.tasks.order import ProblemOrder
from paceline.types import Group, Purpose


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    finished: bool  # False: interrupted, resumable
    summary: Summary


def train(
    config: Config,
    recipe: str = "default",
    resume: Path | None = None,
    replay: Path | None = None,
    console: Console | None = None,
    profile_step: int = 0,
) -> Result:
    """Trains a policy; `resume` continues a run directory, `replay` learns from saved rollouts.

    `profile_step` names a step that torch's profiler watches; 0: none.
    """
    console = console or Console(quiet=True)
    trainer = Trainer(config, recipe, resume, replay, console)
    trainer.profiler = StepProfiler(profile_step, trainer.directory.profile_path, console.warn)
    with console.watching(trainer.session.sampler, trainer.clock):
        return trainer.run()


class Trainer:
    """One training run: its parts, and what each step does with them."""

    def __init__(
        self, config: Config, recipe: str, resume: Path | None, replay: Path | None, console: Console
    ) -> None:
        self.config = config
        self.console = console
        self.live = replay is None
        resumed = None if resume is None else _reopen(RunDirectory.open(resume), config)
        self.session = open_session(config, learns=True)
        console.plan(self.session.plan)
        for note in [*learning_notes(config.learning), *rollout_notes(config.rollout)]:
            console.warn(note)
        self.clock = StageClock(self.session.device)
        self.learner = self._make_learner()
        self.online = self._make_online()
        state = self._restore(resumed)
        self.sentinel = Sentinel(
            config.rollout.sentinel, self.session.backend, state, live=self.live, warn=console.warn
        )
        self.order = ProblemOrder(self.session.task.train, config.run.seed, state.task_position)
        self.source = _rollout_source(self.session, self.order, replay, console)
        if resumed is not None and state.step:
            self._load_pacing(resumed)
        self.directory = resumed or RunDirectory.create(config, recipe)  # now that nothing is missing
        self.writers = make_writers(config, self.directory.path)
        self.step_number = state.step
        self.best_accuracy = state.best_accuracy
        self.save_due = False
        self.profiler = StepProfiler()
        self.report = OwnReport(self.directory, console.warn)

    # -- the run ----------------------------------------------------------------------------------

    def run(self) -> Result:
        """Trains until the recipe's last step or an interruption."""
        last_step = self.config.run.steps
        self.console.start_of_run(
            self.config.policy.path,
            self.config.task.name,
            f"{self.session.device_name}, {self.session.policy.dtype}",
            self.directory.path,
        )
        self._hand_over_weights()
        with _interruptible(self.console) as interrupted:
            if self.step_number == 0:
                self.evaluate()
            self.console.start(last_step)
            while self.step_number < last_step and not interrupted:
                self.step_number += 1
                with self.profiler.watching(self.step_number):
                    self.step()
                if self._eval_is_due():
                    self.evaluate()
                self._save_if_due(bool(interrupted))
        if self.step_number == last_step and self.live:
            self._compare_with_plain_decoding()
        self._close()
        return Result(finished=self.step_number >= last_step, summary=summarise_run(self.directory))

    def run_steps(self) -> None:
        """Makes the steps and nothing else, for measuring: no evaluation, checkpoint or closing check."""
        self._hand_over_weights()
        self.console.start(self.config.run.steps)
        while self.step_number < self.config.run.steps:
            self.step_number += 1
            self.step()
        self._close()

    def step(self) -> None:
        """Makes one step: rollout, update, drafter, new weights, records."""
        step = self.step_number
        start = time.perf_counter()
        groups, metrics = self.sentinel.supervise(step, self._roll_out, self._learn, self._rewinder())
        if self.online is not None:
            metrics |= self._train_drafter(self.online, groups)
        with self.clock("sync"):
            self._hand_over_weights()
        whole_seconds = time.perf_counter() - start
        stats = self.source.take_stats()
        if self.online is not None and self.online.name in stats.drafts:
            drafts = stats.drafts[self.online.name]
            self.online.observe(drafts.first_accepted, drafts.drafts)
        metrics |= rollout_metrics(groups, stats) | sampling_metrics(self.source) | self.clock.take_metrics()
        metrics["time/step"] = whole_seconds
        metrics["time/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/rollout"]
        self._record_step(groups, stats, metrics)
        if self.sentinel.stop_reason:
            raise self._failure(self.sentinel.stop_reason)

    def evaluate(self) -> None:
        """Measures the policy on held-out problems, and keeps it if it is the best so far."""
        with self.clock("evaluate"):
            evaluation = evaluate(self.session.sampler, self.session.task.held_out, self.config.eval)
        self._record("eval", evaluation.metrics() | self.clock.take_metrics())
        self.clock.take_spans()  # they are no step's
        self.console.evaluated(self.step_number, evaluation)
        if evaluation.accuracy.value > self.best_accuracy:
            self.best_accuracy = evaluation.accuracy.value
            save_best(self.directory.checkpoints_path, self.session.policy, self.session.policy_folder)

    def save(self) -> None:
        """Writes a checkpoint from which the run goes on as if it had never stopped."""
        harmed = not_finite(self.session.policy)
        if harmed:  # a checkpoint of them would push out a sound one
            raise self._failure(
                f"after step {self.step_number} {len(harmed)} parameters are not finite, first {harmed[0]}"
            )
        backend = self.session.backend
        drafters = backend.speculation.drafter_state() if backend.speculation else {}
        if self.online is not None:
            drafters |= self.online.state()
        save_checkpoint(
            self.directory.checkpoints_path,
            self.session.policy,
            self.learner.optimiser,
            TrainingState(
                step=self.step_number,
                optimiser_steps=self.learner.optimiser.steps,
                task_position=self.order.position,
                best_accuracy=self.best_accuracy,
                fallback=self.sentinel.fallback,
                capped_steps=self.sentinel.capped_steps,
            ),
            self.session.policy_folder,
            self.config.checkpoint.keep,
            drafters,
            backend.low_precision.calibration_state() if backend.low_precision else {},
        )
        if backend.speculation is not None:
            machine = self.session.machine(self.sentinel.precision)
            save_pacing(self.directory.pacing_path, backend.speculation.pacer, machine)
        if self.online is not None:
            replace_folder(self.directory.checkpoints_path / "eagle", self.online.save)
        self.report.renew()

    # -- the parts of a step ----------------------------------------------------------------------

    def _roll_out(self) -> list[Group]:
        with self.clock("rollout"):
            groups = self.source.collect(self.step_number)
            return punish_overlong(
                groups, self.config.rollout.max_tokens, self.config.learning.overlong_share
            )

    def _learn(self, groups: list[Group], inspect: MismatchCheck) -> dict[str, float]:
        with self.clock("learn"), self.session.learning():
            return self.learner.update(groups, inspect)

    def _rewinder(self) -> Callable[[], None]:
        """Returns a function that restores the problem order and drops statistics, to redo the step."""
        position = self.order.position

        def rewind() -> None:
            self.order.position = position
            self.source.take_stats()

        return rewind

    def _train_drafter(self, online: OnlineDrafter, groups: list[Group]) -> dict[str, float]:
        with self.clock("drafter"), self.session.learning(needs_memory=online.due):
            metrics = online.follow(self.step_number, groups)
        self.session.backend.speculation.publish_drafter(self.step_number)
        return metrics

    def _hand_over_weights(self) -> None:
        try:
            self.session.backend.update_weights(version=self.step_number)
        except WeightsNotFinite as problem:
            raise self._failure(f"after step {self.step_number} {problem}") from None

    def _record_step(self, groups: list[Group], stats: RolloutStats, metrics: dict[str, float]) -> None:
        append_trace(self.directory.trace_path, self.step_number, stats.trace)
        spans = self.clock.take_spans()
        write_step_trace(self.directory.requests_path, self.step_number, spans, stats, groups)
        self._record("train", metrics)
        samples = self.directory.samples_path / f"step_{self.step_number:06d}.jsonl"
        write_groups(samples, groups[: self.config.report.samples_per_step], self.session.tokenizer)
        self.console.step(self.step_number, metrics)

    def _record(self, kind: str, metrics: dict[str, float]) -> None:
        self.directory.append_metrics({"step": self.step_number, "kind": kind, **metrics})
        for writer in self.writers:
            writer.write(self.step_number, metrics)

    def _eval_is_due(self) -> bool:
        every = self.config.eval.every
        return self.step_number == self.config.run.steps or bool(every and self.step_number % every == 0)

    def _save_if_due(self, interrupted: bool) -> None:
        is_last = self.step_number == self.config.run.steps
        is_regular = self.step_number % self.config.checkpoint.every == 0
        self.save_due = self.save_due or is_last or is_regular or interrupted
        # After a failed step the weights may be what failed; the next step that learns is saved instead.
        if self.save_due and not self.sentinel.failed_steps:
            self.save()
            self.save_due = False

    def _compare_with_plain_decoding(self) -> None:
        """Makes the closing check: the next step's rollout, several times with and without speculation."""
        rollout = self.config.rollout
        problems = ProblemOrder(self.session.task.train, self.config.run.seed, self.order.position).take(
            rollout.prompts_per_step
        )
        check = check_speculation(
            self.session.backend,
            lambda: self.session.sampler.sample(
                problems,
                Purpose.TRAIN,
                self.step_number + 1,
                rollout.samples_per_prompt,
                self.session.train_sampling(),
            ),
            self.config.report.closing_pairs,
        )
        if check is not None:
            self.directory.write_closing(check.record())
            self.console.speculation(check)
            self.report.renew()

    def _failure(self, reason: str) -> TrainingFailed:
        checkpoints = whole_checkpoints(self.directory.checkpoints_path, self.console.warn)
        return training_failed(reason, self.directory.path, checkpoints)

    def _close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.session.close()

    # -- setup ------------------------------------------------------------------------------------

    def _make_learner(self) -> Learner:
        learner = Learner(self.session.policy, self.config, self.console.warn)
        if self.session.backend.low_precision is not None:
            learner.observe_attention = self.session.backend.low_precision.attention_observer
        return learner

    def _make_online(self) -> OnlineDrafter | None:
        speculation = self.session.backend.speculation
        head = speculation.trainable_head if speculation is not None else None
        return make_online(self.session.policy, head, self.config, self.console.warn)

    def _restore(self, run: RunDirectory | None) -> TrainingState:
        """Loads the newest checkpoint into every part and returns its state, or the initial state."""
        state = TrainingState(step=0, optimiser_steps=0, task_position=0, best_accuracy=-1.0)
        if run is None:
            return state
        checkpoint = newest_checkpoint(run.checkpoints_path, self.console.warn)
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, self.session.policy, self.learner.optimiser)
            drafters = load_drafters(checkpoint)
            backend = self.session.backend
            if backend.speculation is not None:
                backend.speculation.load_drafter_state(drafters)
            if backend.low_precision is not None:
                backend.low_precision.load_calibration_state(load_calibration(checkpoint))
            if self.online is not None:
                self.online.load_state(drafters)
        run.cut_back(state.step if checkpoint is not None else -1)  # without one, everything is made again
        self.console.resumed(run.path, state.step)
        return state

    def _load_pacing(self, run: RunDirectory) -> None:
        speculation = self.session.backend.speculation
        if speculation is not None:
            machine = self.session.machine(self.sentinel.precision)
            load_pacing(run.pacing_path, speculation.pacer, machine, self.console.warn)


def _rollout_source(
    session: Session, order: ProblemOrder, replay: Path | None, console: Console
) -> RolloutSource:
    if replay is not None:
        return SavedRollouts(replay)
    rollout = session.config.rollout
    live = LiveRollouts(
        session.sampler,
        order,
        rollout.prompts_per_step,
        rollout.samples_per_prompt,
        session.train_sampling(),
    )
    rounds = session.config.learning.dynamic_sampling_rounds
    return DynamicSampling(live, rollout.prompts_per_step, rounds, console.warn) if rounds else live


def _reopen(run: RunDirectory, config: Config) -> RunDirectory:
    changed = changed_keys(run.config(), config)
    refused = {key: values for key, values in changed.items() if key not in RESUME_MAY_CHANGE}
    if refused:
        listing = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"{run.path} cannot resume with changed keys ({listing}). "
            f"Allowed to change: {', '.join(RESUME_MAY_CHANGE)}"
        )
    run.write_config(config)
    return run


@contextmanager
def _interruptible(console: Console) -> Iterator[list[bool]]:
    """Lets the step finish and be saved at the first Ctrl-C; a second one ends the run on the spot."""
    interrupted: list[bool] = []

    def on_interrupt(signal_number: int, frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)
        console.warn("interrupted: finishing this step and saving it (Ctrl-C again to stop at once)")

    try:
        previous = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield interrupted
        return
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
