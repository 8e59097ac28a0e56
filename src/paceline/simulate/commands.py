"""The `paceline simulate` commands. Heavy imports stay inside them."""

from pathlib import Path
from typing import Annotated, Optional

import typer
from typer.core import TyperGroup


class SweepGroup(TyperGroup):
    """Lets `--sweep k=0,3 gpus=64,512` take several words: what follows and has the form KEY=VALUES belongs to it."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        words, sweeping = [], False
        for word in args:
            if sweeping and "=" in word and not word.startswith("-"):
                words += ["--sweep", word] if words[-1] != "--sweep" else [word]
                continue
            sweeping = word == "--sweep"
            words.append(word)
        return super().parse_args(ctx, words)


app = typer.Typer(cls=SweepGroup, invoke_without_command=True, help="What would it give me? Simulated rollouts and RL steps.")

JsonOption = Annotated[Optional[Path], typer.Option("--json", help="also write the figures here")]
HtmlOption = Annotated[Optional[Path], typer.Option("--html", help="also write a page with plots here")]


@app.callback()
def simulate_command(
    ctx: typer.Context,
    recipe: Annotated[Optional[str], typer.Option(help="take model, batch and speculation from a recipe; other flags override")] = None,
    model: Annotated[Optional[str], typer.Option(help="a built-in shape such as qwen3-8b, a Hugging Face folder or a config.json")] = None,
    hardware: Annotated[Optional[str], typer.Option(help="h200, h100, a100, b200, gb200, or a profile written by `calibrate`")] = None,
    gpus: Annotated[Optional[int], typer.Option(help="devices in all")] = None,
    tp: Annotated[Optional[int], typer.Option(help="tensor parallelism")] = None,
    ep: Annotated[Optional[int], typer.Option(help="expert parallelism")] = None,
    weights: Annotated[Optional[str], typer.Option(help="bf16 or fp8")] = None,
    kv: Annotated[Optional[str], typer.Option(help="bf16 or fp8")] = None,
    engine: Annotated[Optional[str], typer.Option(help="paceline or vllm")] = None,
    prompts: Annotated[Optional[int], typer.Option(help="per RL step")] = None,
    samples: Annotated[Optional[int], typer.Option(help="per prompt")] = None,
    prompt_tokens: Optional[int] = None,
    lengths: Annotated[Optional[str], typer.Option(help="fixed:N or lognormal:MEAN,SIGMA,MIN,MAX")] = None,
    k: Annotated[Optional[str], typer.Option("--k", "-k", help="draft tokens: a number, paced, or paced:MAX")] = None,
    accept: Annotated[Optional[str], typer.Option(help="0.8, 0.85,0.8,0.7 by depth, or 3.0@3: accept length at k")] = None,
    drafter: Annotated[Optional[str], typer.Option(help="eagle or history")] = None,
    spec_max_running: Annotated[Optional[int], typer.Option(help="speculate only while at most this many run; 0: always")] = None,
    mode: Annotated[Optional[str], typer.Option(help="sync, one-step-off or async")] = None,
    lag: Annotated[Optional[int], typer.Option(help="weight versions a response may be old; default: the mode's own")] = None,
    train_share: Annotated[Optional[float], typer.Option(help="of the devices, where learning runs apart")] = None,
    max_running: Annotated[Optional[int], typer.Option(help="requests decoded together, per replica")] = None,
    kv_tokens: Annotated[Optional[int], typer.Option(help="cache of a replica; 0: what fits")] = None,
    reward_seconds: Optional[float] = None,
    train_drafter: Annotated[Optional[bool], typer.Option("--train-drafter", help="does training the drafter fit into idle time?")] = None,
    steps: Annotated[Optional[int], typer.Option(help="RL steps to simulate")] = None,
    seed: Optional[int] = None,
    sweep: Annotated[Optional[list[str]], typer.Option(help="KEY=VALUE,VALUE ..., any number of keys")] = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Simulates RL steps from a recipe or flags; see also the commands below."""
    if ctx.invoked_subcommand is not None:
        return
    import dataclasses

    from paceline.config import load_config
    from paceline.simulate.questions import Flags, flags_from_recipe

    flags = Flags() if recipe is None else flags_from_recipe(load_config(recipe))
    names = [field.name for field in dataclasses.fields(Flags)]
    given = {name: value for name, value in ctx.params.items() if name in names and value is not None}
    _answer(dataclasses.replace(flags, **given), sweep or [], json_file, html_file)


def _answer(flags, sweep: list[str], json_file: Path | None, html_file: Path | None) -> None:
    from paceline.simulate.questions import Sweep, ask, build
    from paceline.simulate.report import table, text, write_html, write_json

    asked = Sweep.parse(sweep)
    combinations = asked.combinations()
    answers = [ask(build(asked.apply(flags, values))) for values in combinations]
    typer.echo(text(answers[0]) if len(answers) == 1 else table(answers, combinations, asked.keys))
    if len(answers) > 1:
        from paceline.simulate.report import provenance_lines

        merged = {part: origin for answer in answers for part, origin in answer.outcome.provenance.items()}
        typer.echo("\n".join(["", "who says so:", *provenance_lines(merged)]))
    if json_file is not None:
        write_json(json_file, answers)
    if html_file is not None:
        write_html(html_file, answers, combinations, asked.keys)
