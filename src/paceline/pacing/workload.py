"""The pacer's state of one workload: the drafters' acceptance in it, and the cost of their trials.

Training rollouts and evaluations run on the same machine, so they share times. A drafter may be right in one
and never in the other, so each has its own acceptance, waits and budgets: an evaluation between two rollouts
changes nothing for the rollouts.
"""

import random
from collections.abc import Mapping, Sequence

from paceline.pacing.cost import CostModel
from paceline.pacing.drafter_record import DrafterRecord
from paceline.pacing.rates import RateModel
from paceline.pacing.settings import PacingSettings
from paceline.pacing.strategy import Strategy
from paceline.pacing.trials import Trial, TrialPlanner


class Workload:
    """Drafters' records in one workload, and the rates and trials that follow from them."""

    def __init__(
        self, settings: PacingSettings, cost: CostModel, strategies: Mapping[str, Sequence[Strategy]]
    ) -> None:
        """`cost` is shared by all workloads; strategies are by drafter, in ascending order of tokens."""
        rng = random.Random(settings.seed)
        self.records = {
            drafter: DrafterRecord(own[-1].count, rng, settings.tuning) for drafter, own in strategies.items()
        }
        self.rates = RateModel(cost, strategies, self.records, settings.tuning)
        self.planner = TrialPlanner(settings, cost, self.rates, self.records)
        # Seconds observed.
        self.elapsed = 0.0
        # Some of its steps may be reported after it was concluded, or after another workload has begun.
        self.latest_trial: Trial | None = None

    def begin_rollout(self) -> None:
        for record in self.records.values():
            record.begin_rollout()
