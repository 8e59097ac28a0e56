"""What commands other than `train` show while they work: a bar on a terminal, plain lines elsewhere.

Everything goes to stderr, so that figures on stdout can be piped; `--quiet` leaves it out.
"""

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

# Steps between two lines where there is no terminal.
LINE_EVERY = 25

# Columns of a terminal below which a bar is left out.
NARROW = 60

ShowStep = Callable[[int, int, str], None]  # step, of how many, what to say about it


def announce(text: str, quiet: bool = False) -> None:
    """Says what is about to happen, and where it is written."""
    _console(quiet).print(text, markup=False)


@contextmanager
def step_progress(title: str, quiet: bool = False) -> Iterator[ShowStep]:
    """Shows steps: a bar with the time left, or the first step, every 25th and the last as lines."""
    console = _console(quiet)
    if not console.is_terminal or console.is_dumb_terminal:

        def show_line(step: int, total: int, text: str) -> None:
            if step == 1 or step % LINE_EVERY == 0 or step == total:
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
    """Shows that something is going on, and since when; nothing where there is no terminal."""
    console = _console(quiet)
    if quiet or not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(title, total=None)
        yield


def _console(quiet: bool) -> rich.console.Console:
    return rich.console.Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
