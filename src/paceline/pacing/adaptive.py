"""The adaptive pacer: the strategy with the most expected tokens per second, looked at anew every few steps.

    expected(drafter, k) = rows * (1 + a_1 + a_1 a_2 + ... + a_1 .. a_k) / (draft seconds + verify seconds)

Acceptance a_d comes from `acceptance.py`, seconds from `cost.py`. Four rules keep it honest:

- hysteresis: another strategy must promise a margin more (where a rollout begins, than plain decoding), and
pay for catching up;
- guard: a strategy that measured slower than plain decoding over its last steps is left, whatever was
expected of it (`guard.py`);
- trials: a drafter that does not run is tried now and then (`exploration.py`), and a strategy that might be
best is timed where it never ran;
- purity: choices follow from the moments and observations handed in, in their order, and the seed; nothing
else is read.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from statistics import median_low

import numpy as np

from paceline.pacing.acceptance import emitted_by_count
from paceline.pacing.cost import CostModel, context_class
from paceline.pacing.exploration import (
    LONGEST_TRIAL,
    OLD_NEWS,
    Budget,
    DrafterRecord,
    Situation,
    Trial,
    begins_anew,
    situation,
)
from paceline.pacing.guard import Guard, Stretch, lost_seconds
from paceline.pacing.strategy import PLAIN, Decision, Moment, Observation, Strategy

LOOK_EVERY = 16  # steps that a decision stands while the moment stays in its class
LOOK_SOON = 4
PAYBACK_STEPS = 64  # over which a drafter's catching up must pay
TRIAL_DRAFTS, SHORTEST_TRIAL = (
    32,
    2,
)  # a trial of a drafter sees about so many drafts, and lasts at least so many steps
FIRST_TOKENS = 3  # that a drafter proposes at most in its first trial: nobody knows yet what a token costs
TIMED_STEPS, IN_DOUBT = 3, 0.08  # a time that was not measured may be shorter than expected by this part
HOPE = 0.9  # acceptance at every depth that a trial may hope for
# times plain decoding: a trial proposes as many tokens as this allows, since it learns from every depth
TRIAL_COST = 1.25


@dataclass(frozen=True)
class PacingSettings:
    buckets: tuple[int, ...]  # batch sizes that steps are padded to
    strategies: tuple[Strategy, ...]  # beside plain decoding
    seed: int = 0
    margin: float = 0.03
    trial_share: float = 0.01  # of all time, for trials of all drafters together; as much again for timing
    catch_up: Mapping[str, float] = field(
        default_factory=dict
    )  # by drafter that must catch up: its work for a token over the policy's


class AdaptivePacer:
    def __init__(self, settings: PacingSettings) -> None:
        self.settings = settings
        self.counts = sorted({s.count for s in settings.strategies})
        self.cost = self._new_cost_model()
        self.strategies: dict[str, list[Strategy]] = {}
        for strategy in sorted(settings.strategies, key=lambda s: (s.drafter, s.count)):
            self.strategies.setdefault(strategy.drafter, []).append(strategy)
        self.records = {name: DrafterRecord(own[-1].count) for name, own in self.strategies.items()}
        self.trials, self.timing = Budget(settings.trial_share), Budget(settings.trial_share)
        self.elapsed = 0.0  # seconds observed
        self.steps = 0
        self._rng = random.Random(settings.seed)
        self._pending: list[Observation] = []
        self._trial: Trial | None = None
        self._last_trial: Trial | None = None  # some of its steps are seen after it has ended
        self._guard = Guard()
        self._current = PLAIN
        self._decision = Decision(PLAIN)
        self._moment: Moment | None = None
        self._looked_at: Moment | None = None
        self._class: tuple[int, int, int] | None = None
        self._left = 0

    # -- the contract (strategy.py) -------------------------------------------------------------------------------

    def choose(self, moment: Moment) -> Decision:
        self.steps += 1
        self._left -= 1
        if self._left < 0 or (moment is not self._moment and self._class_of(moment) != self._class):
            self._look(moment)
        self._moment = moment
        return self._decision

    def observe(self, observation: Observation) -> None:
        self._pending.append(observation)

    def forget_times(self) -> None:
        """Acceptance stays; what is under way was measured in the old times."""
        self.cost = self._new_cost_model()
        self._pending.clear()
        self._guard.clear()
        self._trial, self._current, self._left = None, PLAIN, 0

    def _new_cost_model(self) -> CostModel:
        return CostModel(
            self.settings.buckets, [1, *(count + 1 for count in self.counts)], self.settings.catch_up
        )

    def state(self) -> dict:
        """What a resumed run starts from: times and acceptance, in JSON's types, as of the last look.

        What came in since is left where it is: digesting it here would cut its blocks elsewhere, and saving
        would change choices.
        """
        return {
            "cost": self.cost.state(),
            "acceptance": {name: record.acceptance.state() for name, record in self.records.items()},
        }

    def load_state(self, state: dict) -> None:
        self.cost.load_state(state["cost"])
        for name, acceptance in state["acceptance"].items():
            if name in self.records:
                self.records[name].acceptance.load_state(acceptance)

    # -- choosing -------------------------------------------------------------------------------------------------

    def _class_of(self, moment: Moment) -> tuple[int, int, int]:
        return self.cost.bucket(moment.running), context_class(moment.context), moment.max_queries

    def _look(self, moment: Moment) -> None:
        self._digest()
        if begins_anew(self._looked_at, moment):
            self._leave_the_tail()
        self._looked_at = moment
        self._class = self._class_of(moment)
        rates = self._expected_rates(moment)
        strategy, reason = self._pick(moment, rates)
        self._decision = Decision(strategy, moment.running, moment.context, rates.get(strategy, 0.0), reason)
        if reason == "trial":
            self._left = self._trial.started + self._trial.length - self.steps - 1
        else:
            waiting = self._trial is not None or not self.cost.knows(
                moment.running, strategy.queries, moment.context
            )  # for what was seen to be read
            self._left = (LOOK_SOON if waiting else LOOK_EVERY) - 1

    def _leave_the_tail(self) -> None:
        """What ran last, or was being tried, was so in another rollout: it must be better than plain decoding
        here, and catch up with new rows.
        """
        self._trial, self._decision = None, Decision(PLAIN)
        self._settle_on(PLAIN)
        for record in self.records.values():
            record.begin_rollout()

    def _pick(self, moment: Moment, rates: dict[Strategy, float]) -> tuple[Strategy, str]:
        where, trial = situation(moment.running, moment.context), self._trial
        if trial is not None and trial.running(self.steps) and trial.strategy.queries <= moment.max_queries:
            return trial.strategy, "trial"
        if trial is not None and trial.over(self.steps):
            self._conclude_trial(trial, rates)
        reason, too_slow = "best", self._guard.too_slow(self.cost)
        if self._current.count and self._guard.does_well(self.cost, where):
            self.records[self._current.drafter].does_well(where, self.steps)
        if too_slow and self.cost.knows(moment.running, 1, moment.context):
            self._leave_current(where, too_slow)
            rates.clear()
            rates |= self._expected_rates(moment)
            reason = "guard"
        best = max(rates, key=rates.__getitem__)
        if rates[best] > rates.get(self._current, 0.0) * (1 + self.settings.margin):
            self._settle_on(best)
        elif self._current not in rates:
            self._settle_on(PLAIN)
        if self._trial is None:
            if (
                too_slow and reason == "best" and self._current.count
            ):  # than a guess at plain decoding's time, so far
                trial = Trial(PLAIN, rates[self._current], TIMED_STEPS, self.steps)
            else:
                trial = self._next_drafter(moment, rates) or self._next_timing(moment, rates)
            if trial is not None:
                self._trial = self._last_trial = trial
                return trial.strategy, "trial"
        return self._current, reason

    def _expected_rates(self, moment: Moment, hope: str = "") -> dict[Strategy, float]:
        """Tokens per second of every strategy allowed now. `hope`: a drafter that is imagined to be good."""
        verify = self.cost.verify(moment.running, moment.context)
        if verify[0] <= 0:
            return {PLAIN: 0.0}  # nothing has been measured yet
        rates = {PLAIN: moment.running / float(verify[0])}
        where = situation(moment.running, moment.context)
        for name, own in self.strategies.items():
            record = self.records[name]
            if name != hope and (record.barred(where, self.steps) or not record.acceptance.drafts_known()):
                continue
            emitted = (
                record.acceptance.emitted(where)
                if name != hope
                else emitted_by_count(np.full(own[-1].count, HOPE))
            )
            draft = self.cost.draft(name, [s.count for s in own], moment.running, at_worst=name == hope)
            catching_up = (
                0.0 if name == self._decision.strategy.drafter else self._switch(name, moment) / PAYBACK_STEPS
            )
            for strategy, draft_seconds in zip(own, draft.tolist(), strict=True):
                if strategy.queries <= moment.max_queries:
                    seconds = (
                        draft_seconds + float(verify[self.cost.queries.index(strategy.queries)]) + catching_up
                    )
                    rates[strategy] = moment.running * float(emitted[strategy.count]) / seconds
        return rates

    # -- the guard ------------------------------------------------------------------------------------------------

    def _leave_current(self, where: Situation, last: list[Stretch]) -> None:
        """What it did last is all that is believed of its drafter, which is left alone for a while where it
        was slow.
        """
        record = self.records[self._current.drafter]
        accepted_at = tuple(
            sum(column) for column in zip_longest(*(s.accepted_at for s in last), fillvalue=0)
        )
        record.acceptance.restart(where, sum(s.drafts for s in last), accepted_at)
        by_situation: dict[Situation, list[Stretch]] = {where: []}
        for stretch in last:
            by_situation.setdefault(stretch.situation, []).append(stretch)
        for there, stretches in by_situation.items():
            if there == where or lost_seconds(stretches, self.cost) > 0:
                record.bar(there, self.steps, self._rng)
        self._charge(record, lost_seconds(last, self.cost))
        self._settle_on(PLAIN)

    def _settle_on(self, strategy: Strategy) -> None:
        if strategy.drafter != self._current.drafter:
            self._guard.clear()
        self._current = strategy

    # -- trials ---------------------------------------------------------------------------------------------------

    def _next_drafter(self, moment: Moment, rates: dict[Strategy, float]) -> Trial | None:
        """The first that is due, could win, and can be afforded even if nothing is accepted; who never ran
        first, then who cost least.
        """
        baseline = rates[self._current]
        if baseline <= 0:
            return None
        where = situation(moment.running, moment.context)
        due = [
            name
            for name, record in self.records.items()
            if name != self._current.drafter and record.due(where, self.steps)
        ]
        for name in sorted(
            due, key=lambda name: (self.records[name].acceptance.drafts_known() > 0, self.records[name].lost)
        ):
            record = self.records[name]
            hoped = {s: rate for s, rate in self._expected_rates(moment, name).items() if s.drafter == name}
            if not hoped or max(hoped.values()) <= baseline * (1 + self.settings.margin):
                continue
            emitted = emitted_by_count(np.full(max(s.count for s in hoped), HOPE))
            per_token = {
                s: float(emitted[s.count]) / rate for s, rate in hoped.items()
            }  # if nothing is accepted
            cheap = [s for s in hoped if per_token[s] * rates[PLAIN] <= TRIAL_COST]
            if not self.cost.has_drafted(name):
                cheap = [s for s in cheap if s.count <= FIRST_TOKENS]
            strategy = max(cheap, key=lambda s: s.count) if cheap else min(hoped, key=lambda s: s.count)
            per_step = moment.running * (per_token[strategy] - 1.0 / baseline)
            length = self.trials.affords(
                self.elapsed, self._switch(name, moment), per_step, moment.running / rates[PLAIN]
            )
            if length >= SHORTEST_TRIAL:
                length = min(length, LONGEST_TRIAL, max(SHORTEST_TRIAL, -(-TRIAL_DRAFTS // moment.running)))
                return Trial(strategy, baseline, length, self.steps, record, where)
        return None

    def _next_timing(self, moment: Moment, rates: dict[Strategy, float]) -> Trial | None:
        """A few steps of what would be best if it took a little less time than expected, where its time was
        never measured.
        """
        baseline = rates[self._current]
        could_win = [
            strategy
            for strategy, rate in rates.items()
            if strategy != self._current
            and strategy.drafter in (self._current.drafter, PLAIN.drafter)
            and rate > (1 - IN_DOUBT) * (1 + self.settings.margin) * baseline
            and not self.cost.knows(moment.running, strategy.queries, moment.context)
        ]
        if not could_win:
            return None
        strategy = max(could_win, key=rates.__getitem__)
        tokens, switch = (
            float(moment.running),
            self._switch(self._current.drafter, moment),
        )  # which must catch up when plain decoding has run
        if strategy.count:
            tokens *= float(
                self.records[strategy.drafter].acceptance.emitted(situation(moment.running, moment.context))[
                    strategy.count
                ]
            )
            switch = 0.0
        per_step = tokens * (1.0 / rates[strategy] - 1.0 / baseline)
        if self.timing.affords(self.elapsed, switch, per_step, moment.running / rates[PLAIN]) < TIMED_STEPS:
            return None
        return Trial(strategy, baseline, TIMED_STEPS, self.steps)

    def _switch(self, drafter: str, moment: Moment) -> float:
        return self.cost.switch(drafter, moment.running, moment.context)

    def _charge(self, record: DrafterRecord | None, seconds: float) -> None:
        """To whoever's trial it was; nobody's: to timing."""
        if record is None:
            self.timing.lost += seconds
        else:
            record.lost += seconds
            self.trials.lost += seconds

    def _conclude_trial(self, trial: Trial, rates: dict[Strategy, float]) -> None:
        self._trial = None
        if trial.record is None:
            return  # its time is known now
        own = max(
            (rate for strategy, rate in rates.items() if strategy.drafter == trial.strategy.drafter),
            default=0.0,
        )
        if own > rates.get(self._current, 0.0) * (1 + self.settings.margin):
            trial.record.does_well(trial.where, self.steps)
        else:
            trial.record.failed(trial.where, self.steps, self._rng)

    # -- what came of it ------------------------------------------------------------------------------------------

    def _digest(self) -> None:
        pending, self._pending = self._pending, []
        for _, block in groupby(pending, key=lambda o: id(o.decision)):
            self._learn(list(block))

    def _learn(self, block: list[Observation]) -> None:
        """From consecutive steps under one decision."""
        first, strategy = block[0], block[0].decision.strategy
        running, context = first.running, first.context
        clean = [o for o in block if not (o.switched or o.disturbed)]
        if clean:
            self.cost.note_verify(
                running, strategy.queries, context, median_low(o.verify_seconds for o in clean), len(clean)
            )
            if strategy.count:
                self.cost.note_draft(
                    strategy.drafter,
                    strategy.count,
                    running,
                    median_low(o.draft_seconds for o in clean),
                    len(clean),
                )
        for o in block:
            if o.switched and not o.disturbed:
                verify = self.cost.verify(running, context)[self.cost.queries.index(strategy.queries)]
                draft = self.cost.draft(strategy.drafter, [strategy.count], running)[0]
                self.cost.note_switch(strategy.drafter, o.seconds - float(verify + draft))
        self.elapsed += sum(o.seconds for o in block)
        drafts = sum(o.drafts for o in block)
        accepted_at = tuple(sum(column) for column in zip(*(o.accepted_at for o in block), strict=True))
        trial = self._last_trial if first.decision.reason == "trial" else None
        if (
            trial is not None and trial.record is not None and not trial.seen
        ):  # not before there is news to count instead
            trial.record.acceptance.fade(situation(running, context), OLD_NEWS)
        if strategy.count and drafts:
            self.records[strategy.drafter].acceptance.note(
                situation(running, context), drafts, accepted_at, len(block)
            )
        if trial is not None:
            # A capture happens once and pays for ever, a prefill is nobody's fault.
            lost = max(0.0, sum(o.seconds - o.tokens / trial.baseline for o in block if not o.disturbed))
            self._charge(trial.record, lost)
            trial.seen += len(block)
        elif strategy.count and strategy.drafter == self._current.drafter and clean:
            rows, gained = sum(o.running for o in clean), sum(o.tokens for o in clean)
            stretch = Stretch(
                len(clean),
                running,
                context,
                sum(o.seconds for o in clean),
                gained / rows * len(clean),
                drafts,
                accepted_at,
            )
            self._guard.note(stretch)
