"""Files of a model's folder, and errors that name them where they are damaged. Knows nothing of what the
files mean.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


class DamagedFile(ValueError):
    """A file that cannot be used as what it should be; the message begins with its path."""


@contextmanager
def blame(file: Path) -> Iterator[None]:
    """What goes wrong within is the content of this file, and the error says so."""
    try:
        yield
    except DamagedFile:
        raise
    except KeyError as error:
        raise DamagedFile(f"{file} lacks the key {error}") from None
    except (
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        ZeroDivisionError,
        SafetensorError,
    ) as error:
        raise DamagedFile(f"{file}: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:  # also bytes that are no text
        raise DamagedFile(f"{file} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise DamagedFile(f"{file} must hold an object, not a {type(content).__name__}")
    return content
