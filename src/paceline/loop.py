"""The RL loop, top to bottom: roll out, learn, hand the new weights over; evaluate and save when it is time.

    tasks ──prompts──▶ backend ──completions──▶ rewards ──▶ learner ──weights──▶ backend

Generation, scoring and learning are separate parts; this file only sets the order in which they run.
`Sentinel.supervise` wraps rollout and update: where low-precision rollouts cannot be trusted it falls back
and reruns the step. A killed run continues from its newest checkpoint and computes what it would have
computed; `runs/` keeps a second process out and handles signals.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from paceline.backend import WeightsNotFinite
from paceline.certify.closing_check import check_speculation
from paceline.cluster.ranks import LearnersLost
from paceline.config import Config, learning_notes, rollout_notes, signal_notes
from paceline.drafting.recipe import check_teaching
from paceline.drafting.run_drafter import Drafts, RunDrafter
from paceline.learning.algorithms.dapo import punish_overlong
from paceline.learning.checkpoint import (
    ADMISSION_PREFIX,
    TrainingState,
    load_under_way,
    replace_best,
    whole_checkpoints,
)
from paceline.learning.mismatch import MismatchCheck
from paceline.learning.sentinel import Sentinel, TrainingFailed, training_failed
from paceline.pacing.store import save_pacing, save_times
from paceline.report.clock import StageClock
from paceline.report.console import Console
from paceline.report.html_report import renew_report
from paceline.report.metrics import rollout_metrics
from paceline.report.profiler import StepProfiler
from paceline.report.run_directory import Origin, recipe_text
from paceline.report.summary import Summary, summarise_run
from paceline.rollout.evaluation import evaluate
from paceline.rollout.sampler import SamplingStopped
from paceline.rollout.sources import SavedRollouts
from paceline.run_setup import make_run_drafter, restore_pacer, restore_parts
from paceline.runs.disk import resume_command
from paceline.runs.interruption import Interrupted, Interruption
from paceline.runs.records import RunRecords
from paceline.session import open_session
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
    interruption: Interruption | None = None,
    profile_step: int = 0,
    schedule: Path | None = None,
) -> Result:
    """Trains a policy; `resume` continues a run directory, `replay` learns from saved rollouts.

    `interruption` handles signals already; without one, they are handled once the run is set up.
    `profile_step` is the step that torch's profiler records; 0: none. `schedule` repeats the groups that the
    steps of an earlier run learned from.
    """
    console = console or Console(quiet=True)
    restarts_left = config.cluster.restarts
    step = 0
    while True:
        try:
            trainer = Trainer(config, recipe, resume, replay, console, schedule)
            trainer.profiler = StepProfiler(profile_step, trainer.directory.profile_path, console.warn)
            resume = trainer.directory.path
            restarts_left = config.cluster.restarts if trainer.step_number > step else restarts_left
            step = trainer.step_number
            return _run(trainer, console, interruption)
        except LearnersLost as problem:
            if not restarts_left:
                raise
            restarts_left -= 1
            console.warn(f"{problem}; all ranks start again from the last checkpoint")


def _run(trainer: "Trainer", console: Console, interruption: Interruption | None) -> Result:
    with console.watching(trainer.session.sampler, trainer.clock):
        if interruption is not None:
            return trainer.run(interruption)
        with Interruption() as interruption:
            return trainer.run(interruption)


class Trainer:
    """One training run: its parts, and the steps that use them."""

    def __init__(
        self,
        config: Config,
        recipe: str,
        resume: Path | None,
        replay: Path | None,
        console: Console,
        schedule: Path | None = None,
    ) -> None:
        self.config = config
        self.console = console
        self.live = replay is None
        origin = Origin.of(replay, schedule)
        with ExitStack() as opened:
            resumed = None
            if resume is not None:
                resumed = RunRecords.reopen(resume, config, console.warn, origin)
                opened.callback(resumed.close)
            taught = resumed is not None and resumed.checkpoint is not None
            check_teaching(config, taught, console.warn)
            self.session = open_session(config, learns=True, schedule=schedule)
            opened.callback(self.session.close)
            saved = None if replay is None else self.session.saved_rollouts(replay)
            state = self._set_up(resumed, saved)
            if resumed is None:  # now that every part is there
                resumed = RunRecords.create(config, recipe, console.warn, origin)
                opened.callback(resumed.close)
            self.records = resumed
            self._opened = opened.pop_all()
        self.directory = self.records.directory
        if self.drafter is not None:
            self.drafter.begin(self.directory.path)
        self.session.task.scoring.log_output(self.directory.rewards_log_path)
        self.step_number = state.step
        self.saved_step = state.step
        self.best_reward = state.best_reward
        self.eval_due = state.eval_due or state.step == 0
        self.save_due = False
        self.profiler = StepProfiler()

    def _set_up(self, resumed: RunRecords | None, saved: SavedRollouts | None) -> TrainingState:
        """Makes the parts and restores them from the resumed run's checkpoint; returns its training state."""
        config = self.config
        console = self.console
        console.plan(self.session.plan)
        for note in (
            *learning_notes(config.learning),
            *rollout_notes(config.rollout),
            *signal_notes(config.rollout, config.learning),
        ):
            console.warn(note)
        self.clock = StageClock(self.session.device)
        self.learner = self.session.learning_home(console.warn)
        self.drafter = make_run_drafter(config, self.session, self.learner, console, self.live)
        state = restore_parts(resumed, self.session, self.learner, self.drafter, console)
        self.sentinel = Sentinel(
            config.rollout.sentinel,
            self.session.backend,
            state,
            live=self.live,
            warn=console.warn,
            stop_rounding=self.learner.stop_rounding,
        )
        self.order = ProblemOrder(self.session.task.train, config.run.seed, state.task_position)
        self.source = saved or self.session.rollout_source(self.order, console.warn)
        if resumed is not None and resumed.checkpoint is not None:
            self.source.restore(load_under_way(resumed.checkpoint))
        paced = resumed.directory if resumed is not None and state.step else None
        restore_pacer(self.session, self.sentinel.precision, paced, console)
        return state

    # -- the run ----------------------------------------------------------------------------------

    def run(self, interruption: Interruption) -> Result:
        with self._opened:
            with interruption.deferred():
                self.console.start_of_run(
                    self.config.policy.path,
                    f"{self.config.task.name} by {self.config.learning.algorithm}, "
                    f"lr {self.config.learning.lr:g}",
                    f"{self.session.device_name}, {self.session.policy.dtype}",
                    self.directory.path,
                )
                self._hand_over_weights()
                finished = self._make_steps(interruption)
            if finished and self.live:
                self._compare_with_plain_decoding(interruption)
        return Result(finished, summarise_run(self.directory))

    def _make_steps(self, interruption: Interruption) -> bool:
        """Runs, evaluates and saves the remaining steps; returns whether all of them finished."""
        last_step = self.config.run.steps
        if self.eval_due and not interruption:
            self.evaluate(interruption)
            # The current checkpoint does not know of this evaluation.
            self.save_due = self.step_number > 0 and not self.eval_due
        self._save_if_due(interruption)
        self.console.start(last_step)
        while self.step_number < last_step and not interruption:
            self.step_number += 1
            with self.profiler.watching(self.step_number):
                self.step()
            self.eval_due = self._eval_is_due()
            if self.eval_due and not interruption:
                self.evaluate(interruption)
            self._save_if_due(interruption)
        self._save_if_due(interruption)  # the signal may have come after the last check
        return self.step_number >= last_step and not self.eval_due

    def run_steps(self) -> None:
        """Runs the steps alone, for benchmarks: no evaluation, checkpoint or closing check."""
        with self._opened:
            self._hand_over_weights()
            self.console.start(self.config.run.steps)
            while self.step_number < self.config.run.steps:
                self.step_number += 1
                self.step()

    def step(self) -> None:
        step = self.step_number
        start = time.perf_counter()
        groups, metrics = self.sentinel.supervise(step, self._roll_out, self._learn, self.source.rewinder())
        stats = self.source.take_stats()
        if self.drafter is not None:
            metrics |= self._train_drafter(self.drafter, stats.drafts, time.perf_counter() - start)
            metrics["drafter/drafting_version"] = float(stats.drafter_version or 0)
        with self.clock("sync"):
            self._hand_over_weights()
        whole_seconds = time.perf_counter() - start
        metrics |= rollout_metrics(groups, stats) | self.source.metrics | self.clock.take_metrics()
        metrics["rollout/epoch"] = float(self.order.epoch)
        metrics["time/step"] = whole_seconds
        metrics["time/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/rollout"]
        if self.source.schedule:
            self.records.schedule(self.source.schedule)
        self.records.step(step, metrics, stats, self.clock.take_spans(), groups, self.session.tokenizer)
        self.console.step(step, metrics)
        if self.sentinel.stop_reason:
            raise self._failure(self.sentinel.stop_reason)

    def evaluate(self, interruption: Interruption) -> None:
        """Evaluates the policy on held-out problems, and saves it if it is the best so far.

        An interruption ends it without effect, and `eval_due` stays set for the resumed run.
        """
        backend = self.session.backend
        self.source.suspend()
        try:
            with self.clock("evaluate"), interruption.pausing(backend.pause), self._evaluation_precision():
                evaluation = evaluate(
                    self.session.sampler, self.session.task.held_out, self.config.eval, interruption.__bool__
                )
        except SamplingStopped:
            self.clock.take_metrics()
            return
        finally:
            backend.resume()
        self.records.metrics("eval", self.step_number, evaluation.metrics() | self.clock.take_metrics())
        self.clock.take_spans()  # they belong to no step
        self.console.evaluated(self.step_number, evaluation)
        reward = evaluation.reward.value
        if self.best_reward is None or reward >= self.best_reward:  # of equals the later
            self.best_reward = reward
            with self.records.writing("the best policy", self.directory.checkpoints_path / "best"):
                replace_best(self.directory.checkpoints_path, self.learner.save_policy)
        self.eval_due = False

    @contextmanager
    def _evaluation_precision(self) -> Iterator[None]:
        low = self.session.backend.low_precision
        if low is None or self.config.eval.precision == "rollout":
            yield
            return
        with self.learner.as_learned(), low.in_base_precision():
            yield

    def save(self) -> None:
        """Writes a checkpoint from which a resumed run computes what this one would have."""
        harmed = self.learner.not_finite()
        if harmed:  # such a checkpoint would replace a sound one
            raise self._failure(
                f"after step {self.step_number} {len(harmed)} parameters are not finite, first {harmed[0]}"
            )
        backend = self.session.backend
        under_way = self.source.state()  # first: drafters observe the requests it takes off the backend
        drafters = backend.speculation.drafter_state() if backend.speculation else {}
        admission = backend.admission_state()
        drafters |= {f"{ADMISSION_PREFIX}{name}": tensor for name, tensor in admission.items()}
        calibration = backend.low_precision.calibration_state() if backend.low_precision else {}
        if self.drafter is not None:
            drafters |= self.drafter.online.state()
        size = self.learner.num_bytes(drafters, calibration)
        folder = self.directory.checkpoints_path
        with self.records.writing(f"the checkpoint of step {self.step_number}", folder, size):
            self.learner.save(
                folder,
                self._state(),
                self.config.checkpoint.keep,
                drafters,
                calibration,
                recipe_text(self.config),
                under_way,
            )
            if backend.speculation is not None:
                machine = self.session.machine(self.sentinel.precision)
                save_pacing(self.directory.pacing_path, backend.speculation.pacer, machine)
                save_times(backend.speculation.pacer, machine)
            if self.drafter is not None:
                self.drafter.save_head()
        self.saved_step = self.step_number
        self.save_due = False
        renew_report(self.directory, self.console.warn)

    def _state(self) -> TrainingState:
        return TrainingState(
            step=self.step_number,
            optimiser_steps=self.learner.optimiser_steps,
            task_position=self.order.position,
            best_reward=self.best_reward,
            fallback=self.sentinel.fallback,
            capped_steps=self.sentinel.capped_steps,
            eval_due=self.eval_due,
        )

    # -- the parts of a step ----------------------------------------------------------------------

    def _roll_out(self) -> list[Group]:
        self.session.wake()  # an update may have failed
        idle_time = nullcontext() if self.drafter is None else self.drafter.online.while_generating()
        with self.clock("rollout"), idle_time:
            groups = self.source.collect(self.step_number)
            return punish_overlong(
                groups, self.config.rollout.max_tokens, self.config.learning.overlong_share
            )

    def _learn(self, groups: list[Group], inspect: MismatchCheck) -> dict[str, float]:
        follows = False
        if self.drafter is not None:
            self.drafter.online.expect(groups)
            # The sentinel may need another cache after the update.
            follows = self.drafter.online.needs_memory and not self.sentinel.armed
        with self.clock("learn"), self.session.learning(stays=follows):
            return self.learner.update(groups, inspect)

    def _train_drafter(
        self, drafter: RunDrafter, drafts: Mapping[str, Drafts], step_seconds: float
    ) -> dict[str, float]:
        with self.clock("drafter"), self.session.learning(needs_memory=drafter.online.needs_memory):
            return drafter.follow(self.step_number, drafts, step_seconds)

    def _hand_over_weights(self) -> None:
        try:
            self.session.backend.update_weights(version=self.step_number)
        except WeightsNotFinite as problem:
            raise self._failure(f"after step {self.step_number} {problem}") from None

    def _eval_is_due(self) -> bool:
        every = self.config.eval.every
        return self.step_number == self.config.run.steps or bool(every and self.step_number % every == 0)

    def _save_if_due(self, interruption: Interruption) -> None:
        if self.step_number > self.saved_step:
            is_last = self.step_number == self.config.run.steps
            is_regular = self.step_number % self.config.checkpoint.every == 0
            self.save_due = self.save_due or is_last or is_regular or bool(interruption)
        # After a failed step the weights may be what failed; the next step that learns is saved instead.
        if self.save_due and not self.sentinel.failed_steps:
            self.save()

    def _compare_with_plain_decoding(self, interruption: Interruption) -> None:
        """Runs the closing check; a signal skips it, since the run itself is saved."""
        try:
            with interruption.at_once():
                if not interruption:
                    self._closing_check()
        except Interrupted:
            self.console.warn("interrupted: the closing check of speculation is left out")

    def _closing_check(self) -> None:
        """Runs the next step's rollout several times with and without speculation, and compares them."""
        self.source.suspend()
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
            with self.records.writing("the closing check", self.directory.closing_path):
                self.directory.write_closing(check.record())
            self.console.speculation(check)
            renew_report(self.directory, self.console.warn)

    def _failure(self, reason: str) -> TrainingFailed:
        checkpoints = whole_checkpoints(self.directory.checkpoints_path, self.console.warn)
        return training_failed(reason, resume_command(self.directory.path), checkpoints)
