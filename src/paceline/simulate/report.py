"""A simulation's answer as text and JSON. Both state which parts are measured, fitted or assumed."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from paceline.simulate.deployment import HEAD_REQUEST_SECONDS
from paceline.simulate.hardware import Origin, Source
from paceline.simulate.outcome import Outcome
from paceline.simulate.scenario import Scenario, simulate


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
        return self.plain.step_seconds / self.outcome.step_seconds

    @property
    def transfer_share(self) -> float:
        return self.outcome.stages.sync / self.outcome.step_seconds

    @property
    def head_load(self) -> float:
        """Returns how much of a step one core of the head is busy; above 1 it holds the step up."""
        return self.scenario.released.responses * HEAD_REQUEST_SECONDS / self.outcome.step_seconds


def ask(scenario: Scenario) -> Answer:
    """Simulates the scenario, and the same one without speculation beside it."""
    outcome = simulate(scenario)
    plain = outcome if scenario.speculation.off else simulate(scenario.plain())
    return Answer(scenario, outcome, plain)


def describe(scenario: Scenario) -> str:
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
        wanted, idle = now.drafter_training_seconds, now.idle_device_seconds
        lines.append(
            f"training the drafter on every token takes {wanted:.1f} device seconds; {idle:.1f} are idle"
        )
    return "\n".join(lines)


def table(answers: list[Answer], values: list[dict[str, Any]]) -> str:
    head = f"{'rollout s':>12}{'step s':>12}{'rollout x':>11}{'step x':>9}{'accept':>8}{'idle':>7}"
    widths = [max(12, len(key) + 2) for key in values[0]]
    keys = "".join(f"{key:>{width}}" for key, width in zip(values[0], widths, strict=True))
    lines = [keys + head + f"{'transfer':>10}{'head core':>11}"]
    for answer, chosen in zip(answers, values, strict=True):
        now = answer.outcome
        lines.append(
            "".join(f"{value!s:>{width}}" for value, width in zip(chosen.values(), widths, strict=True))
            + f"{now.rollout_seconds:>12.2f}{now.step_seconds:>12.2f}"
            + f"{answer.rollout_speedup:>11.2f}{answer.step_speedup:>9.2f}"
            + f"{now.accept_length:>8.2f}{100 * now.idle_share:>6.0f}%"
            + f"{100 * answer.transfer_share:>9.2f}%{100 * answer.head_load:>10.1f}%"
        )
    return "\n".join(lines)


def provenance_text(answers: list[Answer]) -> str:
    parts = {part: origin for answer in answers for part, origin in answer.outcome.provenance.items()}
    return "\n".join(["where this comes from:", *provenance_lines(parts)])


def provenance_lines(parts: dict[str, Origin]) -> list[str]:
    order = list(Source)
    ordered = sorted(parts.items(), key=lambda item: (order.index(item[1].source), item[0]))
    return [f"  {origin.source:<9} {part}: {origin.note}" for part, origin in ordered]


def as_json(answers: list[Answer]) -> str:
    return json.dumps([_record(answer) for answer in answers], indent=1)


def _record(answer: Answer) -> dict[str, Any]:
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
        "head_load": answer.head_load,
        "correction": scenario.correction,
        "this": asdict(answer.outcome),
        "plain": asdict(answer.plain),
    }
