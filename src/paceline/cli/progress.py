"""What commands other than `train` show while they work: a bar on a terminal, plain lines elsewhere.

Everything goes to stderr, so that figures on stdout can be piped; `--quiet` leaves it out.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Seconds between two lines where there is no terminal.
LINE_SECONDS = 10.0

# Columns of a terminal below which a bar is left out.
NARROW = 60

ShowStep = Callable[[int, int, str], None]  # step, of how many, text to show


def announce(text: str, quiet: bool = False) -> None:
    """Prints what is about to happen, and where it is written."""
    _console(quiet).print(text, markup=False)


@contextmanager
def step_progress(title: str, quiet: bool = False) -> Iterator[ShowStep]:
    """Shows steps: a bar with the time left, or as lines the first, the last and one every few seconds."""
    console = _console(quiet)
    if not console.is_terminal or console.is_dumb_terminal:
        shown = time.monotonic()

        def show_line(step: int, total: int, text: str) -> None:
            nonlocal shown
            if step in (1, total) or time.monotonic() - shown >= LINE_SECONDS:
                shown = time.monotonic()
                console.print(f"{step:>5}/{total}  {text}", markup=False)

        yield show_line
        return
    bar = [BarColumn(bar_width=None)] if console.width >= NARROW else []
    columns = (TextColumn("{task.description}"), *bar, MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=console, disable=quiet) as progress:
        task = progress.add_task(title, total=None, text="")

        def show_bar(step: int, total: int, text: str) -> None:
            progress.update(task, completed=step, total=total, text=text)

        yield show_bar


@contextmanager
def working(title: str, quiet: bool = False) -> Iterator[None]:
    """Shows what is being done, and for how long; without a terminal a line every few seconds."""
    console = _console(quiet)
    if quiet:
        yield
        return
    if not console.is_terminal or console.is_dumb_terminal:
        done = threading.Event()
        began = time.monotonic()

        def say() -> None:
            while not done.wait(LINE_SECONDS):
                console.print(f"{title}: {time.monotonic() - began:.0f} s", markup=False)

        threading.Thread(target=say, daemon=True).start()
        try:
            yield
        finally:
            done.set()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(title, total=None)
        yield


def _console(quiet: bool) -> rich.console.Console:
    return rich.console.Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
