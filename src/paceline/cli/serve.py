"""`paceline serve`: a policy behind HTTP."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from paceline.cli.options import policy_overrides
from paceline.cli.progress import announce
from paceline.config import Config, load_config, refuse_mistyped_keys
from paceline.config.extras import needs_package


def serve(
    policy: Annotated[
        str,
        typer.Argument(
            help="a Hugging Face folder, a run directory, one of its checkpoints, `builtin`, or a recipe"
        ),
    ] = "builtin",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value of the recipe, such as rollout.max_running=64"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="where to listen; beyond this machine only with keys")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="where to listen", min=1, max=65535)] = 8000,
    key_file: Annotated[
        Optional[Path], typer.Option(help="a file of keys, one a line: requests need one of them")
    ] = None,
    name: Annotated[str, typer.Option(help="the model's name; default: the argument")] = "",
    queue: Annotated[int, typer.Option(help="requests that run or wait, at most", min=1)] = 4096,
    body_mb: Annotated[int, typer.Option(help="size of a request's body, at most", min=1)] = 32,
    request_seconds: Annotated[float, typer.Option(help="for a request to be answered", min=0.1)] = 3600.0,
    drain_seconds: Annotated[int, typer.Option(help="for answers to end after SIGTERM", min=0)] = 30,
) -> None:
    """Serves a policy: OpenAI's and Anthropic's endpoints, and tokens in, tokens out."""
    refuse_mistyped_keys(overrides or [])
    config, called = _recipe_of(policy, list(overrides or []))
    keys = _read_keys(key_file) if key_file is not None else ()
    try:
        from paceline.serving.server import ServerSettings
        from paceline.serving.server import serve as serve_policy
    except ModuleNotFoundError as error:
        if error.name != "uvicorn":
            raise
        raise ValueError(f"paceline serve {needs_package('uvicorn', 'serve')}") from None
    from paceline.serving.limits import Limits

    limits = Limits(body_bytes=body_mb << 20, request_seconds=request_seconds, queue=queue)
    settings = ServerSettings(host, port, keys, name or called, drain_seconds, limits)
    serve_policy(config, settings, lambda text: announce(text, quiet=False))


def _recipe_of(policy: str, overrides: list[str]) -> tuple[Config, str]:
    """Returns the recipe to serve by, and what the model is called."""
    from paceline.cli.saved_policy import saved_policy
    from paceline.models.source import BUILTIN_POLICIES

    if policy in BUILTIN_POLICIES:
        return load_config("default", policy_overrides(policy, overrides)), policy
    if not Path(policy).is_dir():
        config = load_config(policy, overrides)
        return config, config.policy.path
    saved = saved_policy(Path(policy))
    given = policy_overrides(str(saved.folder), overrides)
    return load_config("default", given) if saved.run is None else saved.run.config(given), policy


def _read_keys(path: Path) -> tuple[str, ...]:
    keys = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    if not keys:
        raise ValueError(f"--key-file {path}: it is empty; write one key a line")
    return keys
