"""`paceline certify`: puts a subject together from the command line and writes its certificate."""

from pathlib import Path
from typing import Annotated, Optional

import typer


def certify(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(help="a Hugging Face folder, or `builtin`")] = "builtin",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value of the recipe, such as rollout.speculation.eagle_path=FOLDER"),
    ] = None,
    backend: Annotated[str, typer.Option(help="native or reference")] = "native",
    drafter: Annotated[
        str,
        typer.Option(
            help="disturbed (the policy with noise on its weights), history, eagle, draft_model; with --pacing adaptive also a,b"
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
    verify: Annotated[str, typer.Option(help="shared-noise or rejection")] = "shared-noise",
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16 or float64; default: float32 on a CPU, bfloat16 on a GPU")
    ] = "",
    deterministic: Annotated[
        bool, typer.Option(help="GPU: the engine's deterministic mode, which promises the same bits")
    ] = False,
    recipe: Annotated[str, typer.Option(help="where prompts come from")] = "default",
    quick: Annotated[bool, typer.Option(help="a few hundred samples instead of thousands: coarse")] = False,
    samples: Annotated[
        int,
        typer.Option(
            help="completions per context at temperature 1; four times as many see half the bias", min=0
        ),
    ] = 0,
    seed: int = 0,
    json_file: Annotated[
        Optional[Path], typer.Option("--json", help="also write the certificate here")
    ] = None,
) -> None:
    """Tests that a backend samples exactly what the policy says; exit code 1 if it does not."""
    from dataclasses import replace

    from paceline.bench.setup import recipe_policy
    from paceline.certify.fp8 import Fp8Subject
    from paceline.certify.native import NativeSubject, ReferenceSubject, drafter_maker, widest
    from paceline.certify.run import QUICK, Plan
    from paceline.certify.run import certify as run
    from paceline.cli.options import refuse_given
    from paceline.config import load_config
    from paceline.drafting.recipe import drafter_overrides
    from paceline.engine.sampling import Verify
    from paceline.engine.settings import EngineSettings
    from paceline.models.source import policy_folder
    from paceline.policy.tokenizer import load_tokenizer
    from paceline.types import Precision

    if backend not in ("native", "reference"):
        raise ValueError(f"--backend {backend!r}: must be native or reference")
    if backend == "reference":
        never = "the reference backend never speculates; leave it out, or use --backend native"
        refuse_given(context, ("drafter", "tokens", "pacing", "verify"), never)
        refuse_given(
            context, ("deterministic",), "a mode of the native engine; leave it out, or use --backend native"
        )
    if verify not in (Verify.SHARED_NOISE, Verify.REJECTION):
        raise ValueError(f"--verify {verify!r}: must be {Verify.SHARED_NOISE} or {Verify.REJECTION}")
    if pacing not in ("fixed", "adaptive"):
        raise ValueError(f"--pacing {pacing!r}: must be fixed or adaptive")
    names = drafter.split(",")
    if len(names) > 1 and pacing == "fixed":
        raise ValueError(
            f"--drafter {drafter!r}: fixed pacing takes one drafter; add --pacing adaptive for several"
        )
    chosen = drafter_overrides(overrides or [], names if backend == "native" else [])
    for key, instead in (
        ("policy.path", "name the policy as the first argument"),
        ("policy.dtype", "say --precision"),
    ):
        if given := [override for override in chosen if override.partition("=")[0] == key]:
            raise ValueError(
                f"{given[0]}: the command's own arguments say which policy is certified, and in which type; "
                f"{instead}"
            )
    config = load_config(recipe, [*chosen, f"policy.path={policy}", f"policy.dtype={precision or 'auto'}"])
    rollout = config.rollout
    if backend == "reference" and rollout.precision != Precision.BASE:
        raise ValueError(
            f"rollout.precision = {rollout.precision!r} needs --backend native; the reference computes in "
            "the policy's own type only"
        )
    model, prompts = recipe_policy(config)
    settings = {"policy": policy, "precision": str(model.dtype).removeprefix("torch.")}
    if backend == "reference":
        subject = ReferenceSubject(model, widest(model))
    else:
        tokenizer = load_tokenizer(policy_folder(policy))
        drafters = [drafter_maker(name, model, rollout.speculation, tokenizer) for name in names]
        engine = EngineSettings(
            deterministic=deterministic or rollout.deterministic,
            verify=verify,
            precision=rollout.precision,
            base_precision_layers=rollout.base_precision_layers,
            kv_scales_per_head=rollout.kv_scales == "head",
        )
        how = (drafters, tokens, engine, pacing == "adaptive")
        subject = (
            NativeSubject(model, widest(model), *how)
            if rollout.precision == Precision.BASE
            else Fp8Subject(model, prompts, *how)
        )
        settings |= {"rollout": rollout.precision} if rollout.precision != Precision.BASE else {}
        settings |= {"drafter": drafter, "tokens": str(tokens), "pacing": pacing, "verify": verify}
        settings["deterministic"] = str(engine.deterministic).lower()
    settings["device"] = model.device.type
    plan = replace(QUICK if quick else Plan(), seed=seed)
    certificate = run(
        subject,
        prompts,
        replace(plan, samples=samples) if samples else plan,
        settings,
        lambda what: typer.echo(f"... {what}", err=True),
    )
    typer.echo(certificate.table())
    if json_file is not None:
        json_file.write_text(certificate.json())
    if not certificate.passed:
        raise typer.Exit(1)
