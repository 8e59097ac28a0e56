"""`paceline simulate`: a question in, an answer out. Heavy imports stay inside the command."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from paceline.config import load_config


def simulate(
    question: Annotated[
        Optional[list[str]],
        typer.Argument(
            help="a YAML file of a question, and key=value, any number; a list as value asks once for each"
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="print the question, with what each key means, and stop")
    ] = False,
    recipe: Annotated[
        Optional[str], typer.Option(help="start from what a recipe says: model, batch, precision, ...")
    ] = None,
    from_run: Annotated[
        Optional[Path], typer.Option(help="start from a run directory: its lengths, times and acceptance")
    ] = None,
    ran_on: Annotated[
        Optional[str],
        typer.Option(help="with --from-run: what hardware made the run"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Foresees rollouts and RL steps on hardware that you name; --show prints what can be asked."""
    if from_run is not None and recipe is not None:
        raise ValueError(f"--recipe {recipe}: --from-run {from_run} has a recipe already; use one of the two")
    if (from_run is None) != (ran_on is None):
        given = f"--from-run {from_run}" if ran_on is None else f"--ran-on {ran_on}"
        raise ValueError(f"{given}: --from-run RUN needs --ran-on HARDWARE, such as h200, and the reverse")
    from paceline.simulate import from_run as runs
    from paceline.simulate import report
    from paceline.simulate.question import changed, questions, read_keys, recipe_keys
    from paceline.simulate.question import show as shown

    given_keys = read_keys(question or [])
    base = recipe_keys(load_config(recipe)) if recipe is not None else {}
    run = None
    if from_run is not None and ran_on is not None:
        run = runs.MeasuredRun.simulated(runs.read_run(from_run), ran_on)
        base = run.keys
    asked = questions(given_keys, base)
    if show:
        typer.echo(shown(changed(base, given_keys)))
        return
    answers = [
        report.ask(one.scenario()) if run is None else run.what_if(one, given_keys) for _, one in asked
    ]
    if as_json:
        typer.echo(report.as_json(answers))
        return
    if len(answers) > 1:
        figures = report.table(answers, [values for values, _ in asked])
    else:
        figures = report.text(answers[0]) if run is None else runs.text(run, answers[0])
    typer.echo("\n".join([figures, "", report.provenance_text(answers)]))
