"""`paceline eval`: a policy on held-out problems, by the recipe of the run that trained it or another one."""

import time
from contextlib import nullcontext

import typer

from paceline.cli.progress import announce
from paceline.cli.saved_policy import policy_recipe
from paceline.report.clock import StageClock
from paceline.report.console import Console
from paceline.rollout.evaluation import Evaluation, evaluate
from paceline.session import open_session


def evaluate_policy(policy: str, overrides: list[str], recipe: str, quiet: bool) -> None:
    """Prints the evaluation; that of a run's policy by its own recipe also goes to the run's directory."""
    config, run, what = policy_recipe(policy, overrides, recipe)
    session = open_session(config)  # a task may have fewer problems than are asked for
    wanted, held_out = config.eval.problems, len(session.task.held_out)
    problems = f"{min(wanted or held_out, held_out)} held-out problems x {config.eval.samples}"
    if wanted > held_out:
        problems += f" (eval.problems = {wanted}, and the task has {held_out})"
    of = "" if run is None else f" by the recipe of {run.path}"
    announce(f"evaluating {policy} on {config.task.name}{of}, {problems}", quiet)
    clock = StageClock(session.device)
    low = session.backend.low_precision
    in_base = low is not None and config.eval.precision == "base"
    precision = low.in_base_precision() if in_base else nullcontext()
    with Console(quiet).watching(session.sampler, clock), clock("evaluate"), precision:
        result = evaluate(session.sampler, session.task.held_out, session.config.eval)
    session.close()
    _show(result)
    if run is not None:
        record = {"policy": what, "time": time.time(), "changed": overrides, **result.metrics()}
        run.append_evaluation(record)
        typer.echo(f"recorded in {run.evaluations_path}")


def _show(result: Evaluation) -> None:
    typer.echo(f"avg@{result.samples}: {result.accuracy} ({result.problems} problems)")
    reward = result.reward
    typer.echo(f"reward: {reward.value:.4f} [{reward.low:.4f}, {reward.high:.4f}]")
    for k, estimate in result.pass_at.items():
        typer.echo(f"pass@{k}: {estimate}")
    typer.echo(f"mean length {result.mean_length:.1f}, truncated {100 * result.truncated:.1f}%")
