"""What the pacer knows of one workload: how right drafters are in it, and what finding that out has cost.

Training rollouts and evaluations run on the same machine, so they share times. A drafter may be right in one
and never in the other, so each has acceptance, waits and budgets of its own: an evaluation between two
rollouts leaves what is known of these as it is.
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
        """Takes the times that all workloads share, and strategies by drafter in ascending order."""
        rng = random.Random(settings.seed)
        self.records = {
            drafter: DrafterRecord(own[-1].count, rng, settings.tuning) for drafter, own in strategies.items()
        }
        self.rates = RateModel(cost, strategies, self.records, settings.tuning)
        self.planner = TrialPlanner(settings, cost, self.rates, self.records)
        # Seconds observed.
        self.elapsed = 0.0
        # Some of its steps may be reported when it is no longer waited for, or another workload has begun.
        self.latest_trial: Trial | None = None

    def begin_rollout(self) -> None:
        for record in self.records.values():
            record.begin_rollout()
