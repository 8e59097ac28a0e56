"""`paceline certify`: puts a subject together from the command line and writes its certificate."""

from pathlib import Path
from typing import Annotated, Optional

import typer


def certify(
    policy: Annotated[str, typer.Argument(help="a Hugging Face folder, or `builtin`")] = "builtin",
    backend: Annotated[str, typer.Option(help="native or reference")] = "native",
    drafter: Annotated[
        str, typer.Option(help="disturbed (the policy with noise on its weights), history, eagle:FOLDER or draft_model:FOLDER")
    ] = "disturbed",
    tokens: Annotated[int, typer.Option(help="proposed per step", min=1, max=15)] = 3,
    verify: Annotated[str, typer.Option(help="shared-noise or rejection")] = "shared-noise",
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or float64; default: float32 on a CPU, bfloat16 on a GPU")] = "",
    deterministic: Annotated[bool, typer.Option(help="GPU: the engine's deterministic mode, which promises the same bits")] = False,
    recipe: Annotated[str, typer.Option(help="where prompts come from")] = "default",
    quick: Annotated[bool, typer.Option(help="a few hundred samples instead of thousands: coarse")] = False,
    samples: Annotated[int, typer.Option(help="completions per context at temperature 1; four times as many see half the bias", min=0)] = 0,
    seed: int = 0,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="also write the certificate here")] = None,
) -> None:
    """Tests that a backend samples exactly what the policy says; exit code 1 if it does not."""
    from dataclasses import replace

    import torch

    from paceline.certify.native import NativeSubject, ReferenceSubject, drafter_maker
    from paceline.certify.run import QUICK, Plan
    from paceline.certify.run import certify as run
    from paceline.config import load_config
    from paceline.engine.step import Verify
    from paceline.policy.huggingface import load_policy
    from paceline.session import held_out_prompts, policy_dtype, policy_folder, prepare_device

    if backend not in ("native", "reference"):
        raise ValueError(f"--backend {backend!r}: must be native or reference")
    if verify not in (Verify.SHARED_NOISE, Verify.REJECTION):
        raise ValueError(f"--verify {verify!r}: must be {Verify.SHARED_NOISE} or {Verify.REJECTION}")
    config = load_config(recipe, [f"policy.path={policy}", f"policy.dtype={precision or 'auto'}"])
    device, folder = prepare_device(config), policy_folder(config.policy.path)
    model = load_policy(folder, policy_dtype(config, device), device)
    exact = load_policy(folder, torch.float64 if device.type == "cpu" else torch.float32, device)
    prompts = held_out_prompts(config, folder, 8)
    if backend == "reference":
        subject = ReferenceSubject(model, exact)
        settings = {}
    else:
        subject = NativeSubject(model, exact, drafter_maker(drafter, model), tokens, verify, deterministic)
        settings = {"drafter": drafter, "tokens": str(tokens), "verify": verify, "deterministic": str(deterministic).lower()}
    settings = {"policy": policy, "precision": str(model.dtype).removeprefix("torch."), **settings, "device": device.type}
    plan = replace(QUICK if quick else Plan(), seed=seed)
    certificate = run(
        subject, prompts, replace(plan, samples=samples) if samples else plan, settings, lambda what: typer.echo(f"... {what}", err=True)
    )
    typer.echo(certificate.table())
    if json_file is not None:
        json_file.write_text(certificate.json())
    if not certificate.passed:
        raise typer.Exit(1)
