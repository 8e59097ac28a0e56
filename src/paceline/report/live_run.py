"""A run that may still grow: its metrics are read as they are written, and only what is new.

The first view of a long run must not wait until a file of hundreds of megabytes is read. So a large file is
first looked at in a few thousand places, and read whole in the background; what is shown then is exact.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from paceline.report.run_data import RunData
from paceline.report.run_directory import RunDirectory, parse_record
from paceline.report.step_lines import LONGEST_LINE

# Bytes of metrics that are read before the first view; above, it is of samples of the file.
READ_AT_ONCE = 8_000_000

# Records of a large file that the first view is made of.
FIRST_LOOK = 1500

# Bytes read at a time in the background, the pause after them, and the one before all: first comes the view.
CHUNK = 500_000
PAUSE = 0.002
FIRST_PAUSE = 2.0


class LiveRun:
    """The data of one run, renewed by `poll`; safe to use from several threads."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.lock = threading.Lock()
        self.version = 0  # grows whenever there is something new to show
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._rest = b""
        self._loading = False
        self._closing_time = 0.0
        self.data = RunData.open(path, name)

    def poll(self) -> int:
        """Reads what is new and returns the version of the data."""
        with self.lock:
            if self._loading:
                return self.version
            directory = self.data.directory
            try:
                stat = directory.metrics_path.stat()
            except OSError:
                return self.version
            identity = (stat.st_dev, stat.st_ino)
            if identity != self._identity or stat.st_size < self._offset:
                self._start_again(identity)
            if stat.st_size - self._offset > READ_AT_ONCE and not len(self.data.train):
                self._look_at(directory, stat.st_size)
                self._loading = True
                threading.Thread(target=self._load_whole, daemon=True).start()
            elif stat.st_size > self._offset:
                self.version += self._read_on(self.data, stat.st_size)
            self._renew_closing(directory)
            return self.version

    def _start_again(self, identity: tuple[int, int]) -> None:
        """Forgets everything: a resumed run has written its metrics anew."""
        self.data = RunData.open(self.path, self.name)
        self._identity, self._offset, self._rest = identity, 0, b""
        self.version += 1

    def _look_at(self, directory: RunDirectory, size: int) -> None:
        self.data.add(sampled_records(directory.metrics_path, size, FIRST_LOOK))
        self.version += 1

    def _load_whole(self) -> None:
        """Reads the whole file beside what is shown, then shows it instead."""
        time.sleep(FIRST_PAUSE)
        data = RunData.open(self.path, self.name)
        size = data.directory.metrics_path.stat().st_size
        self._offset, self._rest = 0, b""
        while self._offset < size:
            self._read_on(data, min(size, self._offset + CHUNK))
            time.sleep(PAUSE)
        with self.lock:
            self.data = data
            self._loading = False
            self.version += 1

    def _read_on(self, data: RunData, stop: int) -> bool:
        """Adds the records up to byte `stop`, if any; what is cut off there is kept for the next time."""
        with data.directory.metrics_path.open("rb") as file:
            file.seek(self._offset)
            block = file.read(stop - self._offset)
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""  # its end will be no record, and is left out
        records = [record for line in lines if (record := parse_record(line)) is not None]
        data.add(records)
        return bool(records)

    def _renew_closing(self, directory: RunDirectory) -> None:
        try:
            changed = directory.closing_path.stat().st_mtime
        except OSError:
            return
        if changed != self._closing_time:
            self._closing_time = changed
            self.data.closing = RunData.open(self.path, self.name).closing
            self.version += 1


def sampled_records(path: Path, size: int, count: int) -> Iterator[dict[str, Any]]:
    """Yields records from evenly spaced places of a file, the first and the last among them, in order."""
    last_step = -1
    with path.open("rb") as file:
        for number in range(count + 1):
            for line in _lines_at(file, number * size // count, size):
                record = parse_record(line)
                if record is not None and record["step"] > last_step:
                    last_step = record["step"]
                    yield record


def _lines_at(file: BinaryIO, place: int, size: int) -> list[bytes]:
    """Returns two lines of a file: those that begin behind `place`, or its first or its last ones."""
    if place >= size:
        file.seek(max(0, size - LONGEST_LINE))
        return file.read().split(b"\n")[-3:]
    file.seek(place)
    if place:
        file.readline(LONGEST_LINE)  # the rest of a line
    return [file.readline(LONGEST_LINE), file.readline(LONGEST_LINE)]
