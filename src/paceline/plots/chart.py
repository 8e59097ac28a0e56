"""A chart as data: what is on its axes, its series, and what is marked. Drawing it is left to others.

A chart has one list of x values that all its series share; a series has None where it has no value.
`plots/page.py` draws charts in a browser.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# Digits of a number that are worth their bytes on a page.
SIGNIFICANT_DIGITS = 6

# Numbers above are left as they are.
LARGEST_ROUNDED = 1e15

Value = float | None
Values = Sequence[Value] | np.ndarray  # NaN in an array is None


@dataclass(frozen=True)
class Axis:
    """What an axis shows, and in which unit; "" for a number that has none."""

    label: str
    unit: str = ""
    log: bool = False
    low: Value = None  # where the axis begins at the latest
    high: Value = None  # where it ends at the earliest


@dataclass(frozen=True)
class Series:
    """One curve: its values, the band around it, and how it is drawn."""

    label: str
    y: Values
    low: Values = ()  # the band's edges; empty: no band
    high: Values = ()
    colour: int = 0  # number in the page's palette
    dash: int = 0  # 0: solid; others: patterns that tell apart what has one colour
    points: bool = False  # a marker at each value
    line: bool = True  # False: markers alone
    stairs: bool = False  # a value holds until the next x


@dataclass(frozen=True)
class Mark:
    """A place on the x axis where something happened."""

    x: float
    label: str


@dataclass(frozen=True)
class Span:
    """A stretch of the x axis with one colour, such as the strategy in use."""

    start: float
    stop: float
    label: str
    colour: int
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart with a title, two axes and a sentence on how to read it."""

    id: str
    title: str
    x: Axis
    y: Axis
    xs: Sequence[float] | np.ndarray
    series: Sequence[Series]
    note: str = ""
    stacked: bool = False
    marks: Sequence[Mark] = field(default_factory=tuple)
    spans: Sequence[Span] = field(default_factory=tuple)
    level: Value = None  # a horizontal line to compare with
    names: Sequence[str] = field(default_factory=tuple)  # of bars, which only pictures have

    @property
    def has_data(self) -> bool:
        """Whether there is a value to draw."""
        return any(np.isfinite(np.array(series.y, dtype=float)).any() for series in self.series)

    @property
    def is_zero(self) -> bool:
        """Whether there is nothing but zeros to draw."""
        return not any(np.nan_to_num(np.array(series.y, dtype=float)).any() for series in self.series)

    def record(self) -> dict[str, Any]:
        """Returns the chart as JSON takes it, with numbers rounded to what a plot can show."""
        return {
            "id": self.id,
            "title": self.title,
            "note": self.note,
            "x": asdict(self.x),
            "y": asdict(self.y),
            "stacked": self.stacked,
            "level": self.level,
            "marks": [asdict(mark) for mark in self.marks],
            "xs": rounded(self.xs),
            "series": [_series_record(series) for series in self.series],
            "spans": [[*rounded((s.start, s.stop)), s.label, s.colour, int(s.faint)] for s in self.spans],
        }


def rounded(values: Values) -> list[Value]:
    """Returns numbers with few digits, None for what is none, and integers where all are whole."""
    numbers = np.array(values, dtype=float)  # None becomes NaN
    finite = np.isfinite(numbers)
    sizes = np.where(finite & (numbers != 0), np.abs(numbers), 1.0)
    small = sizes < LARGEST_ROUNDED
    digits = 10.0 ** np.clip(SIGNIFICANT_DIGITS - 1 - np.floor(np.log10(sizes)), -300, 300)
    short = np.where(small & finite, np.round(np.where(small, numbers, 0.0) * digits) / digits, numbers)
    if finite.all() and small.all() and (short == np.floor(short)).all():
        return short.astype(int).tolist()
    texts: list[Value] = short.tolist()
    for place in np.flatnonzero(~finite):
        texts[place] = None
    return texts


def _series_record(series: Series) -> dict[str, Any]:
    lists = {"y": rounded(series.y), "low": rounded(series.low), "high": rounded(series.high)}
    return vars(series) | lists
