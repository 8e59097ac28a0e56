"""How the figures of `paceline bench` are printed: one line of text for each point."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.bench.acceptance import AcceptancePoint
    from paceline.bench.decode import DecodePoint
    from paceline.bench.kernels.case import KernelPoint
    from paceline.bench.kernels.limits import DeviceLimits
    from paceline.bench.learn import LearnPoint
    from paceline.bench.memory import MemoryPoint
    from paceline.bench.pacing import PacingPoint, PacingResult
    from paceline.bench.rollout import RolloutPoint
    from paceline.bench.speculation import SpeculationPoint
    from paceline.bench.spread import Spread
    from paceline.bench.step_figures import SettingFigures, StepFigures

SPECULATION_HEADER = (
    f"{'batch':>6} {'strategy':>18} {'step ms [low, high]':>26} {'draft':>6} {'accept':>7} "
    f"{'tok/s [low, high]':>24} {'ratio':>6} {'same':>6}"
)
PACING_HEADER = (
    f"{'strategy':>12} {'seconds':>9} {'captures s':>11} {'steps':>7} {'accept':>7} {'same':>6} "
    f"{'pool GB':>8} {'graphs':>7}"
)
KERNELS_HEADER = (
    f"{'kernel':<14} {'size':<40} {'us [low, high]':>28} {'torch us':>10} {'limit us':>10} "
    f"{'of limit':>9} {'error':>8}"
)


def decode_lines(points: list["DecodePoint"]) -> Iterator[str]:
    """Yields the table of `bench decode`."""
    yield (
        f"{'batch':>6} {'verified':>8} {'step ms [low, high]':>26} {'tok/s':>9} {'prefill ms':>11} "
        f"{'first run s':>12}"
    )
    for p in points:
        yield (
            f"{p.batch:>6} {p.proposals:>8} {p.step_ms!s:>26} {p.tokens_per_second:>9.0f} "
            f"{p.prefill_ms:>11.1f} {p.first_run_seconds:>12.1f}"
        )


def rollout_lines(point: "RolloutPoint") -> Iterator[str]:
    """Yields what `bench rollout` found."""
    yield f"{point.requests} requests, {point.tokens} tokens, longest {point.longest}"
    yield (
        f"{point.seconds} s, {point.tokens_per_second:.0f} tok/s; tail {point.tail_seconds:.2f} s; "
        f"first run {point.first_run_seconds:.1f} s"
    )
    accepted = f", accept length {point.accept_length:.2f}" if point.accept_length > 1 else ""
    yield f"{point.decode_steps} steps, {point.preemptions} preemptions{accepted}"
    by_running = ", ".join(f"<={n}: {ms:.2f}" for n, ms in point.step_ms_by_running.items())
    yield f"mean step ms by running requests: {by_running or 'not told, prefills lie between the steps'}"


def acceptance_lines(p: "AcceptancePoint") -> Iterator[str]:
    """Yields the table of `bench acceptance`."""
    yield (
        f"{p.positions} positions, mean TV {p.mean_tv:.3f}; "
        f"a greedy draft would be accepted {p.greedy_draft:.3f} of the time"
    )
    yield f"{'':<14}{'expected per token':>20}{'realised per token':>20}{'accept length':>15}"
    yield (
        f"{'rejection':<14}{p.rejection:>20.3f}{p.realised_rejection:>20.3f}"
        f"{p.accept_length_rejection:>15.2f}"
    )
    yield (
        f"{'shared noise':<14}{p.shared_noise:>20.3f}{p.realised_shared_noise:>20.3f}"
        f"{p.accept_length_shared_noise:>15.2f}"
    )
    yield f"shared noise never accepts less than {p.shared_noise_bound:.3f} here"


def speculation_line(p: "SpeculationPoint") -> str:
    """Returns a row under `SPECULATION_HEADER`."""
    tokens = p.tokens_per_second
    speed = f"{tokens.median:.0f} [{tokens.low:.0f}, {tokens.high:.0f}]"
    costs = f"{p.step_ms!s:>26} {100 * p.draft_share:>5.0f}% {p.accept_length:>7.2f}"
    same = "-" if p.identical is None else f"{100 * p.identical:.0f}%"
    return f"{p.batch:>6} {p.strategy:>18} {costs} {speed:>24} {p.ratio:>6.2f} {same:>6}"


def pacing_line(p: "PacingPoint") -> str:
    """Returns a row under `PACING_HEADER`."""
    return (
        f"{p.name:>12} {p.seconds:>9.3f} {p.capture_seconds:>11.2f} {p.decode_steps:>7} "
        f"{p.accept_length:>7.2f} {100 * p.identical:>5.0f}% {p.pool_gb:>8.2f} {p.graphs:>7}"
    )


def pacing_summary(result: "PacingResult") -> str:
    """Returns how the pacer compares with plain decoding and with the best fixed strategy."""
    best = result.best_fixed
    paced = result.paced
    return (
        f"{result.requests} requests, {result.tokens} tokens, longest {result.longest}; "
        f"paced {result.plain.seconds / paced.seconds:.2f}x plain, "
        f"{best.seconds / paced.seconds:.3f}x the best fixed ({best.name})"
    )


def limits_line(limits: "DeviceLimits") -> str:
    """Returns the rates that the limits of `bench kernels` come from."""
    fp8 = "" if limits.fp8_flops is None else f", {limits.fp8_flops / 1e12:.1f} in FP8"
    return (
        f"limits: {limits.bytes_per_second / 1e9:.0f} GB/s by a copy, "
        f"{limits.flops / 1e12:.3g} TFLOP/s by a square product{fp8}"
    )


def kernel_line(p: "KernelPoint") -> str:
    """Returns a row under `KERNELS_HEADER`."""
    if p.microseconds is None:
        return f"{p.kernel:<14} {p.size:<40} WRONG: differs from torch's result by {p.error:.1e}, not timed"
    own = p.microseconds
    spread = f"{own.median:.1f} [{own.low:.1f}, {own.high:.1f}]"
    torchs = "-" if p.torch_microseconds is None else f"{p.torch_microseconds.median:.1f}"
    limit = share = "-"
    if p.limit_microseconds is not None:
        limit = f"{p.limit_microseconds:.1f}"
        share = f"{100 * p.limit_microseconds / own.median:.0f}%"
    return f"{p.kernel:<14} {p.size:<40} {spread:>28} {torchs:>10} {limit:>10} {share:>9} {p.error:>8.0e}"


def memory_lines(p: "MemoryPoint") -> Iterator[str]:
    """Yields what `bench memory` found, in gigabytes."""
    yield f"{'phase':<10}{'planned GB':>12}{'measured GB':>13}{'plan / measured':>17}"
    for phase in ("rollout", "learning"):
        planned = getattr(p.planned, phase)
        measured = getattr(p.measured, phase)
        yield f"{phase:<10}{planned / 1e9:>12.2f}{measured / 1e9:>13.2f}{planned / measured:>17.3f}"
    asleep = ", asleep while learning" if p.kv_pool_sleeps else ""
    yield (
        f"KV pool {p.kv_tokens} tokens{asleep}; torch reserved {p.reserved / 1e9:.2f} GB at most, "
        f"{p.outside_torch / 1e9:.2f} outside torch; {p.graphs} graphs"
    )
    yield f"last update {p.update_seconds:.2f} s; micro-batches halved {p.micro_batch_halvings} times"


def learn_lines(p: "LearnPoint") -> Iterator[str]:
    """Yields what `bench learn` found."""
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
    """Yields the table of `bench step`, which is Markdown, and what must be said beside it."""
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
        yield f"still to run: {', '.join(figures.missing)}; the same command goes on"


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
    """Returns seconds to the millisecond, and fewer places where they would say nothing."""
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _number(value: float) -> str:
    """Returns three significant digits, but all of a large integer's."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
