"""How the figures of `paceline bench` are printed: lines of text."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.bench.learn import LearnPoint
    from paceline.bench.rollout import RolloutPoint
    from paceline.bench.spread import Spread
    from paceline.bench.step_figures import SettingFigures, StepFigures


def rollout_lines(point: "RolloutPoint") -> Iterator[str]:
    yield f"{point.requests} requests, {point.tokens} tokens, longest {point.longest}"
    yield (
        f"{point.seconds} s, {point.tokens_per_second:.0f} tok/s; tail {point.tail_seconds:.2f} s; "
        f"first run {point.first_run_seconds:.1f} s"
    )
    accepted = f", accept length {point.accept_length:.2f}" if point.accept_length > 1 else ""
    yield f"{point.decode_steps} steps, {point.preemptions} preemptions{accepted}"
    by_running = ", ".join(f"<={n}: {ms:.2f}" for n, ms in point.step_ms_by_running.items())
    yield f"mean step ms by running requests: {by_running or 'not told, prefills lie between the steps'}"


def learn_lines(p: "LearnPoint") -> Iterator[str]:
    share = "" if p.mfu is None else f", MFU {p.mfu:.1%}"
    yield f"{p.sequences} sequences, {p.tokens} tokens, longest {p.longest}"
    yield (
        f"{p.seconds} s, {p.tokens_per_second:.0f} tok/s{share} "
        "(6 x parameters x tokens + 6 x layers x heads x head dimension x sum of squared lengths)"
    )
    yield (
        f"first update {p.first_seconds:.1f} s; peak {p.peak_bytes / 1e9:.1f} GB; recomputed: {p.recomputed}"
    )
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in vars(p.profile.parts).items())
    yield f"seconds by part: {parts}"


def step_lines(figures: "StepFigures") -> Iterator[str]:
    """Yields the table of `bench step`, which is Markdown, and the notes below it."""
    settings = figures.settings
    if not settings:
        yield "no cell is complete yet"
        return
    rows = [["", *(s.setting.name for s in settings)], *_step_rows(settings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
    machine = settings[0].cells[0].machine
    repeats = ", ".join(f"{s.setting.name} {len(s.cells)}" for s in settings)
    yield ""
    yield (
        f"seconds: median [low, high] over the steps after the first {figures.first_steps} of all repeats "
        f"({repeats}); ratios: plain over this setting, same step and repeat, above 1 is faster"
    )
    yield f"{machine.device}, {machine.dtype}, torch {machine.torch}, Python {machine.python}"
    yield from figures.notes
    if figures.missing:
        yield f"still to run: {', '.join(figures.missing)}; run the same command to continue"


def _step_rows(settings: tuple["SettingFigures", ...]) -> Iterator[list[str]]:
    """Yields a row per figure that some setting has; parts of a rollout are indented."""
    yield ["step s", *(_spread(s.step, _seconds) for s in settings)]
    yield ["ratio, step", *(_spread(s.step_ratio, _times) for s in settings)]
    yield ["rollout s", *(_spread(s.rollout, _seconds) for s in settings)]
    yield ["ratio, rollout", *(_spread(s.rollout_ratio, _times) for s in settings)]
    for stage in settings[0].stages:
        if any(s.stages[stage].high > 0 for s in settings):
            yield [f"{stage} s", *(_spread(s.stages[stage], _seconds) for s in settings)]
    for name in dict.fromkeys(name for s in settings for name in s.others):
        spreads = [s.others.get(name) for s in settings]
        if any(spread is not None and (spread.low or spread.high) for spread in spreads):
            yield [name, *(_spread(spread, _number) for spread in spreads)]
    yield ["first step s", *(_spread(s.first_step, _seconds) for s in settings)]
    yield ["tokens as plain", *("; ".join(dict.fromkeys(map(str, s.agreements))) or "-" for s in settings)]


def _spread(spread: "Spread | None", shown: Callable[[float], str]) -> str:
    """Returns the median and, where there is any, its spread; a dash where there is no figure."""
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return shown(spread.median)
    return f"{shown(spread.median)} [{shown(spread.low)}, {shown(spread.high)}]"


def _seconds(value: float) -> str:
    """Returns seconds to the millisecond, and fewer places where they are not significant."""
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _number(value: float) -> str:
    """Returns three significant digits, but all of a large integer's."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
