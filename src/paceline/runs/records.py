"""A run directory that this process holds: every write of a run goes through here.

Each write first checks the lock (`RunLock.check`), and ends the run with the way out where the disk is full.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.config import Config, ConfigError
from paceline.learning.checkpoint import newest_checkpoint, tidy
from paceline.pacing.trace import append_trace
from paceline.report.clock import StageSpan
from paceline.report.run_directory import Origin, RunDirectory
from paceline.report.step_trace import write_step_trace
from paceline.report.writers import Writer, make_writers
from paceline.rollout.samples import write_groups
from paceline.rollout.schedule import append_schedule, cut_schedule
from paceline.runs.disk import resume_command, writing
from paceline.runs.inputs import check_inputs, write_inputs
from paceline.runs.lock import RunLock
from paceline.runs.recipe import check_recipe
from paceline.stats import RolloutStats
from paceline.types import Group


class RunRecords:
    """The records of one run: metrics, traces, samples; `checkpoint` is the one to resume from."""

    def __init__(self, directory: RunDirectory, config: Config, warn: Callable[[str], None]) -> None:
        """Takes the directory's lock; raises `RunIsHeld` where another process has it."""
        self.directory = directory
        self.config = config
        self.lock = RunLock(directory.path, warn)
        self.checkpoint: Path | None = None
        self.writers: list[Writer] = []

    @classmethod
    def create(
        cls, config: Config, recipe: str, warn: Callable[[str], None], origin: Origin | None = None
    ) -> "RunRecords":
        """Makes the folder of a new run; `origin` is its replay or schedule."""
        records = cls(RunDirectory.create(config, recipe, origin), config, warn)
        with records.writing("the digests of its inputs", records.directory.inputs_path):
            write_inputs(records.directory, config)
        records.writers = make_writers(config, records.directory.path)
        return records

    @classmethod
    def reopen(
        cls, path: Path, config: Config, warn: Callable[[str], None], origin: Origin | None = None
    ) -> "RunRecords":
        """Opens an earlier run to continue it; raises ConfigError where it is not `config`'s, or no run.

        A run of saved samples or a schedule continues with them (`origin`), and no other run does.
        """
        _refuse_links(RunDirectory.open(path))
        _refuse_other_origin(RunDirectory.open(path), origin)
        records = cls(RunDirectory.open(path), config, warn)
        try:
            directory = records.directory
            tidy(directory.checkpoints_path)
            records.checkpoint = newest_checkpoint(directory.checkpoints_path, warn)
            check_recipe(directory, records.checkpoint, config)
            check_inputs(directory, config, warn)
            with records.writing("the recipe", directory.config_path):
                directory.write_config(config)
            records.writers = make_writers(config, directory.path)
        except BaseException:
            records.close()
            raise
        return records

    def cut_back(self, step: int, with_evaluation: bool) -> None:
        """Drops the records that a resumed run will write again: all after `step`, -1 for all."""
        with self.writing("the metrics of the steps that stay", self.directory.metrics_path):
            self.directory.cut_back(step, with_evaluation)
            cut_schedule(self.directory.schedule_path, step)

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        stats: RolloutStats,
        spans: Sequence[StageSpan],
        groups: Sequence[Group],
        tokenizer: Tokenizer,
    ) -> None:
        """Records a training step: pacing decisions, requests, metrics, and the first of its groups."""
        with self.writing("the trace", self.directory.trace_path):
            append_trace(self.directory.trace_path, step, stats.trace)
        with self.writing("the requests", self.directory.requests_path):
            write_step_trace(self.directory.requests_path, step, spans, stats, groups)
        self.metrics("train", step, metrics)
        samples = self.directory.samples_path / f"step_{step:06d}.jsonl"
        with self.writing("the samples", samples):
            write_groups(samples, groups[: self.config.report.samples_per_step], tokenizer)

    def schedule(self, line: dict[str, Any]) -> None:
        with self.writing("the schedule", self.directory.schedule_path):
            append_schedule(self.directory.schedule_path, line)

    def metrics(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Appends metrics to `metrics.jsonl` and hands them to the other writers."""
        with self.writing("the metrics", self.directory.metrics_path):
            self.directory.append_metrics({"step": step, "kind": kind, **metrics})
        for writer in self.writers:
            writer.write(step, metrics)

    def writing(self, what: str, where: Path, size: int = 0) -> AbstractContextManager[None]:
        """Returns a context in which to write `what`; `size`: the bytes needed, where they are many."""
        self.lock.check()
        return writing(self.directory.path, what, where, size)

    def close(self) -> None:
        try:
            for writer in self.writers:
                writer.close()
        finally:
            self.lock.release()


def _refuse_links(run: RunDirectory) -> None:
    """A link in a directory that someone else made could redirect a write to one of our files."""
    ours = (run.config_path, run.metrics_path, run.trace_path, run.pacing_path, run.rewards_log_path)
    others = (run.requests_path, run.schedule_path, run.closing_path, run.report_path, run.profile_path)
    for path in (*ours, *others, run.origin_path, run.inputs_path, run.evaluations_path, *run.drafter_paths):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link to {path.readlink()}; a run writes only to files of its own")


def _refuse_other_origin(run: RunDirectory, given: Origin | None) -> None:
    """A run that continued with other samples than it began with would be two runs in one folder."""
    begun = run.origin()
    if begun is not None and (given is None or given.option not in begun.option):
        raise ConfigError(
            f"{run.path} was begun with {begun.option}; continue with: {resume_command(run.path)}"
        )
    # Runs of earlier versions keep no record; their groups under way show whether there is a schedule.
    if begun is None and given is not None and given.option == "--replay":
        raise ConfigError(
            f"--replay {given.path}: {run.path} was not begun with saved samples and cannot continue with "
            "them; leave it out, or start another run"
        )
