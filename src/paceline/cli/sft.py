"""`paceline sft`: supervised fine-tuning from the command line, with the exit codes of `train`."""

import shlex
from pathlib import Path

import typer

from paceline.cli.train import say_ended_at_once
from paceline.report.run_directory import RunDirectory
from paceline.runs.interruption import EXIT_FAILED, EXIT_INTERRUPTED, Interrupted, Interruption


def run_sft_command(recipe: str, overrides: list[str], resume: Path | None, quiet: bool = False) -> None:
    """Fine-tunes; raises SystemExit with the exit code where the run does not finish."""
    with Interruption() as interruption:  # before torch is imported, which takes seconds
        try:
            _fine_tune(recipe, overrides, resume, quiet, interruption)
        except Interrupted as signal:
            say_ended_at_once(signal, resume)
            raise SystemExit(signal.exit_code) from None


def _fine_tune(
    recipe: str, overrides: list[str], resume: Path | None, quiet: bool, interruption: Interruption
) -> None:
    from paceline.cluster.ranks import LearnersLost
    from paceline.learning.sentinel import TrainingFailed
    from paceline.report.supervised import SupervisedConsole
    from paceline.runs.disk import resume_command
    from paceline.runs.lock import LockLost
    from paceline.sft.run import fine_tune, refuse_other_run
    from paceline.sft.setup import load_supervised, refuse_ignored

    if resume is None:
        config = load_supervised(recipe, overrides)
    else:
        refuse_ignored(overrides)
        refuse_other_run(resume)
        config = RunDirectory.open(resume).config(overrides)
    try:
        result = fine_tune(config, recipe, resume, SupervisedConsole(quiet), interruption)
    except (TrainingFailed, LockLost, LearnersLost) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise SystemExit(EXIT_FAILED) from None
    if not result.finished:
        typer.echo(f"continue with: {resume_command(result.run)}")
        raise SystemExit(EXIT_INTERRUPTED)
    if result.seconds:
        typer.echo(
            f"{result.tokens:,} tokens in {result.seconds:.1f} s of updates "
            f"({result.tokens / result.seconds:,.0f} tokens/s)"
        )
    typer.echo(f"policy: {result.policy}\nRL from it: policy.path={shlex.quote(str(result.policy))}")
