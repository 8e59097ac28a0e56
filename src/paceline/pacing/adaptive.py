"""The adaptive pacer: runs the strategy with the most expected tokens per second, chosen every few steps.

    observe ──▶ pending ──▶ blocks ──┬──▶ cost, acceptance ──▶ rates ──┬──▶ incumbent or trial ──▶ decision
                                     └──▶ guard ───────────────────────┘

Acceptance is estimated in `acceptance.py`, seconds in `cost.py`, and `rates.py` combines both. The
*incumbent* is the best strategy so far; a *trial* interrupts it for a few steps. Five rules hold:

- hysteresis: another strategy replaces the incumbent only if it promises a margin more, catching up included;
  where a rollout begins, the incumbent is plain decoding;
- guard: a drafter that measured slower than plain decoding is dropped, whatever its expected rate
  (`guard.py`);
- trials of drafters: one that does not run is tried now and then (`trials.py`; the wait after a failure:
  `drafter_record.py`);
- timing trials: a strategy that might be best is timed where it never ran (`trials.py`);
- determinism: choices follow from the moments and observations passed in, in their order, and the seed;
  nothing else is read.

Times are shared by all workloads; everything else is kept per workload (`workload.py`).
"""

from collections.abc import Sequence
from itertools import zip_longest

from paceline.pacing.blocks import Block, BlockSummary, split_into_blocks
from paceline.pacing.cost import CostModel
from paceline.pacing.guard import Guard, lost_seconds
from paceline.pacing.rates import Rates
from paceline.pacing.settings import PacingSettings
from paceline.pacing.situation import Situation, context_class, is_new_rollout, situation_of
from paceline.pacing.strategy import PLAIN, TRAIN, Decision, Moment, Observation, StepTime, Strategy
from paceline.pacing.trials import Outlook, Trial
from paceline.pacing.workload import Workload


class AdaptivePacer:
    """A `Pacer` that learns times and acceptance from what it observes."""

    def __init__(self, settings: PacingSettings) -> None:
        self.settings = settings
        self.steps = 0
        self._strategies = strategies_by_drafter(settings.strategies)
        queries = sorted({1, *(strategy.queries for strategy in settings.strategies)})
        self.cost = CostModel(settings.buckets, queries, settings.catch_up, settings.tuning)
        self._workloads: dict[str, Workload] = {}
        # The workload of the last decision.
        self.workload = self._workload(TRAIN)
        self._guard = Guard(settings.tuning)
        self._pending: list[Observation] = []
        self._incumbent = PLAIN
        # The trial whose outcome is awaited.
        self._awaited_trial: Trial | None = None
        # The current decision, the steps that it still holds for, and the moment it was made for.
        self._decision = Decision(PLAIN)
        self._steps_left = 0
        self._decided_for: Moment | None = None
        self._decided_key: tuple[str, int, int, int] | None = None
        # The moment of the last step.
        self._moment: Moment | None = None

    # -- The protocol (strategy.py) --------------------------------------------------------------------------

    def choose(self, moment: Moment) -> Decision:
        self.steps += 1
        self._steps_left -= 1
        if self._steps_left < 0 or (
            moment is not self._moment and self._decision_key(moment) != self._decided_key
        ):
            self._decide(moment)
        self._moment = moment
        return self._decision

    def observe(self, observation: Observation) -> None:
        self._pending.append(observation)

    def untimed(self) -> Sequence[Strategy]:
        return () if self.cost.knows_times else (PLAIN, *self.settings.strategies)

    def take_times(self, times: Sequence[StepTime]) -> None:
        steps = self.settings.tuning.timing_steps
        for timed in times:
            strategy = timed.strategy
            self.cost.update_verify(timed.running, strategy.queries, 0.0, timed.verify_seconds, steps)
            if strategy.count:
                drafting = strategy.drafter, strategy.count, timed.running, timed.draft_seconds
                self.cost.update_draft(*drafting, steps)

    def forget_times(self) -> None:
        """Drops times, and pending observations measured in them; acceptance stays."""
        self.cost.clear()
        self._pending.clear()
        self._guard.clear()
        self._awaited_trial = None
        self._incumbent = PLAIN
        self._steps_left = 0

    # -- State -----------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """Returns times and acceptance as of the last decision, for a resumed run to start from.

        They are in JSON's types. Pending observations stay pending: learning them here would cut blocks
        elsewhere, and saving would change choices.
        """
        return {
            "cost": self.cost.state(),
            "acceptance": {
                drafter: [
                    {"workload": name, **entry}
                    for name, workload in self._workloads.items()
                    for entry in workload.records[drafter].acceptance.state()
                ]
                for drafter in self._strategies
            },
        }

    def load_state(self, state: dict) -> None:
        """Restores what `state` returned; drafters that this run does not have are ignored."""
        self.cost.load_state(state["cost"])
        for drafter in self._strategies:
            by_workload: dict[str, list[dict]] = {}
            for entry in state["acceptance"].get(drafter, ()):
                # Files of earlier versions have no workload: rollouts and evaluations share their counts.
                by_workload.setdefault(entry.get("workload", TRAIN), []).append(entry)
            for name, entries in by_workload.items():
                self._workload(name).records[drafter].acceptance.load_state(entries)

    def _workload(self, name: str) -> Workload:
        if name not in self._workloads:
            self._workloads[name] = Workload(self.settings, self.cost, self._strategies)
        return self._workloads[name]

    # -- Deciding --------------------------------------------------------------------------------------------

    def _decision_key(self, moment: Moment) -> tuple[str, int, int, int]:
        """Returns the key of a decision: the decision holds while its key stays the same."""
        bucket = self.cost.verify_times.bucket(moment.running)
        return moment.workload, bucket, context_class(moment.context), moment.max_queries

    def _decide(self, moment: Moment) -> None:
        self._learn_pending()
        self.workload = self._workload(moment.workload)
        if is_new_rollout(self._decided_for, moment, self.settings.tuning.new_rollout_factor):
            self._begin_rollout()
        self._decided_for = moment
        self._decided_key = self._decision_key(moment)
        rates = self._expected_rates(moment)
        awaited = self._awaited_trial
        if awaited is not None and self._is_trial_under_way(moment):
            self._decide_on_trial(awaited, moment, rates)
            return
        self._conclude_trial_if_over(rates)
        where = situation_of(moment.running, moment.context)
        self._reset_backoff_if_doing_well(where)
        slow = self._guard.slow_blocks(self.cost)
        is_plain_measured = self.cost.is_measured(moment.running, PLAIN.queries, moment.context)
        reason = "best"
        if slow and is_plain_measured:
            self._leave_incumbent(where, slow)
            rates = self._expected_rates(moment)
            reason = "guard"
        self._settle_on(self._preferred(rates))
        trial = self._start_trial(moment, rates, ask_for_plain=bool(slow) and not is_plain_measured)
        if trial is not None:
            self._decide_on_trial(trial, moment, rates)
        else:
            self._decide_on_incumbent(reason, moment, rates)

    def _decide_on_trial(self, trial: Trial, moment: Moment, rates: Rates) -> None:
        self._set_decision(trial.strategy, "trial", moment, rates)
        self._steps_left = trial.steps_left(self.steps) - 1

    def _decide_on_incumbent(self, reason: str, moment: Moment, rates: Rates) -> None:
        """Runs the incumbent; decides again soon if a measurement is pending."""
        self._set_decision(self._incumbent, reason, moment, rates)
        tuning = self.settings.tuning
        is_waiting = self._awaited_trial is not None or not self.cost.is_measured(
            moment.running, self._incumbent.queries, moment.context
        )
        self._steps_left = (tuning.short_decision_steps if is_waiting else tuning.decision_steps) - 1

    def _set_decision(self, strategy: Strategy, reason: str, moment: Moment, rates: Rates) -> None:
        expected = rates.get(strategy, 0.0)
        self._decision = Decision(strategy, moment.running, moment.context, expected, reason, moment.workload)

    def _expected_rates(self, moment: Moment) -> Rates:
        return self.workload.rates.expected(moment, self.steps, self._decision.strategy.drafter)

    def _begin_rollout(self) -> None:
        """Starts from plain decoding: the last rollout's tail predicts little, and drafters must catch up."""
        self._awaited_trial = None
        self._decision = Decision(PLAIN)
        self._settle_on(PLAIN)
        self.workload.begin_rollout()

    # -- The incumbent and the guard -------------------------------------------------------------------------

    def _preferred(self, rates: Rates) -> Strategy:
        """Returns the best strategy if it promises enough, else the incumbent or, if not allowed, `PLAIN`."""
        best = max(rates, key=rates.__getitem__)
        if rates[best] > self._rate_to_beat(rates):
            return best
        return self._incumbent if self._incumbent in rates else PLAIN

    def _rate_to_beat(self, rates: Rates) -> float:
        return rates.get(self._incumbent, 0.0) * (1 + self.settings.margin)

    def _settle_on(self, strategy: Strategy) -> None:
        if strategy.drafter != self._incumbent.drafter:
            self._guard.clear()
        self._incumbent = strategy

    def _reset_backoff_if_doing_well(self, where: Situation) -> None:
        """Resets the waits of the incumbent's drafter, if it is as fast as plain decoding."""
        if self._incumbent.count and self._guard.is_doing_well(self.cost, where):
            self.workload.records[self._incumbent.drafter].reset_backoff(where, self.steps)

    def _leave_incumbent(self, where: Situation, slow: list[BlockSummary]) -> None:
        """Returns to plain decoding and suspends the drafter here, and where else the slow blocks lost time.

        Its acceptance restarts from these blocks alone.
        """
        record = self.workload.records[self._incumbent.drafter]
        columns = zip_longest(*(block.accepted_at for block in slow), fillvalue=0)
        accepted_at = tuple(sum(column) for column in columns)
        record.acceptance.restart(where, sum(block.drafts for block in slow), accepted_at)
        by_situation: dict[Situation, list[BlockSummary]] = {where: []}
        for block in slow:
            by_situation.setdefault(block.situation, []).append(block)
        for there, blocks in by_situation.items():
            if there == where or lost_seconds(blocks, self.cost) > 0:
                record.suspend(there, self.steps)
        self.workload.planner.charge(record, lost_seconds(slow, self.cost))
        self._settle_on(PLAIN)

    # -- Trials ----------------------------------------------------------------------------------------------

    def _is_trial_under_way(self, moment: Moment) -> bool:
        trial = self._awaited_trial
        return (
            trial is not None
            and trial.steps_left(self.steps) > 0
            and trial.strategy.queries <= moment.max_queries
        )

    def _start_trial(self, moment: Moment, rates: Rates, ask_for_plain: bool) -> Trial | None:
        """Starts the trial that is due, unless another one's outcome is awaited; returns it, if any."""
        if self._awaited_trial is not None:
            return None
        trial = self._next_trial(moment, rates, ask_for_plain)
        if trial is not None:
            self._awaited_trial = trial
            self.workload.latest_trial = trial
        return trial

    def _next_trial(self, moment: Moment, rates: Rates, ask_for_plain: bool) -> Trial | None:
        """Returns the trial to start now, of plain decoding's time if the guard asks for it, or none."""
        active = self._decision.strategy.drafter
        outlook = Outlook(moment, self.steps, self.workload.elapsed, self._incumbent, active, rates)
        if ask_for_plain and self._incumbent.count:
            return self.workload.planner.plain_timing(outlook)
        return self.workload.planner.next_trial(outlook)

    def _conclude_trial_if_over(self, rates: Rates) -> None:
        """Concludes a trial that is over; its drafter backs off unless it promises enough now."""
        trial = self._awaited_trial
        if trial is None or not trial.is_over(self.steps, self.settings.tuning.max_report_delay_steps):
            return
        self._awaited_trial = None
        if trial.record is None or trial.where is None:
            return  # its time is known now
        own = [rate for strategy, rate in rates.items() if strategy.drafter == trial.strategy.drafter]
        if max(own, default=0.0) > self._rate_to_beat(rates):
            trial.record.reset_backoff(trial.where, self.steps)
        else:
            trial.record.back_off(trial.where, self.steps)

    # -- Learning --------------------------------------------------------------------------------------------

    def _learn_pending(self) -> None:
        pending = self._pending
        self._pending = []
        for block in split_into_blocks(pending):
            self._learn(block)

    def _learn(self, block: Block) -> None:
        """Updates times and acceptance with a block, charges a trial for its losses and informs the guard."""
        workload = self._workload(block.workload)
        trial = workload.latest_trial if block.is_trial else None
        workload.elapsed += block.seconds
        self.cost.update(block)
        self._learn_acceptance(block, trial)
        if trial is not None:
            workload.planner.charge(trial.record, block.lost_seconds(trial.baseline))
            trial.reported += block.steps
        elif block.strategy.count and block.strategy.drafter == self._incumbent.drafter and block.clean:
            self._guard.add(block.summary())

    def _learn_acceptance(self, block: Block, trial: Trial | None) -> None:
        """Adds the block's drafts; in a drafter's trial the first new ones make earlier ones stale."""
        if trial is not None and trial.record is not None and not trial.reported:
            trial.record.acceptance.fade(block.situation, self.settings.tuning.stale_weight)
        if block.strategy.count and block.drafts:
            acceptance = self._workload(block.workload).records[block.strategy.drafter].acceptance
            acceptance.update(block.situation, block.drafts, block.accepted_at, block.steps)


def strategies_by_drafter(strategies: tuple[Strategy, ...]) -> dict[str, list[Strategy]]:
    """Returns each drafter's strategies, drafters by name and strategies by their number of tokens."""
    by_drafter: dict[str, list[Strategy]] = {}
    for strategy in sorted(strategies, key=lambda s: (s.drafter, s.count)):
        by_drafter.setdefault(strategy.drafter, []).append(strategy)
    return by_drafter
