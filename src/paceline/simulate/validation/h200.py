"""Our own measurements on one H200, and vLLM's on the same kind of machine."""

from pathlib import Path

import numpy as np

from paceline.simulate.deployment import ENGINES
from paceline.simulate.hardware import Hardware
from paceline.simulate.least_squares import fit_positive
from paceline.simulate.points import FIT as SEEN
from paceline.simulate.points import MEASUREMENTS, Measurements, load_measurements, merged
from paceline.simulate.predict import (
    predict_attention,
    predict_experts,
    predict_gemm,
    predict_ratio,
    predict_rest,
    predict_step,
    simulate_rollout,
    step_cost,
    step_seconds_by_running,
    tail_seconds,
)
from paceline.simulate.validation.check import FIT, PREDICTION, Check, Section


def shipped_measurements(extra: list[Path] | None = None) -> Measurements:
    """Every shipped file of H200 points, oldest first, and further ones."""
    return merged(
        [load_measurements(path) for path in [*sorted(MEASUREMENTS.glob("h200-*.json")), *(extra or [])]]
    )


def kind_of(use: str) -> str:
    return FIT if use == SEEN else PREDICTION


def kernel_section(hardware: Hardware, points: Measurements) -> Section:
    checks = []
    for p in points.gemms:
        if p.kernel == "cublas" and p.rows < 65:
            continue  # the engine does not use it there
        name = "all products of Qwen3-8B" if len(p.weights) > 1 else f"{p.weights[0][0]} x {p.weights[0][1]}"
        predicted = predict_gemm(hardware.kernels, p)
        checks.append(
            Check(
                f"GEMM {p.precision} {name}, {p.rows} rows",
                p.seconds * 1e6,
                predicted * 1e6,
                "µs",
                kind_of(p.use),
            )
        )
    for a in points.attention:
        rows, context = len(a.contexts), max(a.contexts)
        what = (
            f"prefill of {a.new} after {context}"
            if a.new
            else f"{rows} rows x {'up to ' if len(set(a.contexts)) > 1 else ''}{context} keys"
        )
        what += f", {a.queries} queries" if a.queries > 1 else ""
        checks.append(
            Check(
                f"attention, {what}",
                a.seconds * 1e6,
                predict_attention(hardware.kernels, a) * 1e6,
                "µs",
                kind_of(a.use),
            )
        )
    for e in points.experts:
        what = f"experts {e.experts_per_token} of {e.experts}, {e.hidden} x {e.width}, {e.rows} tokens"
        checks.append(
            Check(what, e.seconds * 1e6, predict_experts(hardware.kernels, e) * 1e6, "µs", kind_of(e.use))
        )
    for r in points.rest:
        what = (
            f"sampler, {r.tokens} x {r.vocab}" if r.vocab else f"norms, RoPE, activation, {r.tokens} tokens"
        )
        checks.append(
            Check(what, r.seconds * 1e6, predict_rest(hardware.kernels, r) * 1e6, "µs", kind_of(r.use))
        )
    return Section("Kernels", f"{points.device}, {points.software}, {points.date}", tuple(checks))


def step_section(hardware: Hardware, points: Measurements, engine: str) -> Section:
    checks = []
    for p in points.steps:
        if p.engine != engine:
            continue
        where = "" if p.layer == "engine" else ", kernels alone"
        what = (
            f"prefill of {p.rows} x {p.prefill} and a first token"
            if p.prefill
            else f"batch {p.rows}, context {p.context}"
        )
        what = (
            f"verify {what}, {p.queries} tokens a row"
            if p.queries > 1
            else f"decode {what}"
            if not p.prefill
            else what
        )
        checks.append(
            Check(
                f"{p.model}: {what}{where}",
                p.seconds * 1e3,
                predict_step(hardware, p) * 1e3,
                "ms",
                kind_of(p.use),
            )
        )
    if engine == "paceline":
        for r in points.ratios:
            what = f"{r.model}: verify over decode, batch {r.rows} x {r.queries} tokens"
            checks.append(Check(what, r.ratio, predict_ratio(hardware, r), "x", kind_of(r.use)))
    for o in points.rollouts:
        if o.engine != engine:
            continue
        replica = simulate_rollout(hardware, o)
        what = f"{o.model}: rollout of {o.requests} requests, log-normal {o.lengths[0]:g}"
        checks.append(Check(what, o.seconds, replica.clock, "s", kind_of(o.use)))
        if o.tail_seconds:
            checks.append(
                Check(f"{what}: tail", o.tail_seconds, tail_seconds(replica, o.requests), "s", kind_of(o.use))
            )
        for bound, seconds in o.step_seconds_by_running:
            name = (
                f"{what}: mean step, {bound // 2 + 1}-{bound} running"
                if bound > 1
                else f"{what}: mean step, 1 running"
            )
            checks.append(
                Check(
                    name, seconds * 1e3, step_seconds_by_running(replica, bound) * 1e3, "ms", kind_of(o.use)
                )
            )
    title = "Paceline's steps and rollouts" if engine == "paceline" else "vLLM 0.26 on the same shape"
    return Section(title, f"{points.device}, {points.date}", tuple(checks))


def fit_engine(hardware: Hardware, points: Measurements, name: str) -> tuple[float, float]:
    """(seconds a step, seconds a row) beyond the kernels, from the decode steps marked `fit`: two points, two
    unknowns.
    """
    seen = [
        p
        for p in points.steps
        if p.engine == name and p.layer == "engine" and p.use == SEEN and not p.prefill
    ]
    kernels = np.array([step_cost(hardware, p.model, "kernels").step(p.rows, 0, p.context) for p in seen])
    rows = np.array([p.rows for p in seen])
    start = ENGINES[name]
    first = np.array([start.step_seconds, max(start.row_seconds, 1e-7)])
    step, row = fit_positive(
        lambda x: kernels + x[0] + rows * x[1], np.array([p.seconds for p in seen]), first
    )
    return float(step), float(row)
