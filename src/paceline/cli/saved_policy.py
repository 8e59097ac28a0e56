"""Which policy a command means by a run directory, one of its checkpoints, or a policy folder."""

from dataclasses import dataclass
from pathlib import Path

from paceline.cli.options import policy_overrides
from paceline.config import Config, load_config
from paceline.learning.checkpoint import damage, newest_checkpoint
from paceline.report.run_directory import RunDirectory


@dataclass(frozen=True)
class SavedPolicy:
    """A Hugging Face folder, and the run that wrote it, if one did."""

    folder: Path
    adapter: Path
    run: RunDirectory | None


def saved_policy(path: Path) -> SavedPolicy:
    """Returns the policy of a run directory (its newest checkpoint), a checkpoint or a policy folder.

    Raises ValueError where a checkpoint is not as it was saved.
    """
    source = path
    if (path / "checkpoints").is_dir():
        newest = newest_checkpoint(path / "checkpoints", set_aside=False)  # the run may be training
        if newest is None:
            raise FileNotFoundError(f"{path} has no checkpoint yet")
        source = newest
    else:
        _refuse_damaged(path)
    folder = source / "policy" if (source / "policy").is_dir() else source
    return SavedPolicy(folder, source / "adapter", _run_of(folder))


def policy_recipe(
    policy: str, overrides: list[str] | None, recipe: str
) -> tuple[Config, RunDirectory | None, str]:
    """Returns the recipe that a policy is used with, the run whose own that is, and its name within it.

    A run's policy goes by the run's recipe, unless another one is named.
    """
    path = Path(policy)
    if not path.is_dir():  # a shipped policy, or one that opening refuses by name
        return load_config(recipe or "default", policy_overrides(policy, overrides)), None, policy
    saved = saved_policy(path)
    given = policy_overrides(str(saved.folder), overrides)
    if recipe or saved.run is None:
        return load_config(recipe or "default", given), None, policy
    within = saved.folder.absolute().relative_to(saved.run.path.absolute())
    return saved.run.config(given), saved.run, str(within)


def _refuse_damaged(path: Path) -> None:
    for checkpoint in (path, path.absolute().parent):
        within = checkpoint == path or path.name == "policy"
        if not within or not (checkpoint / "manifest.json").is_file():
            continue
        if problem := damage(checkpoint):
            raise ValueError(
                f"{path} is damaged: {problem}; use another checkpoint of this run, or restore the file"
            )


def _run_of(folder: Path) -> RunDirectory | None:
    for parent in folder.absolute().parents:
        if parent.name == "checkpoints" and (parent.parent / "config.yaml").is_file():
            return RunDirectory.open(parent.parent)
    return None
