"""The error of a run that cannot write: where, how much room is needed, and how to continue."""

import errno
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paceline.learning.checkpoint import list_checkpoints
from paceline.learning.sentinel import TrainingFailed
from paceline.report.run_directory import RunDirectory

# The errno in a message of safetensors: "I/O error: No space left (os error 28)".
OS_ERROR = re.compile(r"os error (\d+)")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def resume_command(run: Path) -> str:
    """Returns the shell command that continues a run, with its --replay or --schedule."""
    directory = RunDirectory(run)
    command = f"paceline {directory.command()} --resume {shlex.quote(str(run))}"
    origin = directory.origin()
    return command if origin is None else f"{command} {origin.option} {shlex.quote(str(origin.path))}"


@contextmanager
def writing(run: Path, what: str, where: Path, bytes_needed: int = 0) -> Iterator[None]:
    """Turns an error of the file system within into `TrainingFailed`, which explains the way out."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and not OS_ERROR.search(str(error)):
            raise  # an error of the tensors, not of the disk
        raise TrainingFailed(_explain(run, what, where, bytes_needed, error)) from error


def _explain(run: Path, what: str, where: Path, bytes_needed: int, error: Exception) -> str:
    text = f"{what} could not be written to {where}: {error}."
    if _number(error) in NO_ROOM:
        needed = f"It needs {_size(bytes_needed)} there; " if bytes_needed else ""
        text += f" {needed}{_room(where)}. Make room"
        text += (
            ", or lower checkpoint.keep (one more than it is on disk while saving)," if bytes_needed else ","
        )
    else:
        text += " Put that right,"
    saved = list_checkpoints(run / "checkpoints")
    step = f"from {saved[-1].name}" if saved else "from the beginning (there is no checkpoint yet)"
    return f"{text} then continue {step} with: {resume_command(run)}"


def _number(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = OS_ERROR.search(str(error))
    return int(found.group(1)) if found else None


def _room(where: Path) -> str:
    existing = next((path for path in (where, *where.parents) if path.exists()), Path("/"))
    return f"{_size(shutil.disk_usage(existing).free)} are free"


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1000:.0f} kB"
