"""The loop of supervised fine-tuning: examples in, an optimiser step; held-out loss and checkpoint at times.

    examples ──▶ order of the epoch ──▶ batch ──▶ learner (packs, passes, steps)

The order is a function of seed and epoch, so a killed run continues from its newest checkpoint as if nothing
had been. `checkpoints/best` is the policy with the lowest held-out loss, without held-out examples the last.
"""

import math
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.ranks import LearnersLost
from paceline.config import Config, ConfigError
from paceline.device import learning_threads
from paceline.learning.batch import TrainingSequence
from paceline.learning.checkpoint import Beside, TrainingState, replace_best, whole_checkpoints
from paceline.learning.sentinel import TrainingFailed, training_failed
from paceline.report.clock import StageClock
from paceline.report.html_report import renew_report
from paceline.report.run_directory import RunDirectory, recipe_text
from paceline.report.supervised import SupervisedConsole
from paceline.runs.disk import resume_command
from paceline.runs.interruption import Interruption
from paceline.runs.records import RunRecords
from paceline.sft.setup import Parts, open_parts

# Updates in a row that were not finite, after which a run ends.
MOST_FAILURES = 3


@dataclass(frozen=True)
class SupervisedResult:
    """How a run ended."""

    finished: bool  # False: interrupted, resumable
    run: Path
    loss: float  # of the last step
    held_out_loss: float | None  # of the last evaluation
    tokens: int  # learned from since it began or was resumed, prompts included
    seconds: float  # spent in updates

    @property
    def policy(self) -> Path:
        return self.run / "checkpoints" / "best"


def fine_tune(
    config: Config,
    recipe: str,
    resume: Path | None = None,
    console: SupervisedConsole | None = None,
    interruption: Interruption | None = None,
) -> SupervisedResult:
    """Learns from a recipe's examples; `resume` continues a run directory."""
    console = console or SupervisedConsole(quiet=True)
    restarts_left = config.cluster.restarts
    while True:
        with ExitStack() as stack:
            parts = stack.enter_context(open_parts(config, console.say, console.warn))
            run = SupervisedRun(parts, recipe, resume, console)
            stack.callback(run.records.close)
            resume = run.directory.path
            interrupting = interruption or stack.enter_context(Interruption())
            stack.enter_context(console.watching_losses())
            try:
                with interrupting.deferred():
                    return run.run(interrupting)
            except LearnersLost as problem:
                if not restarts_left:
                    raise
                restarts_left -= 1
                console.warn(f"{problem}; all ranks start again from the last checkpoint")


class SupervisedRun:
    """One run: its parts, its records and its counters."""

    def __init__(self, parts: Parts, recipe: str, resume: Path | None, console: SupervisedConsole) -> None:
        self.parts = parts
        self.config = parts.config
        self.console = console
        self.clock = StageClock(parts.device)
        self.best: float | None = None
        self.saved_step = self.step = 0
        if resume is None:
            self.records = RunRecords.create(self.config, recipe, console.warn)
        else:
            self.records = RunRecords.reopen(resume, self.config, console.warn)
            try:
                self._restore()
            except BaseException:
                self.records.close()
                raise
        self.directory = self.records.directory
        self.steps_per_epoch = -(-len(parts.train.sequences) // self.config.sft.batch_size)
        self.every = self.config.sft.every or self.steps_per_epoch
        self.failures = self.tokens = 0
        self.seconds = 0.0
        self.loss = math.nan
        self.held_out_loss: float | None = None
        self._order: tuple[int, list[int]] = (-1, [])  # an epoch and the order of its examples

    def _restore(self) -> None:
        if self.records.checkpoint is not None:
            state = self.parts.home.load(self.records.checkpoint)
            self.saved_step = self.step = state.step
            self.best = state.best_reward
        self.records.cut_back(self.step if self.step else -1, with_evaluation=True)
        self.console.resumed(self.records.directory.path, self.step)

    def run(self, interruption: Interruption) -> SupervisedResult:
        last = self.config.run.steps
        self.console.start_of_tuning(self.config, self.parts.device, self.directory.path)
        if self.step == 0:
            self.evaluate()
        while self.step < last and not interruption:
            self.step += 1
            self.make_step()
            if self.step % self.every == 0 or self.step == last:
                self.evaluate()
                self.save()
        if self.step > self.saved_step:
            self.save()
        finished = self.step >= last
        return SupervisedResult(
            finished, self.directory.path, self.loss, self.held_out_loss, self.tokens, self.seconds
        )

    def make_step(self) -> None:
        start = time.perf_counter()
        batch = self.batch(self.step)
        with self.clock("learn"), learning_threads(self.config):
            metrics = self.parts.home.imitate(batch)
        seconds = time.perf_counter() - start
        tokens = sum(len(sequence.tokens) for sequence in batch)
        self.tokens += tokens
        self.seconds += seconds
        self.loss = metrics["policy/loss"]
        metrics |= {
            "sft/loss": self.loss,
            "sft/tokens": float(tokens),
            "sft/learned_tokens": float(sum(sequence.loss_tokens for sequence in batch)),
            "sft/epoch": self.step / self.steps_per_epoch,
            "time/step": seconds,
            "time/tokens_per_second": tokens / seconds,
            **self.clock.take_metrics(),
        }
        self.clock.take_spans()
        self.records.metrics("train", self.step, metrics)
        self.console.step(self.step, metrics)
        self.failures = self.failures + 1 if metrics["policy/nonfinite_updates"] else 0
        if self.failures == MOST_FAILURES:
            raise self._failure(f"the last {MOST_FAILURES} updates, up to step {self.step}, were not finite")

    def batch(self, step: int) -> list[TrainingSequence]:
        """Returns the examples of a step, which is counted from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        sequences, size = self.parts.train.sequences, self.config.sft.batch_size
        if self._order[0] != epoch:
            order = list(range(len(sequences)))
            random.Random(f"{self.config.run.seed}/{epoch}").shuffle(order)
            self._order = epoch, order
        return [sequences[i] for i in self._order[1][place * size : (place + 1) * size]]

    def evaluate(self) -> None:
        """Measures the held-out loss, and keeps the policy if it is the best so far."""
        reward = float(self.step)  # without held-out examples the last is the best
        if self.parts.held_out.sequences:
            with self.clock("evaluate"), learning_threads(self.config):
                self.held_out_loss = self.parts.home.held_out_loss(self.parts.held_out.sequences)
            metrics = {"eval/loss": self.held_out_loss, **self.clock.take_metrics()}
            self.records.metrics("eval", self.step, metrics)
            self.clock.take_spans()
            self.console.held_out_loss(self.step, self.held_out_loss)
            reward = -self.held_out_loss
        if self.step and (self.best is None or reward >= self.best):
            self.best = reward
            folder = self.directory.checkpoints_path
            with self.records.writing("the best policy", folder / "best"):
                replace_best(folder, self.parts.home.save_policy)

    def save(self) -> None:
        if self.step == self.saved_step:
            return
        if harmed := self.parts.home.not_finite():
            raise self._failure(
                f"after step {self.step} {len(harmed)} parameters are not finite, first {harmed[0]}"
            )
        home = self.parts.home
        state = TrainingState(
            step=self.step,
            optimiser_steps=home.optimiser_steps,
            task_position=self.step * self.config.sft.batch_size,
            best_reward=self.best,
        )
        folder = self.directory.checkpoints_path
        with self.records.writing(f"the checkpoint of step {self.step}", folder, home.num_bytes()):
            beside = Beside(recipe=recipe_text(self.config))
            home.save(folder, state, self.config.checkpoint.keep, beside)
        self.saved_step = self.step
        renew_report(self.directory, self.console.warn)

    def _failure(self, reason: str) -> TrainingFailed:
        checkpoints = whole_checkpoints(self.directory.checkpoints_path, self.console.warn)
        return training_failed(reason, resume_command(self.directory.path), checkpoints)


def refuse_other_run(path: Path) -> None:
    """Raises where a run directory is one of RL."""
    algorithm = RunDirectory.open(path).config().learning.algorithm
    if algorithm != "sft":
        raise ConfigError(
            f"--resume {path}: that run learns by {algorithm}; continue it with: {resume_command(path)}"
        )
