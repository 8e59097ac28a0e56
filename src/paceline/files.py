"""Atomic replacement of files that other processes read."""

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Replaces a file atomically: after a crash it has its old content or the new one.

    An OSError names this file, not the temporary one that is written first.
    """
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.unlink(missing_ok=True)
        with beside.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
