"""`paceline eval`: a policy on held-out problems, by the recipe of the run that trained it or another one."""

import time
from pathlib import Path

import typer

from paceline.cli.options import policy_overrides
from paceline.cli.progress import announce
from paceline.cli.saved_policy import saved_policy
from paceline.config import Config, load_config
from paceline.report.clock import StageClock
from paceline.report.console import Console
from paceline.report.run_directory import RunDirectory
from paceline.rollout.evaluation import Evaluation, evaluate
from paceline.session import open_session


def evaluate_policy(policy: str, overrides: list[str], recipe: str, quiet: bool) -> None:
    """Prints the evaluation; that of a run's policy by its own recipe also goes to the run's directory."""
    config, run, what = _what_to_evaluate(policy, overrides, recipe)
    session = open_session(config)  # a task may have fewer problems than are asked for
    wanted, held_out = config.eval.problems, len(session.task.held_out)
    problems = f"{min(wanted or held_out, held_out)} held-out problems x {config.eval.samples}"
    if wanted > held_out:
        problems += f" (eval.problems = {wanted}, and the task has {held_out})"
    of = "" if run is None else f" by the recipe of {run.path}"
    announce(f"evaluating {policy} on {config.task.name}{of}, {problems}", quiet)
    clock = StageClock(session.device)
    with Console(quiet).watching(session.sampler, clock), clock("evaluate"):
        result = evaluate(session.sampler, session.task.held_out, session.config.eval)
    session.close()
    _show(result)
    if run is not None:
        record = {"policy": what, "time": time.time(), "changed": overrides, **result.metrics()}
        run.append_evaluation(record)
        typer.echo(f"recorded in {run.evaluations_path}")


def _what_to_evaluate(
    policy: str, overrides: list[str], recipe: str
) -> tuple[Config, RunDirectory | None, str]:
    """Returns the recipe, the run whose own that is, and what the policy is called within it."""
    path = Path(policy)
    if not path.is_dir():  # a shipped policy, or one that opening refuses by name
        return load_config(recipe or "default", policy_overrides(policy, overrides)), None, policy
    saved = saved_policy(path)
    given = policy_overrides(str(saved.folder), overrides)
    if recipe or saved.run is None:
        return load_config(recipe or "default", given), None, policy
    return (
        saved.run.config(given),
        saved.run,
        str(saved.folder.absolute().relative_to(saved.run.path.absolute())),
    )


def _show(result: Evaluation) -> None:
    typer.echo(f"avg@{result.samples}: {result.accuracy} ({result.problems} problems)")
    reward = result.reward
    typer.echo(f"reward: {reward.value:.4f} [{reward.low:.4f}, {reward.high:.4f}]")
    for k, estimate in result.pass_at.items():
        typer.echo(f"pass@{k}: {estimate}")
    typer.echo(f"mean length {result.mean_length:.1f}, truncated {100 * result.truncated:.1f}%")
