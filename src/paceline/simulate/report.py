"""A simulation as text, JSON and a page that stands alone.

Every form says which parts are measured, fitted or assumed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.plots.align import aligned
from paceline.plots.chart import Axis, Chart, Series
from paceline.plots.document import Section, document
from paceline.simulate.hardware import Origin, Source
from paceline.simulate.outcome import Outcome
from paceline.simulate.scenario import Scenario

SECONDS = Axis("time", "s", low=0.0)


@dataclass(frozen=True)
class Answer:
    """A scenario's outcome beside plain decoding's, on the same lengths."""

    scenario: Scenario
    outcome: Outcome
    plain: Outcome

    @property
    def rollout_speedup(self) -> float:
        """Returns how many times as fast a rollout is as without speculation."""
        return self.plain.rollout_seconds / self.outcome.rollout_seconds

    @property
    def step_speedup(self) -> float:
        """Returns how many times as fast an RL step is as without speculation."""
        return self.plain.step_seconds / self.outcome.step_seconds


def describe(scenario: Scenario) -> str:
    """Returns the scenario in one line."""
    work, split, precision = scenario.workload, scenario.parallelism, scenario.precision
    tokens = scenario.speculation.draft_tokens
    k = str(tokens[0]) if len(tokens) == 1 else f"paced 0..{tokens[-1]}"
    parts = (
        f"{scenario.model.name} ({precision.weights} weights, {precision.kv} KV)",
        f" on {scenario.gpus} x {scenario.hardware.name}, tp {split.tensor}, ep {split.expert}",
        f", {scenario.replicas} replicas, engine {scenario.engine}",
        f"; {work.prompts} prompts x {work.samples_per_prompt} samples, {scenario.mode}",
        ", plain decoding" if scenario.speculation.off else f", k = {k}",
    )
    return "".join(parts)


def text(answer: Answer) -> str:
    """Returns the figures of one answer, for a person."""
    now, plain = answer.outcome, answer.plain
    waiting = (plain.exposed_generation_seconds, now.exposed_generation_seconds)
    rows = [
        ("step", plain.step_seconds, now.step_seconds),
        ("  rollout (first request to last response)", plain.rollout_seconds, now.rollout_seconds),
        ("  generation the learner waits for", *waiting),
        ("  tail (last eighth of the responses)", plain.tail_seconds, now.tail_seconds),
        ("  logprob", plain.stages.logprob, now.stages.logprob),
        ("  train", plain.stages.train, now.stages.train),
        ("  weight sync", plain.stages.sync, now.stages.sync),
    ]
    lines = [describe(answer.scenario), "", f"{'seconds':<46}{'plain':>12}{'this':>12}"]
    lines += [f"{name:<46}{a:>12.2f}{b:>12.2f}" for name, a, b in rows]
    lines += [
        "",
        f"rollout {answer.rollout_speedup:.2f}x, step {answer.step_speedup:.2f}x; "
        f"accept length {now.accept_length:.2f}; "
        f"{now.tokens_per_second:,.0f} tok/s ({plain.tokens_per_second:,.0f} plain)",
        f"generating devices idle {100 * now.idle_share:.0f}% of the time "
        f"({100 * plain.idle_share:.0f}% plain); "
        f"{now.preemptions} preemptions; lag mean {now.mean_lag:.2f}, at most {now.max_lag}",
    ]
    if now.drafter_training_seconds:
        verdict = "fits into" if now.drafter_trains_for_free else "does NOT fit into"
        wanted, idle = now.drafter_training_seconds, now.idle_device_seconds
        lines.append(
            f"training the drafter wants {wanted:.1f} device seconds a step, "
            f"which {verdict} the {idle:.1f} idle ones"
        )
    lines += ["", "who says so:", *provenance_lines(now.provenance)]
    return "\n".join(lines)


def provenance_lines(parts: dict[str, Origin]) -> list[str]:
    """Returns a line for each part, what was measured first."""
    order = list(Source)
    ordered = sorted(parts.items(), key=lambda item: (order.index(item[1].source), item[0]))
    return [f"  {origin.source:<9} {part}: {origin.note}" for part, origin in ordered]


def record(answer: Answer) -> dict:
    """Returns the answer as JSON takes it."""
    scenario = answer.scenario
    return {
        "question": describe(scenario),
        "model": scenario.model.name,
        "hardware": scenario.hardware.name,
        "gpus": scenario.gpus,
        "mode": scenario.mode,
        "draft_tokens": list(scenario.speculation.draft_tokens),
        "rollout_speedup": answer.rollout_speedup,
        "step_speedup": answer.step_speedup,
        "correction": scenario.correction,
        "this": asdict(answer.outcome),
        "plain": asdict(answer.plain),
    }


def write_json(path: Path, answers: list[Answer]) -> None:
    """Writes one record, or a list of them."""
    records = [record(answer) for answer in answers]
    path.write_text(json.dumps(records[0] if len(records) == 1 else records, indent=1) + "\n")


def table(answers: list[Answer], names: list[tuple[str, ...]], keys: tuple[str, ...]) -> str:
    """Returns a sweep with a line for each combination."""
    head = f"{'rollout s':>12}{'step s':>12}{'rollout x':>11}{'step x':>9}{'accept':>8}{'idle':>7}"
    lines = ["".join(f"{key:>12}" for key in keys) + head]
    for answer, values in zip(answers, names, strict=True):
        now = answer.outcome
        lines.append(
            "".join(f"{value:>12}" for value in values)
            + f"{now.rollout_seconds:>12.2f}{now.step_seconds:>12.2f}"
            + f"{answer.rollout_speedup:>11.2f}{answer.step_speedup:>9.2f}"
            + f"{now.accept_length:>8.2f}{100 * now.idle_share:>6.0f}%"
        )
    return "\n".join(lines)


def write_html(
    path: Path, answers: list[Answer], names: list[tuple[str, ...]], keys: tuple[str, ...]
) -> None:
    """Writes a page with the figures and plots of every answer."""
    sections = []
    if len(answers) > 1:
        charts = _sweep_charts(answers, names, keys)
        sections.append(Section("sweep", "All answers", charts=charts, text=table(answers, names, keys)))
    for number, (answer, values) in enumerate(zip(answers, names, strict=True)):
        label = ", ".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True))
        charts = [_tail_chart(answer, number), *_draft_charts(answer, number)]
        title = label or describe(answer.scenario)
        sections.append(
            Section(f"answer-{number}", title, label or "answer", charts=charts, text=text(answer))
        )
    path.write_text(document("What would it give me?", "paceline simulate", sections))


def _tail_chart(answer: Answer, number: int) -> Chart:
    plain, now = answer.plain.timeline, answer.outcome.timeline
    curves = [(np.asarray(line.seconds), np.asarray(line.running, dtype=float)) for line in (plain, now)]
    xs, (plain_running, running) = aligned(curves)
    series = [Series("plain", plain_running, colour=8, dash=1), Series("this", running)]
    title = "Requests running"
    return Chart(f"running-{number}", title, SECONDS, Axis("requests", low=0.0), xs, series)


def _draft_charts(answer: Answer, number: int) -> list[Chart]:
    if answer.scenario.speculation.off:
        return []
    line = answer.outcome.timeline
    axis = Axis("draft tokens", "tokens", low=0.0)
    title = "Draft tokens per step, mean over rows"
    series = [Series("this", line.draft_tokens)]
    return [Chart(f"drafts-{number}", title, SECONDS, axis, line.seconds, series)]


def _sweep_charts(answers: list[Answer], names: list[tuple[str, ...]], keys: tuple[str, ...]) -> list[Chart]:
    """Returns charts of speed-ups along the first key whose values are numbers."""
    axis = next((i for i in range(len(keys)) if _is_axis([values[i] for values in names])), None)
    if axis is None:
        return []
    rollouts = [answer.rollout_speedup for answer in answers]
    steps = [answer.step_speedup for answer in answers]
    return [
        _sweep_chart("Rollout speed-up", rollouts, names, keys, axis),
        _sweep_chart("Step speed-up", steps, names, keys, axis),
    ]


def _sweep_chart(
    title: str, speedups: list[float], names: list[tuple[str, ...]], keys: tuple[str, ...], axis: int
) -> Chart:
    """Returns a chart with a line for each combination of the keys that are not its axis."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for speedup, values in zip(speedups, names, strict=True):
        others = [f"{keys[i]} = {value}" for i, value in enumerate(values) if i != axis]
        lines.setdefault(", ".join(others) or title.lower(), []).append((float(values[axis]), speedup))
    curves = [tuple(np.array(sorted(points)).T) for points in lines.values()]
    xs, columns = aligned(curves)
    series = [
        Series(label, column, colour=number, points=True)
        for number, (label, column) in enumerate(zip(lines, columns, strict=True))
    ]
    y = Axis("times plain decoding", "x")
    return Chart(title.lower().replace(" ", "-"), title, Axis(keys[axis]), y, xs, series, level=1.0)


def _is_axis(values: list[str]) -> bool:
    return len(set(values)) > 1 and all(_is_number(value) for value in values)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
