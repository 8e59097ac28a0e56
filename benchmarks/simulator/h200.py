"""Our own measurements on one H200, and vLLM's on the same kind of machine."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.simulator import points as measured
from benchmarks.simulator.check import FIT, PREDICTION, Check, Section
from benchmarks.simulator.fit import CUBLAS_ROWS
from benchmarks.simulator.least_squares import fit_positive
from benchmarks.simulator.points import (
    AttentionPoint,
    ExpertPoint,
    GemmPoint,
    KernelPoint,
    Measurements,
    RestPoint,
    RolloutPoint,
    StepPoint,
)
from benchmarks.simulator.predict import (
    predict_kernel,
    predict_ratio,
    predict_step,
    simulate_rollout,
    step_cost,
    step_seconds_by_running,
    tail_seconds,
)
from paceline.simulate.deployment import ENGINES
from paceline.simulate.hardware import Hardware

TITLES = {"paceline": "Paceline's steps and rollouts", "vllm": "vLLM 0.26 on the same shape"}
SCALES = {"µs": 1e6, "ms": 1e3, "s": 1.0, "x": 1.0}


def our_measurements(extra: Sequence[Path] = ()) -> Measurements:
    """Loads our H200 points, oldest file first, and further ones."""
    ours = sorted(measured.MEASUREMENTS.glob("h200-*.json"))
    return measured.merged([measured.load_measurements(path) for path in [*ours, *extra]])


def _check(what: str, seconds: float, predicted: float, unit: str, use: str) -> Check:
    kind = FIT if use == measured.FIT else PREDICTION
    return Check(what, seconds * SCALES[unit], predicted * SCALES[unit], unit, kind)


def kernel_section(hardware: Hardware, points: Measurements) -> Section:
    # The engine does not use cuBLAS for fewer rows.
    gemms = [p for p in points.gemms if p.kernel != "cublas" or p.rows >= CUBLAS_ROWS]
    kernels: list[KernelPoint] = [*gemms, *points.attention, *points.experts, *points.rest]
    checks = [
        _check(_kernel_name(p), p.seconds, predict_kernel(hardware.kernels, p), "µs", p.use) for p in kernels
    ]
    return Section("Kernels", f"{points.device}, {points.software}, {points.date}", tuple(checks))


def _kernel_name(p: KernelPoint) -> str:
    match p:
        case GemmPoint():
            (width, depth, _), *more = p.weights
            name = "all products of Qwen3-8B" if more else f"{width} x {depth}"
            return f"GEMM {p.precision} {name}, {p.rows} rows"
        case AttentionPoint():
            return f"attention, {_attention_name(p)}" + (f", {p.queries} queries" if p.queries > 1 else "")
        case ExpertPoint():
            chosen = f"{p.experts_per_token} of {p.experts}"
            return f"experts {chosen}, {p.hidden} x {p.width}, {p.rows} tokens"
        case RestPoint():
            if p.vocab:
                return f"sampler, {p.tokens} x {p.vocab}"
            return f"norms, RoPE, activation, {p.tokens} tokens"


def _attention_name(p: AttentionPoint) -> str:
    context = max(p.contexts)
    if p.new:
        return f"prefill of {p.new} after {context}"
    up_to = "up to " if len(set(p.contexts)) > 1 else ""
    return f"{len(p.contexts)} rows x {up_to}{context} keys"


def step_section(hardware: Hardware, points: Measurements, engine: str) -> Section:
    checks = [
        _check(_step_name(p), p.seconds, predict_step(hardware, p), "ms", p.use)
        for p in points.steps
        if p.engine == engine
    ]
    if engine == "paceline":
        for p in points.ratios:
            what = f"{p.model}: verify over decode, batch {p.rows} x {p.queries} tokens"
            checks.append(_check(what, p.ratio, predict_ratio(hardware, p), "x", p.use))
    for rollout in points.rollouts:
        if rollout.engine == engine:
            checks += _rollout_checks(hardware, rollout)
    return Section(TITLES[engine], f"{points.device}, {points.date}", tuple(checks))


def _step_name(p: StepPoint) -> str:
    if p.prefill:
        what = f"prefill of {p.rows} x {p.prefill} and a first token"
    else:
        what = f"{'verify' if p.queries > 1 else 'decode'} batch {p.rows}, context {p.context}"
        what += f", {p.queries} tokens a row" if p.queries > 1 else ""
    return f"{p.model}: {what}" + ("" if p.layer == "engine" else ", kernels alone")


def _rollout_checks(hardware: Hardware, p: RolloutPoint) -> list[Check]:
    replica = simulate_rollout(hardware, p)
    what = f"{p.model}: rollout of {p.requests} requests, log-normal {p.lengths[0]:g}"
    checks = [_check(what, p.seconds, replica.clock, "s", p.use)]
    if p.tail_seconds:
        tail = tail_seconds(replica, p.requests)
        checks.append(_check(f"{what}: tail", p.tail_seconds, tail, "s", p.use))
    for bound, seconds in p.step_seconds_by_running:
        running = f"{bound // 2 + 1}-{bound}" if bound > 1 else "1"
        predicted = step_seconds_by_running(replica, bound)
        checks.append(_check(f"{what}: mean step, {running} running", seconds, predicted, "ms", p.use))
    return checks


def fit_engine(hardware: Hardware, points: Measurements, name: str) -> tuple[float, float]:
    """Returns (seconds a step, seconds a row) beyond the kernels: two points marked `fit`, two unknowns."""
    steps = [p for p in points.steps if p.engine == name and p.layer == "engine" and not p.prefill]
    seen = [p for p in steps if p.use == measured.FIT]
    kernels = np.array([step_cost(hardware, p.model, "kernels").step(p.rows, 0, p.context) for p in seen])
    rows = np.array([p.rows for p in seen])
    seconds = np.array([p.seconds for p in seen])
    start = np.array([ENGINES[name].step_seconds, max(ENGINES[name].row_seconds, 1e-7)])
    step, row = fit_positive(lambda x: kernels + x[0] + rows * x[1], seconds, start)
    return float(step), float(row)
