"""Expected tokens per second of every strategy, from acceptance and cost.

rate(drafter, k) = rows * (1 + a_1 + a_1 a_2 + ... + a_1 .. a_k) / (draft + verify + catching up / payback)
"""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.pacing.acceptance import emitted_by_count
from paceline.pacing.cost import CostModel
from paceline.pacing.drafter_record import DrafterRecord
from paceline.pacing.settings import DEFAULT_TUNING, PacingTuning
from paceline.pacing.situation import situation_of
from paceline.pacing.strategy import PLAIN, Moment, Strategy

Rates = dict[Strategy, float]


class RateModel:
    """The expected rates of strategies; queries only.

    `active` is the drafter of the step before, which need not catch up.
    """

    def __init__(
        self,
        cost: CostModel,
        strategies: Mapping[str, Sequence[Strategy]],
        records: Mapping[str, DrafterRecord],
        tuning: PacingTuning = DEFAULT_TUNING,
    ) -> None:
        """Strategies and records are by drafter, the strategies in ascending order of tokens."""
        self._cost = cost
        self._strategies = strategies
        self._records = records
        self._tuning = tuning

    def expected(self, moment: Moment, step: int, active: str) -> Rates:
        """Returns the tokens per second of the allowed strategies of drafters that have ever run."""
        plain_seconds = self._cost.plain_seconds(moment.running, moment.context)
        if plain_seconds <= 0:
            return {PLAIN: 0.0}  # nothing has been measured yet
        rates = {PLAIN: moment.running / plain_seconds}
        where = situation_of(moment.running, moment.context)
        for drafter, record in self._records.items():
            if record.acceptance.drafts_known() and not record.is_suspended(where, step):
                emitted = record.acceptance.emitted(where)
                rates |= self._of_drafter(drafter, moment, active, emitted, at_worst=False)
        return rates

    def optimistic(self, drafter: str, moment: Moment, active: str) -> Rates:
        """Returns one drafter's rates if nearly all proposals were accepted, at the worst known cost."""
        emitted = self.optimistic_emitted(self._strategies[drafter][-1].count)
        return self._of_drafter(drafter, moment, active, emitted, at_worst=True)

    def optimistic_emitted(self, max_count: int) -> np.ndarray:
        """Returns the tokens per row and step for proposals of 0 ... max_count tokens at that acceptance."""
        return emitted_by_count(np.full(max_count, self._tuning.optimistic_acceptance))

    def _of_drafter(
        self, drafter: str, moment: Moment, active: str, emitted: np.ndarray, at_worst: bool
    ) -> Rates:
        """Returns the rates of one drafter's strategies that fit into a step."""
        own = self._strategies[drafter]
        verify = self._cost.verify_times.seconds(moment.running, moment.context)
        queries = self._cost.verify_times.queries
        draft = self._cost.draft_seconds(drafter, [s.count for s in own], moment.running, at_worst)
        catching_up = 0.0
        if drafter != active:
            switch = self._cost.switch_seconds(drafter, moment.running, moment.context)
            catching_up = switch / self._tuning.switch_payback_steps
        rates = {}
        for strategy, draft_seconds in zip(own, draft.tolist(), strict=True):
            if strategy.queries <= moment.max_queries:
                seconds = draft_seconds + float(verify[queries.index(strategy.queries)]) + catching_up
                rates[strategy] = moment.running * float(emitted[strategy.count]) / seconds
        return rates
