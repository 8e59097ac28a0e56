"""`paceline train`: a run from the command line, with its messages and exit code however it ends.

Exit codes (docs/runs.md): 0 finished, 1 failed, 2 refused, 75 interrupted and ready to resume, 128 + n ended
at once by a second signal n.
"""

from pathlib import Path

import typer

from paceline.config import Config, load_config
from paceline.report.run_directory import RunDirectory
from paceline.runs.interruption import EXIT_FAILED, EXIT_INTERRUPTED, Interrupted, Interruption


def run_train_command(
    recipe: str,
    overrides: list[str],
    resume: Path | None,
    replay: Path | None,
    schedule: Path | None = None,
    quiet: bool = False,
    profile_step: int = 0,
) -> None:
    """Trains; raises SystemExit with the exit code where the run does not finish.

    `profile_step` names a step that torch's profiler watches; 0: none.
    """
    # Before torch is imported, which takes seconds.
    with Interruption() as interruption:
        try:
            config = _config(recipe, overrides, resume)
            _train(config, recipe, resume, replay, schedule, quiet, profile_step, interruption)
        except Interrupted as signal:
            say_ended_at_once(signal, resume)
            raise SystemExit(signal.exit_code) from None


def _config(recipe: str, overrides: list[str], resume: Path | None) -> Config:
    return load_config(recipe, overrides) if resume is None else RunDirectory.open(resume).config(overrides)


def _train(
    config: Config,
    recipe: str,
    resume: Path | None,
    replay: Path | None,
    schedule: Path | None,
    quiet: bool,
    profile_step: int,
    interruption: Interruption,
) -> None:
    from paceline.cluster.ranks import LearnersLost
    from paceline.learning.sentinel import TrainingFailed
    from paceline.loop import train
    from paceline.report.console import Console
    from paceline.rollout.schedule import ScheduleMismatch
    from paceline.runs.disk import resume_command
    from paceline.runs.lock import LockLost
    from paceline.worker.process import WorkerFailed

    console = Console(quiet)
    try:
        result = train(config, recipe, resume, replay, console, interruption, profile_step, schedule)
    except (TrainingFailed, LockLost, WorkerFailed, LearnersLost, ScheduleMismatch) as error:
        _say(f"error: {error}")
        raise SystemExit(EXIT_FAILED) from None
    console.summary(result.summary)
    if not result.finished:
        command = resume_command(result.summary.run)
        console.out.print(f"continue with: {command}", markup=False, soft_wrap=True)
        raise SystemExit(EXIT_INTERRUPTED)


def say_ended_at_once(signal: Interrupted, resume: Path | None) -> None:
    if signal.again:
        _say(f"{signal} again: stopped at once; --resume makes again what is newer than the last checkpoint")
        return
    what = f"{resume} is as it was" if resume is not None else "nothing has begun"
    _say(f"{signal}: stopped before the first step; {what}")


def _say(text: str) -> None:
    typer.secho(text, fg="red", err=True)
