"""The closing check with rollouts whose seconds are made up: when it ends, and what it may claim."""

import random
from types import SimpleNamespace

import pytest

import paceline.certify.closing_check as closing
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.stats import RolloutStats


class Clock:
    """A backend whose rollouts take 1.3 s without and 1.0 s with speculation, and some noise."""

    def __init__(self, noise: float, seed: int = 0) -> None:
        self.now = 0.0
        self.noise = noise
        self.rng = random.Random(seed)
        self.pacer = FixedPacer(Strategy("history", 3))
        self.speculation = self
        self.keeps_tokens = True
        self.rollouts: list[object] = []

    def drafter_state(self) -> dict:
        return {}

    def load_drafter_state(self, state: dict) -> None:
        pass

    def take_stats(self) -> RolloutStats:
        return RolloutStats()

    def perf_counter(self) -> float:
        return self.now

    def roll_out(self) -> list:
        self.rollouts.append(self.pacer)
        self.now += (1.0 if self.pacer is not None else 1.3) * (1 + self.rng.gauss(0.0, self.noise))
        return []

    def check(self, monkeypatch, pairs: int = closing.PAIRS) -> closing.SpeculationCheck:
        monkeypatch.setattr(closing, "time", SimpleNamespace(perf_counter=self.perf_counter))
        return closing.check_speculation(self, self.roll_out, pairs)


def test_closing_check_ends_when_pairs_agree(monkeypatch):
    check = Clock(noise=0.002).check(monkeypatch)
    assert len(check.ratios) == closing.AGREEING_PAIRS and not check.too_noisy
    low, high = check.interval
    assert low < check.ratio < high and high / low < 1.1 and check.record()["ratio_low"] == low


def test_closing_check_runs_all_pairs_if_they_disagree(monkeypatch):
    check = Clock(noise=0.2).check(monkeypatch)
    assert len(check.ratios) == closing.PAIRS
    assert check.interval == (min(check.ratios), max(check.ratios))


def test_closing_check_runs_fewer_pairs_if_asked(monkeypatch):
    check = Clock(noise=0.0).check(monkeypatch, pairs=2)
    assert len(check.ratios) == 2 and check.too_noisy


def test_closing_check_repetitions_do_not_learn_from_another(monkeypatch):
    clock = Clock(noise=0.2)
    pacer = clock.pacer
    clock.check(monkeypatch)
    with_speculation = [used for used in clock.rollouts if used is not None]
    assert len({id(used) for used in with_speculation}) == closing.PAIRS and pacer not in with_speculation
    assert clock.pacer is pacer


@pytest.mark.parametrize("noise", [0.002, 0.03])
def test_ratio_interval_holds_the_true_ratio(monkeypatch, noise):
    """However often it ends early because the pairs happened to agree."""
    low_high = [Clock(noise, seed).check(monkeypatch).interval for seed in range(1000)]
    held = sum(low <= 1.3 <= high for low, high in low_high)
    # 93% less three standard errors of a thousand checks.
    assert held >= 905
