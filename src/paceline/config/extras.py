"""Optional packages: the extras of pyproject.toml that bring them, and the error for a missing one."""

from typing import Literal

Extra = Literal[
    "cluster", "data", "math", "mlflow", "models", "reasoning", "serve", "tensorboard", "trackio", "wandb"
]


def install_command(extra: Extra) -> str:
    """Returns the command that installs an extra, to run in the folder of a clone."""
    return f"pip install -e '.[{extra}]'"


def needs_package(package: str, extra: Extra) -> str:
    """Returns the end of an error message whose subject needs an optional package."""
    return f"needs the package {package}: {install_command(extra)} in your clone of Paceline"
