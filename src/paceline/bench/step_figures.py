"""The figures of `bench step`: medians of stages over steps and repeats, and ratios to plain steps.

Stages are disjoint and add up to the step: what the metrics name, and what is left of the rollout and of the
step. The first steps compile and capture; they are reported separately and are in no median.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline.bench.spread import Spread
from paceline.bench.step import Cell
from paceline.bench.step_cell import MeasuredCell
from paceline.bench.step_identity import Agreement, compare_with_plain
from paceline.bench.step_settings import PLAIN, Setting

# Parts of a rollout and of a step, with the metric that each is.
ROLLOUT_STAGES = {
    "timing": "time/timing",
    "prefill": "time/prefill",
    "decode": "time/decode",
    "tail": "time/tail",
    "reward wait": "time/reward_wait",
}
OTHER_STAGES = {"learning": "time/learn", "drafter": "time/drafter", "sync": "time/sync"}
STAGES = (*ROLLOUT_STAGES, "rollout rest", *OTHER_STAGES, "rest")

# Other figures of a step; one that no step has is left out.
OTHER_FIGURES = {
    "tokens/s": "time/tokens_per_second",
    "graph capture s": "time/capture",
    "accept length": "speculation/accept_length",
    "decode steps": "rollout/decode_steps",
    "response length": "rollout/length_mean",
    "longest response": "rollout/length_max",
    "reward": "reward/mean",
    "mismatch kl": "mismatch/kl",
    "fell back": "rollout/fell_back",
    "rollout peak GB": "memory/rollout_gb",
    "learning peak GB": "memory/learn_gb",
}


def stage_seconds(metrics: dict[str, float]) -> dict[str, float]:
    """Returns a step's seconds by stage, in the order of `STAGES`; they add up to `time/step`."""
    rollout = {stage: metrics.get(key, 0.0) for stage, key in ROLLOUT_STAGES.items()}
    others = {stage: metrics.get(key, 0.0) for stage, key in OTHER_STAGES.items()}
    return {
        **rollout,
        "rollout rest": metrics["time/rollout"] - sum(rollout.values()),
        **others,
        "rest": metrics["time/step"] - metrics["time/rollout"] - sum(others.values()),
    }


@dataclass(frozen=True)
class SettingFigures:
    """The figures of one setting's complete cells."""

    setting: Setting
    cells: tuple[MeasuredCell, ...]  # by repeat
    step: Spread  # seconds, of the steps after the first ones
    rollout: Spread
    stages: dict[str, Spread]
    others: dict[str, Spread | None]  # None: no step has this figure
    first_step: Spread  # seconds of the very first step
    # How many times as fast as plain, from pairs of the same repeat and step; None: there is no plain cell.
    step_ratio: Spread | None
    rollout_ratio: Spread | None
    agreements: tuple[Agreement, ...]  # with plain's first repeat, by repeat; empty: there is none

    def record(self) -> dict[str, object]:
        """Returns everything, the metrics of every step included, for JSON."""
        return {
            "setting": self.setting.name,
            "overrides": list(self.setting.overrides),
            "step": asdict(self.step),
            "rollout": asdict(self.rollout),
            "stages": {name: asdict(spread) for name, spread in self.stages.items()},
            "others": {name: spread and asdict(spread) for name, spread in self.others.items()},
            "first_step": asdict(self.first_step),
            "step_ratio": None if self.step_ratio is None else asdict(self.step_ratio),
            "rollout_ratio": None if self.rollout_ratio is None else asdict(self.rollout_ratio),
            "agreements": [asdict(agreement) for agreement in self.agreements],
            "cells": [
                {"cell": cell.name, "seconds": cell.seconds, "steps": list(cell.steps)} for cell in self.cells
            ],
        }


@dataclass(frozen=True)
class StepFigures:
    """The whole table."""

    settings: tuple[SettingFigures, ...]
    missing: tuple[str, ...]  # cells that are still to be run
    first_steps: int  # left out of the medians

    def record(self) -> dict[str, object]:
        cell = self.settings[0].cells[0] if self.settings else None
        return {
            "machine": cell and asdict(cell.machine),
            "parameters": cell and cell.parameters,
            "config": cell and cell.config.model_dump(mode="json", exclude={"run": {"root", "name"}}),
            "first_steps": self.first_steps,
            "missing": list(self.missing),
            "settings": [figures.record() for figures in self.settings],
        }

    @property
    def problems(self) -> list[str]:
        """What broke the promise of equal tokens."""
        return [a.problem for figures in self.settings for a in figures.agreements if a.problem]

    @property
    def notes(self) -> list[str]:
        """Why some steps were not compared, by setting."""
        return [
            f"{figures.setting.name}: {agreement.note}"
            for figures in self.settings
            for agreement in figures.agreements
            if agreement.note
        ]


def make_figures(cells: Sequence[Cell], measured: dict[str, MeasuredCell], first_steps: int) -> StepFigures:
    by_setting: dict[Setting, dict[int, MeasuredCell]] = {}
    for cell in cells:
        if cell.name in measured:
            by_setting.setdefault(cell.setting, {})[cell.repeat] = measured[cell.name]
    plain = next((found for setting, found in by_setting.items() if setting.name == PLAIN), {})
    return StepFigures(
        tuple(_setting_figures(setting, found, plain, first_steps) for setting, found in by_setting.items()),
        tuple(cell.name for cell in cells if cell.name not in measured),
        first_steps,
    )


def _setting_figures(
    setting: Setting, found: dict[int, MeasuredCell], plain: dict[int, MeasuredCell], first_steps: int
) -> SettingFigures:
    later = [metrics for cell in found.values() for metrics in cell.steps[first_steps:]]
    stages = [stage_seconds(metrics) for metrics in later]
    others = {name: [m[key] for m in later if key in m] for name, key in OTHER_FIGURES.items()}
    reference = plain[min(plain)] if plain else None
    return SettingFigures(
        setting=setting,
        cells=tuple(found.values()),
        step=Spread.of([metrics["time/step"] for metrics in later]),
        rollout=Spread.of([metrics["time/rollout"] for metrics in later]),
        stages={stage: Spread.of([seconds[stage] for seconds in stages]) for stage in STAGES},
        others={name: Spread.of(values) if values else None for name, values in others.items()},
        first_step=Spread.of([cell.steps[0]["time/step"] for cell in found.values()]),
        step_ratio=_ratio(found, plain, "time/step", first_steps),
        rollout_ratio=_ratio(found, plain, "time/rollout", first_steps),
        agreements=tuple(
            compare_with_plain(cell, reference)
            for cell in found.values()
            if reference is not None and cell is not reference
        ),
    )


def _ratio(
    found: dict[int, MeasuredCell], plain: dict[int, MeasuredCell], key: str, first_steps: int
) -> Spread | None:
    """Returns plain's seconds over this setting's, of the same repeat and step."""
    ratios = [
        theirs[key] / ours[key]
        for repeat in found.keys() & plain.keys()
        for theirs, ours in zip(
            plain[repeat].steps[first_steps:], found[repeat].steps[first_steps:], strict=True
        )
    ]
    return Spread.of(ratios) if ratios else None
