"""A simulation as text, JSON and a page that stands alone. Every form says which parts are measured, fitted
or assumed.
"""

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from paceline.simulate.hardware import Origin
from paceline.simulate.outcome import Outcome
from paceline.simulate.scenario import Scenario
from paceline.simulate.svg import Line, line_chart


@dataclass(frozen=True)
class Answer:
    """A scenario's outcome beside plain decoding's, on the same lengths."""

    scenario: Scenario
    outcome: Outcome
    plain: Outcome
    correction: float = 1.0  # measured over simulated seconds of a run that this starts from

    @property
    def rollout_speedup(self) -> float:
        return self.plain.rollout_seconds / self.outcome.rollout_seconds

    @property
    def step_speedup(self) -> float:
        return self.plain.step_seconds / self.outcome.step_seconds


def describe(scenario: Scenario) -> str:
    work, split = scenario.workload, scenario.parallelism
    speculation = "plain decoding" if scenario.speculation.off else f"k = {_draft_text(scenario)}"
    return (
        f"{scenario.model.name} ({scenario.precision.weights} weights, {scenario.precision.kv} KV) on "
        f"{scenario.gpus} x {scenario.hardware.name}, "
        f"tp {split.tensor}, ep {split.expert}, {scenario.replicas} replicas, engine {scenario.engine}; "
        f"{work.prompts} prompts x "
        f"{work.samples_per_prompt} samples, {scenario.mode}, {speculation}"
    )


def _draft_text(scenario: Scenario) -> str:
    tokens = scenario.speculation.draft_tokens
    return str(tokens[0]) if len(tokens) == 1 else f"paced 0..{tokens[-1]}"


def text(answer: Answer) -> str:
    now, plain = answer.outcome, answer.plain
    rows = [
        ("step", plain.step_seconds, now.step_seconds),
        ("  rollout (first request to last response)", plain.rollout_seconds, now.rollout_seconds),
        (
            "  generation the learner waits for",
            plain.exposed_generation_seconds,
            now.exposed_generation_seconds,
        ),
        ("  tail (last eighth of the responses)", plain.tail_seconds, now.tail_seconds),
        ("  logprob", plain.stages.logprob, now.stages.logprob),
        ("  train", plain.stages.train, now.stages.train),
        ("  weight sync", plain.stages.sync, now.stages.sync),
    ]
    lines = [describe(answer.scenario), "", f"{'seconds':<46}{'plain':>12}{'this':>12}"]
    lines += [f"{name:<46}{a:>12.2f}{b:>12.2f}" for name, a, b in rows]
    lines += [
        "",
        f"rollout {answer.rollout_speedup:.2f}x, step {answer.step_speedup:.2f}x; accept length "
        f"{now.accept_length:.2f}; "
        f"{now.tokens_per_second:,.0f} tok/s ({plain.tokens_per_second:,.0f} plain)",
        f"generating devices idle {100 * now.idle_share:.0f}% of the time ({100 * plain.idle_share:.0f}% "
        "plain); "
        f"{now.preemptions} preemptions; lag mean {now.mean_lag:.2f}, at most {now.max_lag}",
    ]
    if now.drafter_training_seconds:
        verdict = "fits into" if now.drafter_trains_for_free else "does NOT fit into"
        wanted, idle = now.drafter_training_seconds, now.idle_device_seconds
        lines.append(
            f"training the drafter wants {wanted:.1f} device seconds a step, which {verdict} the {idle:.1f} "
            "idle ones"
        )
    lines += ["", "who says so:", *provenance_lines(now.provenance)]
    return "\n".join(lines)


def provenance_lines(parts: dict[str, Origin]) -> list[str]:
    order = {"measured": 0, "fitted": 1, "assumed": 2}
    ordered = sorted(parts.items(), key=lambda item: (order[item[1].source], item[0]))
    return [f"  {origin.source:<9} {part}: {origin.note}" for part, origin in ordered]


def record(answer: Answer) -> dict:
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
        "correction": answer.correction,
        "this": asdict(answer.outcome),
        "plain": asdict(answer.plain),
    }


def write_json(path: Path, answers: list[Answer]) -> None:
    records = [record(answer) for answer in answers]
    path.write_text(json.dumps(records[0] if len(records) == 1 else records, indent=1) + "\n")


def table(answers: list[Answer], names: list[tuple[str, ...]], keys: tuple[str, ...]) -> str:
    """A sweep, one line a combination."""
    head = (
        "".join(f"{key:>12}" for key in keys)
        + f"{'rollout s':>12}{'step s':>12}{'rollout x':>11}{'step x':>9}{'accept':>8}{'idle':>7}"
    )
    lines = [head]
    for answer, values in zip(answers, names, strict=True):
        now = answer.outcome
        lines.append(
            "".join(f"{value:>12}" for value in values)
            + f"{now.rollout_seconds:>12.2f}{now.step_seconds:>12.2f}{answer.rollout_speedup:>11.2f}{answer.step_speedup:>9.2f}"
            + f"{now.accept_length:>8.2f}{100 * now.idle_share:>6.0f}%"
        )
    return "\n".join(lines)


def tail_chart(answer: Answer) -> str:
    lines = [
        Line("plain", answer.plain.timeline.seconds, answer.plain.timeline.running, dashed=True),
        Line("this", answer.outcome.timeline.seconds, answer.outcome.timeline.running),
    ]
    return line_chart("Requests running", "seconds", "requests", lines)


def write_html(
    path: Path, answers: list[Answer], names: list[tuple[str, ...]], keys: tuple[str, ...]
) -> None:
    body = ["<h1>What would it give me?</h1>"]
    if len(answers) > 1:
        body += [f"<pre>{escape(table(answers, names, keys))}</pre>", *_sweep_charts(answers, names, keys)]
    for answer, values in zip(answers, names, strict=True):
        label = ", ".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True))
        body.append(f"<h2>{escape(label or describe(answer.scenario))}</h2>")
        body += [f"<pre>{escape(text(answer))}</pre>", tail_chart(answer), _draft_chart(answer)]
    style = "body{max-width:52em;margin:2em auto;font-family:sans-serif} pre{overflow-x:auto;font-size:12px} svg{width:100%;height:auto}"
    page = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>paceline simulate</title><style>{style}</style></head><body>'
    path.write_text(page + "\n".join(body) + "</body></html>\n")


def _draft_chart(answer: Answer) -> str:
    if answer.scenario.speculation.off:
        return ""
    line = answer.outcome.timeline
    return line_chart(
        "Draft tokens per step, mean over rows",
        "seconds",
        "draft tokens",
        [Line("this", line.seconds, line.draft_tokens)],
    )


def _sweep_charts(answers: list[Answer], names: list[tuple[str, ...]], keys: tuple[str, ...]) -> list[str]:
    """Speed-ups along the first key whose values are numbers, a line for each combination of the others."""
    axis = next(
        (
            i
            for i in range(len(keys))
            if len({v[i] for v in names}) > 1 and all(_is_number(v[i]) for v in names)
        ),
        None,
    )
    if axis is None:
        return []
    charts = []
    for title, pick in (
        ("Rollout speed-up", lambda a: a.rollout_speedup),
        ("Step speed-up", lambda a: a.step_speedup),
    ):
        series: dict[str, list[tuple[float, float]]] = {}
        for answer, values in zip(answers, names, strict=True):
            label = (
                ", ".join(
                    f"{k} = {v}" for i, (k, v) in enumerate(zip(keys, values, strict=True)) if i != axis
                )
                or title.lower()
            )
            series.setdefault(label, []).append((float(values[axis]), pick(answer)))
        lines = [
            Line(label, *map(tuple, zip(*sorted(points), strict=True))) for label, points in series.items()
        ]
        charts.append(line_chart(title, keys[axis], "times plain decoding", lines, level=1.0))
    return charts


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
