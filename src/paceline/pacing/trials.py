"""Trials: short runs of a strategy that measure it, paid from a budget of time.

Two kinds exist. A drafter's trial runs a drafter for a few steps to measure its gain. Its worst case (nothing
accepted, and the drafter's catching up) must fit the rest of the budget, which all drafters share: drafters
that are never right cost no more than that, however many they are, however often they are tried and however
slow they are. The one exception is the first trial of a drafter whose costs were never measured, which cannot
be counted in advance: it is paid from the budget afterwards, before any drafter is tried again. A timing
trial only measures how long a strategy takes, from a budget of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.pacing.cost import CostModel
from paceline.pacing.drafter_record import DrafterRecord
from paceline.pacing.rates import RateModel, Rates
from paceline.pacing.settings import PacingSettings, PacingTuning
from paceline.pacing.situation import Situation, situation_of
from paceline.pacing.strategy import PLAIN, Moment, Strategy


@dataclass
class Trial:
    """`length` steps of a strategy; after them the incumbent runs until they have been reported."""

    strategy: Strategy
    # The incumbent's expected tokens per second meanwhile.
    baseline: float
    length: int
    # The step at which it starts.
    started: int
    # Of the drafter that is tried; None for a timing trial.
    record: DrafterRecord | None = None
    where: Situation | None = None
    # Steps whose outcome has been reported.
    reported: int = 0

    def steps_left(self, step: int) -> int:
        """Returns how many of its steps remain, the one at `step` included; 0 or less if none."""
        return self.started + self.length - step

    def is_over(self, step: int, max_report_delay: int) -> bool:
        """Returns whether all outcomes have been reported, or are so late that they are given up."""
        return self.reported >= self.length or step >= self.started + self.length + max_report_delay


@dataclass
class Budget:
    """The time that trials may lose: a share of all time that has passed."""

    share: float
    # Seconds.
    lost: float = 0.0

    def affordable_steps(
        self, elapsed: float, at_once: float, per_step: float, plain_step: float, tuning: PacingTuning
    ) -> int:
        """Returns the steps of a trial that loses `at_once` seconds and then `per_step` in each step.

        `elapsed` is all time that has passed and `plain_step` a step of plain decoding, both in seconds.
        """
        earned = max(self.share * elapsed, tuning.initial_budget_steps * plain_step)
        left = earned - self.lost - at_once
        if left <= 0:
            return 0
        longest = tuning.max_trial_steps
        return int(min(longest, left / max(per_step, plain_step / longest)))


@dataclass(frozen=True)
class Outlook:
    """The state in which a trial may be started."""

    moment: Moment
    step: int
    # Seconds observed since the pacer was made.
    elapsed: float
    # The strategy that continues unless a trial is started.
    incumbent: Strategy
    # The drafter of the step before, which need not catch up.
    active: str
    # Expected tokens per second; the incumbent and plain decoding are among them.
    rates: Rates

    @property
    def situation(self) -> Situation:
        return situation_of(self.moment.running, self.moment.context)

    @property
    def baseline(self) -> float:
        """The incumbent's expected tokens per second; 0 before any measurement."""
        return self.rates[self.incumbent]

    @property
    def plain_step(self) -> float:
        """The expected seconds of a step of plain decoding."""
        return self.moment.running / self.rates[PLAIN]


class TrialPlanner:
    """Chooses the next trial, if any; only `charge` changes its state."""

    def __init__(
        self,
        settings: PacingSettings,
        cost: CostModel,
        rates: RateModel,
        records: Mapping[str, DrafterRecord],
    ) -> None:
        self._margin = settings.margin
        self._tuning = settings.tuning
        self._cost = cost
        self._rates = rates
        self._records = records
        self.drafter_budget = Budget(settings.trial_share)
        self.timing_budget = Budget(settings.trial_share)

    def charge(self, record: DrafterRecord | None, seconds: float) -> None:
        """Charges lost seconds to a drafter and the drafters' budget, or without a record to timing's."""
        if record is None:
            self.timing_budget.lost += seconds
        else:
            record.lost += seconds
            self.drafter_budget.lost += seconds

    def next_trial(self, outlook: Outlook) -> Trial | None:
        return self.drafter_trial(outlook) or self.timing_trial(outlook)

    # -- Trials of drafters ----------------------------------------------------------------------------------

    def drafter_trial(self, outlook: Outlook) -> Trial | None:
        """Returns a trial of the first drafter that is due, could win, and is affordable at its worst."""
        if outlook.baseline <= 0:
            return None
        for drafter in self.due_drafters(outlook):
            trial = self._trial_of(drafter, outlook)
            if trial is not None:
                return trial
        return None

    def due_drafters(self, outlook: Outlook) -> list[str]:
        """Returns the drafters that may be tried: those that never ran, then by ascending cost so far."""
        due = [
            drafter
            for drafter, record in self._records.items()
            if drafter != outlook.incumbent.drafter and record.is_due(outlook.situation, outlook.step)
        ]
        return sorted(
            due, key=lambda d: (self._records[d].acceptance.drafts_known() > 0, self._records[d].lost)
        )

    def _trial_of(self, drafter: str, outlook: Outlook) -> Trial | None:
        moment = outlook.moment
        optimistic = self._rates.optimistic(drafter, moment, outlook.active)
        if not optimistic or max(optimistic.values()) <= outlook.baseline * (1 + self._margin):
            return None
        worst = self.worst_seconds_per_token(optimistic)
        strategy = self.trial_strategy(drafter, worst, outlook)
        switch = self._cost.switch_seconds(drafter, moment.running, moment.context)
        lost_per_step = moment.running * (worst[strategy] - 1.0 / outlook.baseline)
        affordable = self.drafter_budget.affordable_steps(
            outlook.elapsed, switch, lost_per_step, outlook.plain_step, self._tuning
        )
        if affordable < self._tuning.min_trial_steps:
            return None
        length = min(affordable, self._wanted_steps(moment.running))
        record = self._records[drafter]
        return Trial(strategy, outlook.baseline, length, outlook.step, record, outlook.situation)

    def worst_seconds_per_token(self, optimistic: Rates) -> dict[Strategy, float]:
        """Returns the seconds per token if nothing is accepted and every row emits one token in a step."""
        emitted = self._rates.optimistic_emitted(max(s.count for s in optimistic))
        return {s: float(emitted[s.count]) / rate for s, rate in optimistic.items()}

    def trial_strategy(self, drafter: str, worst: dict[Strategy, float], outlook: Outlook) -> Strategy:
        """Returns the longest proposal with a cheap enough worst case, or else the shortest."""
        cheap = [s for s in worst if worst[s] * outlook.rates[PLAIN] <= self._tuning.max_trial_slowdown]
        if not self._cost.has_drafted(drafter):
            cheap = [s for s in cheap if s.count <= self._tuning.first_trial_tokens]
        if cheap:
            return max(cheap, key=lambda s: s.count)
        return min(worst, key=lambda s: s.count)

    def _wanted_steps(self, running: int) -> int:
        """Returns the steps in which `running` rows make about `trial_drafts` drafts."""
        steps = -(-self._tuning.trial_drafts // running)
        return min(self._tuning.max_trial_steps, max(self._tuning.min_trial_steps, steps))

    # -- Trials of times -------------------------------------------------------------------------------------

    def plain_timing(self, outlook: Outlook) -> Trial:
        """Returns a timing trial of plain decoding for the guard, outside of any budget."""
        return Trial(PLAIN, outlook.baseline, self._tuning.timing_steps, outlook.step)

    def timing_trial(self, outlook: Outlook) -> Trial | None:
        """Returns a timing trial of what would be best if its guessed time were a little too long."""
        candidates = self.untimed_candidates(outlook)
        if not candidates:
            return None
        strategy = max(candidates, key=outlook.rates.__getitem__)
        tokens = outlook.moment.running * self._emitted(strategy, outlook.situation)
        lost_per_step = tokens * (1.0 / outlook.rates[strategy] - 1.0 / outlook.baseline)
        affordable = self.timing_budget.affordable_steps(
            outlook.elapsed,
            self._switch_back_seconds(strategy, outlook),
            lost_per_step,
            outlook.plain_step,
            self._tuning,
        )
        if affordable < self._tuning.timing_steps:
            return None
        return Trial(strategy, outlook.baseline, self._tuning.timing_steps, outlook.step)

    def untimed_candidates(self, outlook: Outlook) -> list[Strategy]:
        """Returns strategies that were never timed here and would win if they were faster than guessed.

        Only those of the incumbent's drafter and plain decoding: drafters' trials cover other drafters.
        """
        moment = outlook.moment
        least = (1 - self._tuning.unmeasured_slack) * (1 + self._margin) * outlook.baseline
        return [
            strategy
            for strategy, rate in outlook.rates.items()
            if strategy != outlook.incumbent
            and strategy.drafter in (outlook.incumbent.drafter, PLAIN.drafter)
            and rate > least
            and not self._cost.is_measured(moment.running, strategy.queries, moment.context)
        ]

    def _emitted(self, strategy: Strategy, where: Situation) -> float:
        if not strategy.count:
            return 1.0
        return float(self._records[strategy.drafter].acceptance.emitted(where)[strategy.count])

    def _switch_back_seconds(self, strategy: Strategy, outlook: Outlook) -> float:
        """Returns the seconds of the incumbent's drafter to catch up afterwards; 0 unless it paused."""
        if strategy.count:
            return 0.0
        moment = outlook.moment
        return self._cost.switch_seconds(outlook.incumbent.drafter, moment.running, moment.context)
