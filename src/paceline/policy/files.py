"""Files of a model's folder, and errors that name them where they are damaged.

Knows nothing of what the files mean.
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
def errors_name(file: Path) -> Iterator[None]:
    """Converts errors about a file's content to `DamagedFile` errors that name the file."""
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
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    # Also raised for bytes that are no text.
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{file} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise DamagedFile(f"{file} must hold an object, not a {type(content).__name__}")
    return content
