"""The `paceline simulate` commands. Heavy imports stay inside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from paceline.simulate.questions import Flags

FIRST_SHARE = 0.7  # of the time that `measure` may take, for all models but the last


class SweepGroup(TyperGroup):
    """A group whose `--sweep k=0,3 gpus=64,512` takes every following word of the form KEY=VALUES."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts `--sweep` before each of the words that it takes."""
        words: list[str] = []
        sweeping = False
        for word in args:
            if sweeping and "=" in word and not word.startswith("-"):
                words += ["--sweep", word] if words[-1] != "--sweep" else [word]
                continue
            sweeping = word == "--sweep"
            words.append(word)
        return super().parse_args(ctx, words)


app = typer.Typer(
    cls=SweepGroup,
    invoke_without_command=True,
    help="What would it give me? Simulated rollouts and RL steps.",
)

Text = Optional[str]
Number = Optional[int]
ModelOption = Annotated[
    Text, typer.Option(help="a built-in shape such as qwen3-8b, a Hugging Face folder or a config.json")
]
HardwareOption = Annotated[
    Text, typer.Option(help="h200, h100, a100, b200, gb200, or a profile written by `calibrate`")
]
PrecisionOption = Annotated[Text, typer.Option(help="bf16 or fp8")]
LengthsOption = Annotated[Text, typer.Option(help="fixed:N or lognormal:MEAN,SIGMA,MIN,MAX")]
DraftTokensOption = Annotated[
    Text, typer.Option("--k", "-k", help="draft tokens: a number, paced, or paced:MAX")
]
AcceptOption = Annotated[Text, typer.Option(help="0.8, 0.85,0.8,0.7 by depth, or 3.0@3: accept length at k")]
DrafterOption = Annotated[Text, typer.Option(help="eagle, history, or a smaller model such as qwen3-0.6b")]
SpecMaxRunningOption = Annotated[
    Number, typer.Option(help="speculate only while at most this many run; 0: always")
]
ModeOption = Annotated[Text, typer.Option(help="sync, partial, oversample, one-step-off or async")]
LagOption = Annotated[
    Number, typer.Option(help="weight versions a response may be old; default: the mode's own")
]
TrainShareOption = Annotated[Optional[float], typer.Option(help="of the devices, where learning runs apart")]
TrainDrafterOption = Annotated[
    Optional[bool], typer.Option("--train-drafter", help="does training the drafter fit into idle time?")
]
SweepOption = Annotated[Optional[list[str]], typer.Option(help="KEY=VALUE,VALUE ..., any number of keys")]
RecipeOption = Annotated[
    Text,
    typer.Option(help="take model, batch, precision and speculation from a recipe; other flags override"),
]
JsonOption = Annotated[Optional[Path], typer.Option("--json", help="also write the figures here")]
HtmlOption = Annotated[Optional[Path], typer.Option("--html", help="also write a page with plots here")]


@app.callback()
def simulate_command(
    ctx: typer.Context,
    recipe: RecipeOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    gpus: Annotated[Number, typer.Option(help="devices in all")] = None,
    tp: Annotated[Number, typer.Option(help="tensor parallelism")] = None,
    ep: Annotated[Number, typer.Option(help="expert parallelism")] = None,
    weights: PrecisionOption = None,
    kv: PrecisionOption = None,
    engine: Annotated[Text, typer.Option(help="paceline or vllm")] = None,
    prompts: Annotated[Number, typer.Option(help="per RL step")] = None,
    samples: Annotated[Number, typer.Option(help="per prompt")] = None,
    prompt_tokens: Number = None,
    lengths: LengthsOption = None,
    k: DraftTokensOption = None,
    accept: AcceptOption = None,
    drafter: DrafterOption = None,
    spec_max_running: SpecMaxRunningOption = None,
    mode: ModeOption = None,
    lag: LagOption = None,
    train_share: TrainShareOption = None,
    max_running: Annotated[Number, typer.Option(help="requests decoded together, per replica")] = None,
    kv_tokens: Annotated[Number, typer.Option(help="cache of a replica; 0: what fits")] = None,
    reward_seconds: Optional[float] = None,
    train_drafter: TrainDrafterOption = None,
    steps: Annotated[Number, typer.Option(help="RL steps to simulate")] = None,
    seed: Number = None,
    sweep: SweepOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Simulates RL steps from a recipe or flags; see also the commands below."""
    if ctx.invoked_subcommand is not None:
        return
    from paceline.config import load_config
    from paceline.simulate.questions import Flags, flags_from_recipe

    flags = Flags() if recipe is None else flags_from_recipe(load_config(recipe))
    _answer(flags.changed(_given_flags(ctx)), sweep or [], json_file, html_file)


def _given_flags(ctx: typer.Context) -> dict[str, Any]:
    """Returns the options that were given and that describe a scenario."""
    import dataclasses

    from paceline.simulate.questions import Flags

    names = [field.name for field in dataclasses.fields(Flags)]
    return {name: ctx.params[name] for name in names if ctx.params.get(name) is not None}


def _answer(flags: "Flags", sweep: list[str], json_file: Path | None, html_file: Path | None) -> None:
    from paceline.simulate.questions import Sweep, ask, build
    from paceline.simulate.report import provenance_lines, table, text, write_html, write_json

    asked = Sweep.parse(sweep)
    combinations = asked.combinations()
    answers = [ask(build(asked.apply(flags, values))) for values in combinations]
    if len(answers) == 1:
        typer.echo(text(answers[0]))
    else:
        origins = {part: origin for answer in answers for part, origin in answer.outcome.provenance.items()}
        lines = [table(answers, combinations, asked.keys), "", "who says so:", *provenance_lines(origins)]
        typer.echo("\n".join(lines))
    if json_file is not None:
        write_json(json_file, answers)
    if html_file is not None:
        write_html(html_file, answers, combinations, asked.keys)


@app.command()
def validate(
    hardware: Annotated[str, typer.Option(help="the profile whose predictions are checked")] = "h200",
    points: Annotated[
        Optional[list[Path]],
        typer.Option(help="further measured points, beside those that are shipped; repeatable"),
    ] = None,
    write: Annotated[
        Optional[Path],
        typer.Option(help="folder for simulator.md and its plots; default: print a summary only"),
    ] = None,
) -> None:
    """Compares predictions with measurements, ours and published ones, and writes docs/simulator.md."""
    from paceline.simulate.hardware import load_hardware
    from paceline.simulate.validation import page
    from paceline.simulate.validation.check import predictions, summary
    from paceline.simulate.validation.h200 import shipped_measurements

    profile = load_hardware(hardware)
    measured = shipped_measurements(points or ())
    made = page.sections(profile, measured) if write is None else page.write(write, profile, measured)
    for section in made:
        unseen = predictions(section.checks)
        typer.echo(f"{section.title}: {summary(unseen) if unseen else 'fits only'}")


@app.command()
def scale(
    model: ModelOption = None,
    hardware: HardwareOption = None,
    tp: Annotated[Number, typer.Option(help="tensor parallelism")] = None,
    ep: Annotated[Number, typer.Option(help="expert parallelism")] = None,
    weights: PrecisionOption = None,
    prompts: Annotated[int, typer.Option(help="per RL step and GPU", min=1)] = 8,
    samples: Annotated[Number, typer.Option(help="per prompt")] = None,
    lengths: LengthsOption = None,
    mode: ModeOption = None,
    gpus: Annotated[str, typer.Option(help="numbers of GPUs")] = "8,32,128,512,2048",
) -> None:
    """Foresees transfer, queue and idle share of a run that grows with its GPUs."""
    from paceline.simulate.questions import Flags
    from paceline.simulate.scale import scale_table

    given: dict[str, Any] = {"model": model, "hardware": hardware, "weights": weights, "samples": samples}
    given |= {"lengths": lengths, "mode": mode, "tp": tp, "ep": ep}
    flags = Flags(**{name: value for name, value in given.items() if value is not None})
    try:
        counts = [int(count) for count in gpus.split(",")]
    except ValueError:
        raise ValueError(f"--gpus {gpus!r}: use numbers with commas between them, such as 8,32,128") from None
    typer.echo(scale_table(flags, prompts, counts))


@app.command()
def profiles() -> None:
    """Lists the shipped hardware profiles and who says what about them."""
    from paceline.simulate.hardware import load_hardware, shipped_profiles
    from paceline.simulate.report import provenance_lines

    for name in shipped_profiles():
        typer.echo("\n".join([name, *provenance_lines(load_hardware(name).provenance)]))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="the profile to write")] = Path("machine.json"),
    points: Annotated[
        Optional[list[Path]], typer.Option(help="fit these points instead of measuring; repeatable")
    ] = None,
    save_points: Annotated[Optional[Path], typer.Option(help="also write the measured points here")] = None,
    base: Annotated[
        Optional[str],
        typer.Option(
            help="profile for what kernels cannot tell (links, training); default: by the device's name"
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="what the profile calls itself; default: the file's name")] = "",
) -> None:
    """Measures this machine's kernels (a GPU takes about a minute) and writes a hardware profile."""
    from paceline.simulate.calibrate import fit_report, profile_from
    from paceline.simulate.hardware import write_hardware
    from paceline.simulate.points import load_measurements, merged, write_measurements

    if points:
        measured = merged([load_measurements(path) for path in points])
    else:
        import datetime

        from paceline.device import best_device
        from paceline.simulate.measure import measure_kernels
        from paceline.simulate.measure_grid import CPU, GPU

        device = best_device()
        grid = GPU if device.type == "cuda" else CPU
        measured = measure_kernels(device, grid, typer.echo, datetime.date.today().isoformat())
    if save_points is not None:
        write_measurements(measured, save_points)
    hardware = profile_from(name or out.stem, measured, base)
    write_hardware(hardware, out)
    for report in fit_report(hardware, measured):
        typer.echo(str(report))
    typer.echo(f"written to {out}; try: paceline simulate --hardware {out}")


@app.command()
def measure(
    out: Annotated[
        Path, typer.Argument(help="file of points to write; kernel points that it already holds are kept")
    ],
    models: Annotated[
        str, typer.Option(help="shapes with random weights, comma separated; the first gets most of the time")
    ] = "qwen3-8b,qwen3-1.7b",
    seconds: Annotated[float, typer.Option(help="stop after this long; what was left out is said")] = 110.0,
) -> None:
    """Times whole steps (decode, verify, prefill) and a rollout of the engine, to judge a profile by."""
    import dataclasses
    import datetime
    import time

    from paceline.bench.setup import describe
    from paceline.device import best_device
    from paceline.simulate.measure_steps import StepBench, measure_briefly, measure_fully
    from paceline.simulate.points import Measurements, load_measurements, write_measurements

    start = time.perf_counter()
    device = best_device()
    facts = describe(device)
    software = f"torch {facts['torch']}, {facts['dtype']}"
    points = Measurements(facts["device"], software, datetime.date.today().isoformat())
    if out.is_file():
        points = load_measurements(out)
    names = models.split(",")
    for number, model in enumerate(names):
        share = 1.0 if number == len(names) - 1 else FIRST_SHARE
        bench = StepBench(model, device, start + share * seconds, typer.echo)
        measure = measure_briefly if number else measure_fully
        measure(bench)
        points = dataclasses.replace(
            points, steps=(*points.steps, *bench.steps), rollouts=(*points.rollouts, *bench.rollouts)
        )
        write_measurements(points, out)
        del bench
    typer.echo(f"written to {out}; compare with: paceline simulate validate --points {out}")


@app.command("from")
def from_command(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="a run directory")],
    hardware: Annotated[
        str, typer.Option(help="profile of the machine that made the run; `calibrate` writes one")
    ],
    gpus: Annotated[Number, typer.Option(help="what if: this many devices")] = None,
    length_scale: Annotated[float, typer.Option(help="what if: responses this many times as long")] = 1.0,
    model: Annotated[Text, typer.Option(help="what if: another model")] = None,
    move_to: Annotated[Text, typer.Option(help="what if: other hardware")] = None,
    tp: Number = None,
    ep: Number = None,
    weights: PrecisionOption = None,
    kv: PrecisionOption = None,
    k: DraftTokensOption = None,
    accept: Annotated[Text, typer.Option(help="a better drafter: 0.8, by depth, or 3.0@3")] = None,
    drafter: Annotated[Text, typer.Option(help="eagle or history")] = None,
    mode: ModeOption = None,
    lag: LagOption = None,
    prompts: Number = None,
    samples: Number = None,
    max_running: Number = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Starts from a measured run and asks: what if?"""
    from paceline.simulate.from_run import read_run, text, what_if
    from paceline.simulate.report import provenance_lines, write_html, write_json

    changes = _given_flags(ctx)
    del changes["hardware"]  # what made the run, not a change to it
    answer = what_if(read_run(run), hardware, length_scale, move_to, **changes)
    origins = provenance_lines(answer.changed.outcome.provenance)
    typer.echo("\n".join([text(answer), "", "who says so:", *origins]))
    if json_file is not None:
        write_json(json_file, [answer.changed])
    if html_file is not None:
        write_html(html_file, [answer.base, answer.changed], [("the run",), ("what if",)], ("",))
