"""Which policy a command means by a run directory, one of its checkpoints, or a policy folder."""

from dataclasses import dataclass
from pathlib import Path

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
