"""Lines of JSON from the user's file: every error names the file and the line."""

import codecs
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import ConfigError

OTHER_ENCODINGS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line's location `file:line` and object; empty lines and a BOM are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            text = _decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, where)
            if text.strip():
                yield where, _parse(text.rstrip(), where)


def _decode(line: bytes, where: str) -> str:
    other = next((name for mark, name in OTHER_ENCODINGS.items() if line.startswith(mark)), None)
    if other is not None:
        raise ConfigError(f"{where} is {other}; the file must be UTF-8")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: {error.reason} at byte {error.start + 1} of the line"
        ) from None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
        # A lone surrogate, written as an escape: no tokenizer and no file can encode it.
        json.dumps(row, ensure_ascii=False).encode()
    except RecursionError:
        raise ConfigError(f"{where} is not JSON: it is nested too deep") from None
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds a half character, {error.object[error.start]!r}") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # as in "Unterminated string starting at"
        raise ConfigError(f"{where} is not JSON: {what} at column {error.colno}") from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise ConfigError(
            f"{where} holds a whole number of more than {most} digits, the most that are read; "
            "write it as text, in quotes"
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be a JSON object, not a {type(row).__name__}")
    return row
