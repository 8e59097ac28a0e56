"""The files that a run learns from, by digest: data, and the user's own reward and tool code.

They lie outside the run directory, so they can change while a run is stopped. A run resumed with other rows
or another reward would be two runs in one folder.
"""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.config import Config, ConfigError
from paceline.files import replace_file
from paceline.report.run_directory import RunDirectory

OURS = Path(__file__).parents[1]

# Digests of files by the recipe's keys that name them.
Digests = dict[str, str]


def input_digests(config: Config) -> Digests:
    """Returns the digest of every file that the recipe's task uses; missing ones are left out."""
    task = config.task
    files = {key: Path(path) for key, path in _data_paths(config).items() if path}
    code = {f"task.rewards[{i}].function": reward.function for i, reward in enumerate(task.rewards)}
    for key, function in (code | {"task.turns.step": task.turns.step}).items():
        if (path := _source_of(function)) is not None:
            files[key] = path
    return {key: _digest(path) for key, path in files.items() if path.exists()}


def _data_paths(config: Config) -> dict[str, str]:
    data, sft = config.task.data, config.sft
    named = {"task.data.path": data.path, "task.data.held_out_path": data.held_out_path}
    return named | {
        "sft.data": sft.data,
        "sft.held_out": sft.held_out,
        "sft.chat_template": sft.chat_template,
    }


def write_inputs(run: RunDirectory, config: Config) -> None:
    record = {"started_in": str(Path.cwd()), "digests": input_digests(config)}
    replace_file(run.inputs_path, json.dumps(record, indent=1) + "\n")


def check_inputs(run: RunDirectory, config: Config, warn: Callable[[str], None]) -> None:
    """Raises ConfigError where the inputs of a resumed run have changed.

    `run.changed_inputs=accept` accepts them, with a warning. Runs of earlier versions have no record.
    """
    if not run.inputs_path.is_file():
        return
    now = input_digests(config)
    try:
        record = json.loads(run.inputs_path.read_bytes())
        before, started_in = dict(record["digests"]), Path(record["started_in"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        warn(
            f"{run.inputs_path} is damaged ({error}): whether data or reward code has changed is not known; "
            "it is written anew from what is there now"
        )
        write_inputs(run, config)
        return
    _refuse_other_folder(run, config, started_in)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if not changed:
        return
    what = f"{', '.join(changed)}: not the file that {run.path} began with"
    if config.run.changed_inputs == "refuse":
        raise ConfigError(
            f"{what}; put that file back, start a new run, or continue with the new one "
            "(run.changed_inputs=accept)"
        )
    warn(f"{what}; the run continues with the new one (run.changed_inputs=accept)")
    write_inputs(run, config)


def _refuse_other_folder(run: RunDirectory, config: Config, started_in: Path) -> None:
    """Relative paths of the recipe start from the folder in which the run was started."""
    speculation = config.rollout.speculation
    named = {
        "policy.path": config.policy.path,
        "learning.distill.teacher": config.learning.distill.teacher,
        **_data_paths(config),
        "rollout.speculation.eagle_path": speculation.eagle_path,
        "rollout.speculation.draft_model_path": speculation.draft_model_path,
    }
    for key, path in named.items():
        if path and not Path(path).exists() and (started_in / path).exists():
            raise ConfigError(
                f"{key} = {path!r}: is not here; {run.path} was started in {started_in}, where it is: "
                "resume it from there"
            )


def _source_of(function: str) -> Path | None:
    """Returns the user's file of `module:function` or `path/to/file.py:function`; None for installed code."""
    where, _, name = function.rpartition(":")
    if not where or not name:
        return None
    if where.endswith(".py"):
        return Path(where)
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, AttributeError, ValueError):
        spec = None
    local = Path.cwd() / (where.replace(".", "/") + ".py")
    path = Path(spec.origin) if spec is not None and spec.origin else local
    installed = any(path.is_relative_to(home) for home in (sys.prefix, sys.base_prefix, OURS))
    return None if installed or path.suffix != ".py" else path


def _digest(path: Path) -> str:
    """Returns the digest of a file, or of a folder's files and their names."""
    if path.is_dir():
        listed = sorted(file for file in path.rglob("*") if file.is_file())
        named = "".join(f"{file.relative_to(path)} {_digest(file)}\n" for file in listed)
        return hashlib.sha256(named.encode()).hexdigest()
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
