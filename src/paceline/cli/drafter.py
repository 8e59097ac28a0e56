"""The `paceline drafter` commands."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from paceline.cli.options import QuietOption, SeedOption, refuse_given
from paceline.cli.progress import ShowStep, announce, step_progress
from paceline.cli.saving import refuse_unwritable_folder, writing_folder
from paceline.config import FRESH, Config, refuse_mistyped_keys

if TYPE_CHECKING:
    import torch

    from paceline.drafting.acceptance import Acceptance, Measured
    from paceline.drafting.model_card import MeasuredAcceptance
    from paceline.drafting.training import HeadStep

app = typer.Typer(no_args_is_help=True, help="Train, measure and exchange eagle drafters.")

# Tokens of the drafts that a new head's card is measured with, or as many as were trained.
CARD_DEPTH = 5

# Values of a recipe's `eagle_path` that name no folder.
NO_FOLDERS = {FRESH: "a head that has learned nothing", "auto": "the shipped head"}

PolicyArgument = Annotated[
    str, typer.Argument(help="a Hugging Face folder, a checkpoint's policy/ folder, or `builtin`")
]
DrafterArgument = Annotated[str, typer.Argument(help="an eagle head's folder, or `builtin-eagle`")]
OverridesArgument = Annotated[
    Optional[list[str]], typer.Argument(help="section.key=value of the recipe, any number")
]
RecipeOption = Annotated[
    str,
    typer.Option(help="where task and sampling settings come from; default: the policy's run, or `default`"),
]
LayersOption = Annotated[
    str, typer.Option(help="captured layers, such as 2,14,25: i means the states that enter layer i")
]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float64; default: as it is")]


@app.command()
def train(
    context: typer.Context,
    policy: PolicyArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="folder to write the head to")] = Path("eagle"),
    recipe: RecipeOption = "",
    responses: Annotated[
        int, typer.Option(help="how many of the policy's own responses to learn from", min=1)
    ] = 1024,
    rollouts: Annotated[
        Optional[Path], typer.Option(help="learn from what `paceline rollout --save` wrote instead")
    ] = None,
    start: Annotated[str, typer.Option(help="a head to continue from; default: a fresh one")] = "",
    layers: LayersOption = "",
    draft_vocab: Annotated[
        int, typer.Option(help="tokens the head can say, the most frequent ones; 0: all", min=0)
    ] = 0,
    steps: Annotated[int, typer.Option(help="optimiser steps", min=1)] = 400,
    lr: float = 1e-3,
    unroll: Annotated[
        int, typer.Option(help="how many tokens of a draft are trained; 1: only the first", min=1)
    ] = 5,
    batch: Annotated[int, typer.Option(help="responses per step", min=1)] = 64,
    seed: SeedOption = 0,
    dtype: Annotated[
        str,
        typer.Option(help="float32, bfloat16 or float64; default: the policy's own, in which it was trained"),
    ] = "",
    quiet: QuietOption = False,
) -> None:
    """Trains an eagle head on a policy's own responses; a signal ends it early, and the head is kept."""
    config = _config(policy, overrides, recipe)
    from paceline.device import learning_threads
    from paceline.drafting.eagle_folder import save_eagle
    from paceline.drafting.model_card import write_card
    from paceline.drafting.offline import held_out, measured_on, open_head, train_head
    from paceline.drafting.training import HeadTraining
    from paceline.learning.batch import training_sequence
    from paceline.models.source import policy_folder
    from paceline.policy.config import read_config
    from paceline.rollout.responses import saved_responses, training_responses
    from paceline.rollout.saved import SavedSamples
    from paceline.runs.interruption import EXIT_INTERRUPTED, Interruption
    from paceline.session import open_session

    _refuse_options(context, start, rollouts, lr)
    _refuse_out("--out", out)
    wanted_dtype = _dtype(dtype)
    completions = None
    if rollouts is not None:
        vocab_size = read_config(policy_folder(config.policy.path)).vocab_size
        completions = saved_responses(SavedSamples("--rollouts", rollouts, policy, vocab_size))
    source = f"responses in {rollouts}" if rollouts is not None else f"{responses} responses of its own"
    announce(f"training an eagle head for {policy} on {source}, {steps} steps; written to {out}", quiet)
    session = open_session(config)
    head = open_head(session.policy, start, _layers(layers), draft_vocab)
    if completions is None:
        completions = training_responses(session.sampler, session.config, responses)
    session.close()
    learned, apart = held_out(completions)
    sequences = [training_sequence(completion) for completion in learned]
    tokens = sum(s.loss_tokens for s in sequences)
    typer.echo(
        f"{len(completions)} responses, {tokens} tokens to learn from; {len(apart)} kept to measure with"
    )
    settings = HeadTraining(steps=steps, lr=lr, unroll=unroll, batch_sequences=batch, seed=seed)
    measure = (apart, session.config, min(unroll, CARD_DEPTH))
    before = measured_on(session.policy, head, *measure) if start else None
    if start:
        _say_start(start, before)
    with Interruption() as interruption, interruption.deferred():
        with learning_threads(session.config), step_progress("head", quiet) as show:
            made = train_head(
                session.policy,
                head,
                not start,
                sequences,
                settings,
                _progress(steps, show),
                interruption.__bool__,
            )
        after = measured_on(session.policy, head, *measure)
        with writing_folder("--out", out):
            save_eagle(head, out, wanted_dtype)
            write_card(out, before, after)
    if after is not None:
        typer.echo(f"after {made} steps: {after}")
    if made < steps:
        typer.echo(
            f"interrupted: the head after {made} of {steps} steps is in {out}; continue with --start {out}"
        )
        raise typer.Exit(EXIT_INTERRUPTED)
    typer.echo(f"written to {out}; try: paceline drafter eval {policy} {out}")


def _say_start(start: str, came: "MeasuredAcceptance | None") -> None:
    """Prints the acceptance on the starting head's card, and that on these responses."""
    from paceline.drafting.eagle_folder import eagle_folder
    from paceline.drafting.model_card import read_acceptance

    expected = read_acceptance(eagle_folder(start))
    typer.echo(f"{start} says: {expected or 'nothing of its acceptance'}")
    typer.echo(f"here it has: {came or 'too few responses to measure'}")


def _refuse_options(context: typer.Context, start: str, rollouts: Path | None, lr: float) -> None:
    """Raises where an option of `train` would be ignored, or cannot be used."""
    if start:
        own = f"the head in --start {start} has its own; leave one of the two out"
        refuse_given(context, ("layers", "draft_vocab"), own)
    if rollouts is not None:
        taken = "--rollouts takes all that were saved; leave one of the two out"
        refuse_given(context, ("responses",), taken)
    if not 0 < lr < math.inf:
        raise ValueError(f"--lr {lr:g}: must be above 0 and finite, such as 1e-3")


def _refuse_out(name: str, out: Path) -> None:
    """Raises where no head can be written, or another model would be lost; a head may be written over."""
    from paceline.drafting.eagle_folder import BUILTIN_EAGLES, holds_other_model

    meant = NO_FOLDERS | dict.fromkeys(BUILTIN_EAGLES, "a shipped head")
    if str(out) in meant:
        raise ValueError(
            f"{name} {out}: a recipe's rollout.speculation.eagle_path = {str(out)!r} is no folder but "
            f"{meant[str(out)]}; choose another name"
        )
    if holds_other_model(out):
        raise ValueError(
            f"{name} {out}: holds a model that is not an eagle head; remove it or choose another folder"
        )
    refuse_unwritable_folder(name, out)


def _progress(steps: int, show: ShowStep) -> Callable[[int, "HeadStep"], None]:
    """Returns what shows how near the head is to the policy after each step."""

    def show_step(step: int, report: "HeadStep") -> None:
        overlap = " ".join(f"{value:.3f}" for value in report.overlap)
        show(step, steps, f"KL {report.divergence[0]:.4f}  1 - TV by position {overlap}")

    return show_step


@app.command("eval")
def evaluate(
    policy: PolicyArgument,
    drafter: DrafterArgument,
    overrides: OverridesArgument = None,
    recipe: RecipeOption = "",
    k: Annotated[int, typer.Option(help="tokens per draft", min=1)] = 5,
    problems: Annotated[int, typer.Option(help="held-out problems, one response each", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy", min=0)] = 1.0,
) -> None:
    """Says how much of a head's drafts a policy accepts, along its responses to held-out problems."""
    if temperature == math.inf:
        raise ValueError(f"--temperature {temperature:g}: must be finite, such as 1; 0 is greedy")
    config = _config(policy, overrides, recipe)
    from paceline.drafting.acceptance import measure_acceptance
    from paceline.drafting.eagle_folder import load_eagle
    from paceline.rollout.responses import held_out_responses
    from paceline.session import open_session

    session = open_session(config)
    head = load_eagle(drafter, session.policy, session.policy.dtype, session.device)
    completions = held_out_responses(session.sampler, session.config, problems, temperature)
    session.close()
    measured = measure_acceptance(session.policy, head, completions, k)
    _show_acceptance(measured, temperature, k)


def _config(policy: str, overrides: list[str] | None, recipe: str) -> Config:
    """Returns the recipe, and says which one it is where that was not asked for."""
    refuse_mistyped_keys(overrides or [])  # at once: what follows imports torch
    from paceline.cli.saved_policy import policy_recipe

    config, run, _ = policy_recipe(policy, overrides, recipe)
    if run is not None:
        typer.echo(f"by the recipe of {run.path}: {config.task.name}")
    return config


def _show_acceptance(measured: "Measured", temperature: float, k: int) -> None:
    tokens = measured.shared_noise.tokens
    typer.echo(f"{measured.responses} responses, {tokens} tokens, temperature {temperature:g}, k = {k}")
    places = "".join(f"{place:>7}" for place in range(1, k + 1))
    typer.echo(f"{'accepted, where those before were':<36}{places}   accept length")
    typer.echo(_row("shared noise", measured.shared_noise, k))
    typer.echo(_row("rejection, expected", measured.rejection, k))


@app.command("export")
def export_drafter(
    drafter: DrafterArgument,
    out: Annotated[Path, typer.Argument(help="folder to write")],
    policy: Annotated[str, typer.Option(help="the policy it drafts for")] = "builtin",
    dtype: DtypeOption = "",
) -> None:
    """Writes a head as a folder that vLLM and SGLang load for `eagle3`."""
    if 0 in _convert(drafter, out, policy, "", dtype):
        note = (
            "the head captures layer 0, the embedding: vLLM does that for every policy, "
            "SGLang for Qwen's families, and its Llama stops with an error"
        )
        typer.secho(note, fg="yellow", err=True)
    settings = f"{{'method': 'eagle3', 'model': '{out}', 'num_speculative_tokens': 3}}"
    typer.echo(f"written to {out}; in vLLM: speculative_config={settings}")


@app.command("import")
def import_drafter(
    folder: Annotated[Path, typer.Argument(help="a folder that vLLM or SGLang loads for `eagle3`")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    policy: Annotated[str, typer.Option(help="the policy it drafts for")] = "builtin",
    layers: LayersOption = "",
    dtype: DtypeOption = "",
) -> None:
    """Checks a published head against its policy and writes it as a folder that leaves nothing open."""
    _convert(str(folder), out, policy, layers, dtype)
    typer.echo(f"written to {out}; try: paceline drafter eval {policy} {out}")


def _convert(drafter: str, out: Path, policy: str, layers: str, dtype: str) -> tuple[int, ...]:
    """Writes a head to another folder; returns the layers that it captures."""
    import torch

    from paceline.drafting.eagle_folder import eagle_folder, load_eagle, save_eagle, stored_dtype
    from paceline.drafting.model_card import ACCEPTANCE_FILE, read_acceptance, write_card
    from paceline.models.source import policy_folder
    from paceline.policy.huggingface import load_policy

    _refuse_out("OUT", out)
    wanted = _dtype(dtype) or stored_dtype(drafter)
    model = load_policy(policy_folder(policy), torch.float32)
    head = load_eagle(drafter, model, wanted, "cpu", _layers(layers))
    first, last = (read_acceptance(eagle_folder(drafter), which) for which in ("first", "last"))
    save_eagle(head, out)
    if last is not None or (out / ACCEPTANCE_FILE).exists():  # a card there is another head's
        write_card(out, first, last)
    return head.config.captured_layers


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--layers {text!r}: must be numbers with commas between, such as 2,14,25") from None


def _dtype(name: str) -> "torch.dtype | None":
    from paceline.policy.huggingface import DTYPES

    if name and name not in DTYPES:
        raise ValueError(f"--dtype {name!r}: must be one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def _row(name: str, acceptance: "Acceptance", depth: int) -> str:
    shares = "".join(f"{100 * acceptance.rate_at(place):>6.1f}%" for place in range(depth))
    return f"{name:<36}{shares}   {acceptance.accept_length:.3f}"
