"""The optimiser's tensors in a checkpoint, written by any number of ranks and read by any other.

    optimiser.safetensors                    of one process: everything

    optimiser-00001-of-00002.safetensors     of two ranks: the first one's rows of every tensor
    optimiser-00002-of-00002.safetensors     the second one's
    optimiser.json                           which file has which rows of what

A rank reads the rows that it holds, from whichever files have them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.policy.files import DamagedFile, errors_name, read_json

SINGLE_FILE = "optimiser.safetensors"
INDEX_FILE = "optimiser.json"
# Matches either kind of file.
ANY_FILE = "optimiser*.safetensors"


def shard_file(rank: int, count: int) -> str:
    return f"optimiser-{rank + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, rows: Mapping[str, Sequence[range]]) -> None:
    count = len(next(iter(rows.values()), ()))
    index = {
        "files": [shard_file(rank, count) for rank in range(count)],
        "rows": {name: [[r.start, r.stop] for r in by_rank] for name, by_rank in rows.items()},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


class OptimiserFiles(Mapping[str, torch.Tensor]):
    """The requested rows of every tensor, read on lookup."""

    def __init__(self, folder: Path, rows: Mapping[str, range]) -> None:
        self.folder = folder
        self.rows = rows
        self.files: dict[str, Any] = {}
        self.index: dict[str, list[tuple[str, range]]] = {}
        if (folder / SINGLE_FILE).is_file():
            file = self._open(SINGLE_FILE)
            self.index = {
                name: [(SINGLE_FILE, range(file.get_slice(name).get_shape()[0]))]
                for name in file.keys()  # noqa: SIM118
            }
            return
        with errors_name(folder / INDEX_FILE):
            index = read_json(folder / INDEX_FILE)
            self.index = {
                name: [(file, range(*bounds)) for file, bounds in zip(index["files"], by_rank, strict=True)]
                for name, by_rank in index["rows"].items()
            }

    def __getitem__(self, name: str) -> torch.Tensor:
        wanted = self.rows[name]
        if name not in self.index:
            raise DamagedFile(
                f"{self.folder} has no {name} of the optimiser: it was saved with another "
                "learning.optimiser_state or policy.dtype"
            )
        parts = []
        for file, rows in self.index[name]:
            start, stop = max(wanted.start, rows.start), min(wanted.stop, rows.stop)
            if start < stop or (not wanted and not parts):
                with errors_name(self.folder / file):
                    part = self._open(file).get_slice(name)
                    parts.append(part[start - rows.start : stop - rows.start] if wanted else part[:0])
        found = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None
        if found is None or len(found) != len(wanted):
            raise DamagedFile(
                f"{self.folder} lacks rows of the optimiser's {name}: wanted {wanted.start} to {wanted.stop}"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _open(self, file: str) -> Any:
        if file not in self.files:
            with errors_name(self.folder / file):
                self.files[file] = safe_open(self.folder / file, "pt")
        return self.files[file]
