"""`paceline certify`: options in, a certificate out."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from paceline.cli.options import in_range, refuse_given
from paceline.cli.progress import working
from paceline.cli.saving import OutputFile, writable
from paceline.config import refuse_mistyped_keys

if TYPE_CHECKING:
    from paceline.certify.certificate import Certificate

MOST_SEED = 2**31 - 1


def certify(
    context: typer.Context,
    seed: Annotated[
        int,
        typer.Option(
            default_factory=lambda: random.randrange(MOST_SEED),
            show_default="another one each time; the certificate names it",
            callback=in_range(0, MOST_SEED),
            help="of everything that is drawn at random",
        ),
    ],
    policy: Annotated[str, typer.Argument(help="a Hugging Face folder, or `builtin`")] = "builtin",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value of the recipe, such as rollout.speculation.eagle_path=FOLDER"),
    ] = None,
    backend: Annotated[str, typer.Option(help="native, reference or vllm")] = "native",
    endpoint: Annotated[
        str, typer.Option(help="certify this completions server instead, such as http://localhost:8000")
    ] = "",
    served: Annotated[
        str, typer.Option("--policy", help="the folder that the server serves; the same as the argument")
    ] = "",
    model: Annotated[str, typer.Option(help="the model's name at the server; default: its first")] = "",
    drafter: Annotated[
        str,
        typer.Option(
            help="disturbed (the policy with noise on its weights), history, eagle, draft_model; "
            "with --pacing adaptive also a,b; with --backend vllm also ngram, suffix, mtp, dflash, none"
        ),
    ] = "disturbed",
    tokens: Annotated[
        int, typer.Option(help="proposed per step, at most if pacing is adaptive", min=1, max=15)
    ] = 3,
    pacing: Annotated[
        str,
        typer.Option(
            help="fixed (always as many tokens) or adaptive (up to as many, whatever is fastest now)"
        ),
    ] = "fixed",
    verify: Annotated[str, typer.Option(help="shared-noise, rejection, or both")] = "both",
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16 or float64; default: float32 on a CPU, bfloat16 on a GPU")
    ] = "",
    deterministic: Annotated[
        bool, typer.Option(help="GPU: the engine's deterministic mode, which promises the same bits")
    ] = False,
    recipe: Annotated[str, typer.Option(help="where prompts come from")] = "default",
    quick: Annotated[bool, typer.Option(help="fewer samples and scenes; says what it leaves out")] = False,
    full: Annotated[
        bool, typer.Option(help="also every other drafter that fits the policy, and FP8, each both ways")
    ] = False,
    samples: Annotated[
        int, typer.Option(help="completions per setting; twice as many find half the deviation", min=0)
    ] = 0,
    budget: Annotated[
        float, typer.Option(help="minutes to spend at least: what is left buys more samples", min=0)
    ] = 0.0,
    json_file: Annotated[
        Optional[Path],
        typer.Option("--json", callback=writable("--json"), help="also write the certificate here"),
    ] = None,
) -> None:
    """Tests that a backend samples exactly what the policy says; exit code 1 if it does not."""
    refuse_mistyped_keys(overrides or [])
    from paceline.bench.setup import recipe_policy, recipe_tokenizer
    from paceline.certify.foreign_run import Foreign, certify_foreign
    from paceline.certify.run import certify_parts
    from paceline.certify.subjects import (
        Effort,
        SubjectOptions,
        certificate_settings,
        certified_config,
        leaves_out,
        make_parts,
    )

    policy = served or policy
    if not endpoint:
        refuse_given(context, ("model",), "it is a server's; leave it out, or name --endpoint")
    if endpoint or backend == "vllm":
        _refuse_native_options(context, "--endpoint" if endpoint else "--backend vllm", bool(endpoint))
        what = Foreign(policy, tuple(overrides or ()), recipe, drafter, tokens, endpoint, model)
        decoder, prompts = recipe_policy(what.config)
        tokenizer = recipe_tokenizer(what.config)
        certificate = certify_foreign(what, decoder, prompts, tokenizer, quick, samples, seed, _say)
        _conclude(certificate, json_file)
        return
    if backend == "reference":
        _refuse_reference_options(context)
    options = SubjectOptions(policy, backend, drafter, tokens, pacing, verify, precision, deterministic)
    effort = Effort(quick, full, samples, budget, seed)
    config = certified_config(options, recipe, overrides or [])
    decoder, prompts = recipe_policy(config)
    parts = make_parts(options, config.rollout, decoder, prompts, recipe_tokenizer(config), effort)
    with working("certify"):
        certificate = certify_parts(
            parts,
            prompts,
            certificate_settings(options, config.rollout, decoder, seed),
            alone=decoder.device if backend == "native" else None,
            left_out=leaves_out(options, config.rollout, decoder, effort),
            progress=_say,
        )
    _conclude(certificate, json_file)


def _say(what: str) -> None:
    typer.echo(f"... {what}", err=True)


def _conclude(certificate: "Certificate", json_file: Path | None) -> None:
    """Shows a certificate; exit code 1 if it did not pass."""
    typer.echo(certificate.table())
    if json_file is not None:
        with OutputFile("--json", json_file).writing():
            json_file.write_text(certificate.json())
    if not certificate.passed:
        raise typer.Exit(1)


def _refuse_native_options(context: typer.Context, what: str, server: bool) -> None:
    """Raises where an option was given that a generator with noise of its own would ignore."""
    own = ("pacing", "verify", "full", "deterministic", "budget", "precision")
    refuse_given(context, own, f"it does not apply to {what}; leave it out")
    if server:
        as_it_is = "a server is certified as it runs; leave it out"
        refuse_given(context, ("backend", "drafter", "tokens"), as_it_is)


def _refuse_reference_options(context: typer.Context) -> None:
    """Raises where an option was given that the reference backend would ignore."""
    never = "the reference backend never speculates; leave it out, or use --backend native"
    refuse_given(context, ("drafter", "tokens", "pacing", "verify", "full"), never)
    mode = "a mode of the native engine; leave it out, or use --backend native"
    refuse_given(context, ("deterministic",), mode)
