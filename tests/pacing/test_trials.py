"""Which trial comes next, what it may cost, and when there is none."""

import random
from dataclasses import replace

import pytest

from paceline.pacing.cost import CostModel
from paceline.pacing.drafter_record import DrafterRecord
from paceline.pacing.rates import RateModel
from paceline.pacing.settings import DEFAULT_TUNING, PacingSettings
from paceline.pacing.situation import situation_of
from paceline.pacing.strategy import PLAIN, Moment, Strategy
from paceline.pacing.trials import Budget, Outlook, Trial, TrialPlanner
from tests.pacing.world import BUCKETS

COUNTS = (1, 3, 7)
MOMENT = Moment(4, 300.0)
HERE = situation_of(MOMENT.running, MOMENT.context)
PLAIN_SECONDS = 5e-3


class Bench:
    """A planner and its parts. The machine is idle: verifying takes as long as plain decoding."""

    def __init__(self, *drafters: str, catch_up: float = 0.0) -> None:
        strategies = {d: [Strategy(d, count) for count in COUNTS] for d in drafters}
        self.cost = CostModel(BUCKETS, [1, 2, 4, 8], dict.fromkeys(drafters, catch_up))
        self.records = {d: DrafterRecord(max(COUNTS), random.Random(0)) for d in drafters}
        self.rates = RateModel(self.cost, strategies, self.records)
        settings = PacingSettings(BUCKETS, tuple(s for own in strategies.values() for s in own))
        self.planner = TrialPlanner(settings, self.cost, self.rates, self.records)
        for queries in (1, 2, 4, 8):
            self.cost.update_verify(MOMENT.running, queries, MOMENT.context, PLAIN_SECONDS, 16)

    def outlook(self, incumbent: Strategy = PLAIN, elapsed: float = 100.0, step: int = 0) -> Outlook:
        rates = self.rates.expected(MOMENT, step, incumbent.drafter)
        return Outlook(MOMENT, step, elapsed, incumbent, incumbent.drafter, rates)


def test_rates_are_tokens_over_seconds():
    bench = Bench("eagle")
    assert bench.rates.expected(MOMENT, 0, "") == {PLAIN: pytest.approx(4 / PLAIN_SECONDS)}
    bench.cost.update_draft("eagle", 3, 4, 1e-3, 16)
    for _ in range(100):
        bench.records["eagle"].acceptance.update(HERE, 64, (32, 16, 8), 1)
    rates = bench.rates.expected(MOMENT, 0, "eagle")
    assert rates[Strategy("eagle", 3)] == pytest.approx(4 * (1 + 0.5 + 0.25 + 0.125) / 6e-3, rel=0.03)
    bench.cost.update_switch("eagle", 64e-3)
    behind = bench.rates.expected(MOMENT, 0, "")
    assert behind[Strategy("eagle", 3)] == pytest.approx(rates[Strategy("eagle", 3)] * 6 / 7), (
        "catching up is spread over 64 steps"
    )
    assert set(bench.rates.expected(replace(MOMENT, max_queries=4), 0, "")) == {
        PLAIN,
        Strategy("eagle", 1),
        Strategy("eagle", 3),
    }
    bench.records["eagle"].suspend(HERE, 0)
    assert set(bench.rates.expected(MOMENT, 1, "eagle")) == {PLAIN}


def test_trial_planner_tries_nothing_before_any_measurement():
    bench = Bench("eagle")
    bench.cost.clear()
    assert bench.outlook().rates == {PLAIN: 0.0} and bench.planner.next_trial(bench.outlook()) is None


def test_first_trial_is_short_and_proposes_few_tokens():
    trial = Bench("eagle").planner.drafter_trial(Bench("eagle").outlook())
    assert trial.strategy == Strategy("eagle", 3), "the cost of a token is not known yet"
    assert trial.length == DEFAULT_TUNING.trial_drafts // MOMENT.running


def test_later_trial_proposes_as_many_tokens_as_its_worst_case_allows():
    bench = Bench("eagle")
    bench.cost.update_draft("eagle", 7, 4, 1e-3, 16)
    assert bench.planner.drafter_trial(bench.outlook()).strategy == Strategy("eagle", 7)
    slow = Bench("eagle")
    slow.cost.update_draft("eagle", 3, 4, 4e-3, 16)
    assert slow.planner.drafter_trial(slow.outlook()).strategy == Strategy("eagle", 1), (
        "the shortest, if none"
    )


def test_trial_planner_skips_a_drafter_that_could_not_win():
    bench = Bench("eagle")
    bench.cost.update_draft("eagle", 1, 4, 50e-3, 16)
    assert bench.planner.drafter_trial(bench.outlook()) is None


def test_catching_up_is_charged_before_it_was_measured():
    bench = Bench("model", catch_up=0.1)  # a tenth of decoding 300 tokens: 150 ms
    assert bench.planner.drafter_trial(bench.outlook(elapsed=10.0)) is None, "1% of ten seconds is less"
    assert bench.planner.drafter_trial(bench.outlook(elapsed=100.0)) is not None


def test_due_drafters_are_those_that_never_ran_then_by_cost():
    bench = Bench("a", "b", "c")
    for drafter, lost in (("a", 3.0), ("b", 1.0)):
        bench.records[drafter].acceptance.update(HERE, 8, (0, 0, 0), 1)
        bench.planner.charge(bench.records[drafter], lost)
    assert bench.planner.due_drafters(bench.outlook()) == ["c", "b", "a"]
    assert bench.planner.due_drafters(bench.outlook(Strategy("c", 1)))[0] == "b", "the incumbent is no news"
    bench.records["b"].back_off(HERE, 0)
    assert bench.planner.due_drafters(bench.outlook()) == ["c", "a"]
    assert bench.planner.drafter_budget.lost == 4.0 and bench.planner.timing_budget.lost == 0.0


def test_timing_trial_runs_an_untimed_strategy_that_could_win():
    bench = Bench("eagle")
    bench.cost.clear()
    for queries in (1, 4):
        bench.cost.update_verify(4, queries, 300.0, PLAIN_SECONDS, 16)
    bench.records["eagle"].acceptance.update(HERE, 128, (120, 110, 100), 1)
    outlook = bench.outlook(Strategy("eagle", 3))
    assert bench.planner.untimed_candidates(outlook) == [Strategy("eagle", 7)], "plain decoding was timed"
    trial = bench.planner.timing_trial(outlook)
    assert trial.strategy == Strategy("eagle", 7) and trial.record is None
    assert trial.length == DEFAULT_TUNING.timing_steps
    bench.planner.charge(None, 2.0)
    assert bench.planner.timing_trial(outlook) is None, "1% of 100 seconds is spent"
    bench.planner.charge(None, -2.0)
    bench.cost.update_verify(4, 8, 300.0, PLAIN_SECONDS, 3)
    assert bench.planner.timing_trial(bench.outlook(Strategy("eagle", 3))) is None, "timed by now"


def test_plain_timing_ignores_the_budget():
    bench = Bench("eagle")
    bench.planner.charge(None, 1e6)
    assert bench.planner.plain_timing(bench.outlook()).strategy == PLAIN


@pytest.mark.parametrize(
    "elapsed, lost, at_once, per_step, expected",
    [
        (0.0, 0.0, 0.0, 5e-3, 2),  # two plain steps are there at the beginning
        (0.0, 0.0, 11e-3, 5e-3, 0),
        (10.0, 0.0, 0.0, 10e-3, 10),
        (10.0, 0.05, 0.02, 10e-3, 3),
        (10.0, 0.2, 0.0, 10e-3, 0),
        (10.0, 0.0, 0.0, -1.0, 16),  # what wins is affordable at full length
    ],
)
def test_budget_is_a_share_of_all_time(elapsed, lost, at_once, per_step, expected):
    budget = Budget(share=0.01, lost=lost)
    assert budget.affordable_steps(elapsed, at_once, per_step, 5e-3 * (1 + 1e-9), DEFAULT_TUNING) == expected


def test_trial_is_over_when_its_steps_were_reported_or_given_up():
    trial = Trial(PLAIN, baseline=1.0, length=3, started=10)
    assert [trial.steps_left(step) for step in (10, 12, 13)] == [3, 1, 0]
    assert not trial.is_over(13, max_report_delay=64) and trial.is_over(77, max_report_delay=64)
    trial.reported = 3
    assert trial.is_over(13, max_report_delay=64)
