"""A run that grows with its GPUs: what handing weights over, the queue and waiting take of a step.

Prompts per GPU stay the same, so a perfect cluster would keep its step time. Three things do not scale: the
transfer of weights, whose bandwidth falls once it leaves a machine; the head, through which every request and
completion passes; and the tail, since a step waits for the longest of ever more responses.
"""

import dataclasses
from dataclasses import dataclass

from paceline.simulate.deployment import HEAD
from paceline.simulate.questions import Flags, build
from paceline.simulate.report import provenance_lines
from paceline.simulate.scenario import Scenario, provenance, simulate


@dataclass(frozen=True)
class Scale:
    """One number of GPUs."""

    gpus: int
    replicas: int
    step_seconds: float
    transfer_seconds: float
    queue_seconds: float  # of the head's CPU, while replicas generate
    idle_share: float  # of the generating devices' time

    @property
    def transfer_share(self) -> float:
        """Returns the share of a step that handing weights over takes."""
        return self.transfer_seconds / self.step_seconds

    @property
    def head_load(self) -> float:
        """Returns how much of a step one core of the head is busy; above 1 it holds the step up."""
        return self.queue_seconds / self.step_seconds


def scaled(scenario: Scenario) -> Scale:
    """Simulates a scenario and returns what of it does not scale."""
    outcome = simulate(scenario)
    requests = scenario.released.responses
    return Scale(
        scenario.gpus,
        scenario.replicas,
        outcome.step_seconds,
        outcome.stages.sync,
        requests * HEAD.request_seconds,
        outcome.idle_share,
    )


def scale_table(flags: Flags, prompts_per_gpu: int, gpus: list[int]) -> str:
    """Returns a table with one row for each number of GPUs, and who says so."""
    scenarios = [
        build(dataclasses.replace(flags, gpus=count, prompts=prompts_per_gpu * count)) for count in gpus
    ]
    rows = [scaled(scenario) for scenario in scenarios]
    head = f"{'GPUs':>6}{'replicas':>10}{'step s':>10}{'transfer':>10}{'head core':>11}{'idle':>7}"
    lines = [
        f"{row.gpus:>6}{row.replicas:>10}{row.step_seconds:>10.1f}{100 * row.transfer_share:>9.2f}%"
        f"{100 * row.head_load:>10.1f}%{100 * row.idle_share:>6.0f}%"
        for row in rows
    ]
    origins = provenance(scenarios[-1]) | {"queue": HEAD.origin}
    return "\n".join([head, *lines, "", "who says so:", *provenance_lines(origins)])
