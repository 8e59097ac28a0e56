"""Where commands write: that is checked before the work, and errors name option and path.

The check leaves nothing behind: a command may end for another reason before it writes.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.config import ConfigError


def refuse_unwritable_folder(name: str, folder: Path) -> None:
    """Raises ConfigError where no folder can be made here, or written into; `name` is the option's."""
    made: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        there = next((path for path in (folder, *folder.parents) if path.exists()), None)
        if there is not None and not there.is_dir():
            raise ConfigError(f"{name} {folder}: {there} is a file; choose a folder")
        for path in reversed(missing):
            if not path.is_dir():  # `new/..` is there once `new` is
                path.mkdir()
                made.append(path)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{name} {folder}: cannot be written: {_reason(error)}; choose a folder that can be written to"
        ) from None
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir()


@dataclass(frozen=True)
class OutputFile:
    """A file that a command writes, and the option that names it."""

    option: str
    path: Path
    is_default: bool = False  # the option was not given

    def refuse_unwritable(self) -> None:
        """Raises ConfigError where the file cannot be written; what is there stays as it is."""
        target = Path(os.path.realpath(self.path))
        try:
            if target.is_dir():
                raise self._refusal("is a folder")
            if not target.parent.is_dir():
                raise self._refusal(f"there is no folder {self.path.parent}")
            if target.is_file():
                target.open("ab").close()
            elif not target.exists():  # a pipe or a device is written to directly
                tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            raise self._refusal(f"cannot be written: {_reason(error)}") from None

    def refuse_special(self) -> None:
        """Raises ConfigError for a pipe or a device: a file that replaces it would be in its place."""
        if self.path.exists() and not self.path.is_file() and not self.path.is_dir():
            raise self._refusal("is not a plain file")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an OSError about this file within into a ConfigError that names the option."""
        try:
            yield
        except OSError as error:
            if error.filename not in (None, str(self.path)):
                raise
            raise self._refusal(f"cannot be written: {_reason(error)}") from None

    def _refusal(self, why: str) -> ConfigError:
        if self.is_default:
            return ConfigError(f"{self.path}: {why}; name another file with {self.option}")
        return ConfigError(f"{self.option} {self.path}: {why}; choose another file")


def writable(option: str) -> Callable[[Path | None], Path | None]:
    """Returns the callback of an option that names a file: refused before hours of work, not after."""

    def check(path: Path | None) -> Path | None:
        if path is not None:
            OutputFile(option, path).refuse_unwritable()
        return path

    return check


@contextlib.contextmanager
def writing_folder(name: str, folder: Path) -> Iterator[None]:
    """Turns a file system error within into a ConfigError; a folder that was not there is removed again."""
    from safetensors import SafetensorError

    there = folder.exists()
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "os error" not in str(error):
            raise  # about the tensors
        if not there:
            shutil.rmtree(folder, ignore_errors=True)
        existing = next(path for path in folder.absolute().parents if path.exists())
        free = shutil.disk_usage(existing).free / 1e9
        raise ConfigError(
            f"{name} {folder}: could not be written: {error}; {free:.2f} GB are free there: make "
            "room, or choose another folder"
        ) from error


def prepare_samples_folder(save: Path) -> None:
    """Makes the folder; raises ConfigError where it cannot be written to, or holds saved steps already.

    It must not be a run's, either: a run reads and removes files of these names.
    """
    refuse_run_directory("--save", save)
    try:
        save.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=save).close()
    except OSError as error:
        raise ConfigError(f"--save {save}: {error}; choose a folder that can be written to") from None
    earlier = sorted(file.name for file in save.glob("step_*.jsonl"))
    if earlier:
        more = f" and {len(earlier) - 1} more" if len(earlier) > 1 else ""
        raise ConfigError(
            f"--save {save}: it holds {earlier[0]}{more} of an earlier save, and `train --replay` would mix "
            "them; remove those, or choose another folder"
        )


def refuse_run_directory(name: str, folder: Path) -> None:
    """Raises ConfigError where a folder is a run directory, or lies within one."""
    from paceline.report.run_directory import enclosing_run

    run = enclosing_run(folder)
    if run is not None:
        raise ConfigError(
            f"{name} {folder}: {run} is a run directory, into which its run alone writes; "
            "choose a folder outside it"
        )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
