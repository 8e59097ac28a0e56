"""Rows of the user's data: a JSONL or parquet file, or a folder that Hugging Face `datasets` saved.

folder/data-00000-of-00002.arrow, state.json     `Dataset.save_to_disk`: its shards, in order
folder/train/..., folder/dataset_dict.json       `DatasetDict.save_to_disk`: the split is to be named
folder/*.parquet or folder/*.jsonl               a downloaded dataset: all files of one kind, by name
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import ConfigError
from paceline.config.extras import needs_package
from paceline.tasks.jsonl import read_jsonl

if TYPE_CHECKING:
    import pyarrow

# A row by column name.
Row = dict[str, Any]


def read_rows(path: Path, key: str) -> Iterator[tuple[str, Row]]:
    """Yields each row's place and columns; errors name the recipe's `key`, the file and the row."""
    for file in _files(path, key):
        yield from READERS[file.suffix](file)


def _files(path: Path, key: str) -> list[Path]:
    told = f"{key} = {str(path)!r}"
    wanted = f"give a {' or '.join(FILES)} file, or a folder that `datasets` saved"
    if path.is_file():
        if path.suffix not in FILES:
            raise ConfigError(f"{told}: must end in {' or '.join(FILES)}, or be a folder")
        return [path]
    if not path.is_dir():
        wrong = "is a pipe or a device" if path.exists() else "there is no such file"
        raise ConfigError(f"{told}: {wrong}; {wanted}")
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(str(folder) for folder in path.iterdir() if folder.is_dir()))
        raise ConfigError(f"{told}: holds several splits; name one: {splits}")
    if (path / "state.json").is_file():
        try:
            listed = json.loads((path / "state.json").read_text())["_data_files"]
            return [path / entry["filename"] for entry in listed]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ConfigError(f"{path / 'state.json'} is not what `datasets` writes: {error!r}") from None
    for suffix in (".arrow", *FILES):
        if found := sorted(path.glob(f"*{suffix}")):
            return found
    raise ConfigError(f"{told}: this folder holds no data; {wanted}")


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path}: reading parquet {needs_package('pyarrow', 'data')}") from None
    try:
        yield from _numbered(path, pyarrow.parquet.ParquetFile(path).iter_batches())
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not readable parquet: {error}") from None


def _read_arrow(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{path}: reading Arrow {needs_package('pyarrow', 'data')}") from None
    try:
        with pyarrow.memory_map(str(path)) as file:
            yield from _numbered(path, pyarrow.ipc.open_stream(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not readable Arrow: {error}") from None


def _numbered(path: Path, batches: "Iterator[pyarrow.RecordBatch]") -> Iterator[tuple[str, Row]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{path} row {number}", row


READERS = {".jsonl": read_jsonl, ".parquet": _read_parquet, ".arrow": _read_arrow}
# Those that can be given by themselves.
FILES = (".jsonl", ".parquet")
