"""The pacer's rules on machines that are known exactly: what it leaves, takes up, tries and keeps."""

import json
import random

import pytest

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.rates import RateModel
from paceline.pacing.settings import DEFAULT_TUNING, PacingSettings
from paceline.pacing.strategy import PLAIN, Decision, Moment, Observation, Strategy
from tests.pacing.simulated import head, make_pacer, remembering, speculating, strategies
from tests.pacing.world import BUCKETS, SimulatedDrafter, World, long_tailed, simulate


def test_new_rollout_does_not_begin_with_the_strategy_of_the_last_tail():
    """At the full batch a proposal is 1.5% worse than none, less than what hysteresis or the guard ask for;
    in the tail it wins.
    """
    pacer = AdaptivePacer(PacingSettings(BUCKETS, (Strategy("x", 1),)))

    def play(moment: Moment, seconds: dict[int, float]) -> list[Decision]:
        decisions = []
        for _ in range(300):
            decisions.append(pacer.choose(moment))
            k, rows = decisions[-1].strategy.count, moment.running
            accepted = (rows // 4,) * k
            pacer.observe(
                Observation(
                    decisions[-1], rows, 300.0, 0.0, seconds[k], rows + sum(accepted), rows * k, accepted
                )
            )
        return decisions

    full, tail = (
        (Moment(192, 300.0), {0: 8e-3, 1: 8e-3 * 1.25 * 1.015}),
        (Moment(4, 300.0), {0: 5e-3, 1: 5e-3}),
    )
    for _ in range(2):
        assert all(decision.strategy == PLAIN for decision in play(*full) if decision.reason != "trial")
        assert play(*tail)[-1].strategy.count, "in the tail"


def test_pacer_finds_an_improved_drafter_in_the_next_rollout():
    """As history is when prompts come round again: useless for an epoch, then right."""
    pacer, lengths = make_pacer("history"), long_tailed(64, 100)
    for i in range(8):
        simulate(remembering(lambda d, context, step: 0.02), pacer, lengths, seed=i)
    first, second = (
        simulate(remembering(lambda d, context, step: 0.85), pacer, lengths, seed=i) for i in (8, 9)
    )
    assert (
        speculating(first, len(first.strategies)) > 0.5 and speculating(second, len(second.strategies)) > 0.8
    )


@pytest.mark.parametrize(
    "reopened", [pytest.param(False, id="", marks=pytest.mark.slow), pytest.param(True, id="reopened")]
)
def test_evaluation_changes_no_choice_in_rollouts(reopened):
    """History knows the problems that are trained on and none of those held out. An evaluation begins and
    ends with the same batches as a rollout; the next rollout runs as if it had not happened.
    """
    lengths = long_tailed(128, 60)
    trained, held_out = (remembering(lambda d, context, step, a=a: a) for a in (0.8, 0.02))

    def next_rollout(evaluations: int) -> tuple[float, float]:
        pacer = make_pacer("history")
        for i in range(4):
            simulate(trained, pacer, lengths, seed=i)
        for i in range(evaluations):
            simulate(held_out, pacer, lengths, seed=i, workload="eval")
        if reopened:
            state = json.loads(json.dumps(pacer.state()))
            pacer = make_pacer("history")
            pacer.load_state(state)
        outcome = simulate(trained, pacer, lengths, seed=9)
        return speculating(outcome, 20), outcome.seconds

    (share, seconds), (share_after, seconds_after) = next_rollout(0), next_rollout(4)
    assert share > 0.9 and share_after > 0.9, "it is chosen from the start"
    assert seconds_after < 1.01 * seconds


def test_late_trial_reports_count_for_their_own_workload():
    """Rollouts try a drafter, an evaluation begins and tries it too, then the first outcome arrives."""
    pacer = AdaptivePacer(PacingSettings(BUCKETS, (Strategy("x", 1),)))

    def seen(decision: Decision) -> Observation:
        k = decision.strategy.count
        return Observation(decision, 4, 300.0, 0.0, 5e-3, 4, 4 * k, (0,) * k)

    def until_a_trial(moment: Moment) -> Decision:
        for _ in range(1000):
            decision = pacer.choose(moment)
            if decision.reason == "trial" and decision.strategy.count:
                return decision
            pacer.observe(seen(decision))
        raise AssertionError("no trial")

    late = until_a_trial(Moment(4, 300.0))
    tried = pacer.workload.latest_trial
    until_a_trial(Moment(4, 300.0, workload="eval"))
    another = pacer.workload.latest_trial
    assert tried is not another and tried.reported == another.reported == 0
    pacer.observe(seen(late))
    pacer.choose(Moment(64, 300.0, workload="eval"))
    assert (tried.reported, another.reported) == (1, 0)


def test_tail_failures_do_not_delay_trials_in_the_next_rollout():
    """Half of a rollout is text it knows, the tail is not; both at contexts of one class."""
    world = remembering(lambda d, context, step: 0.85 if context < 250 else 0.0)
    pacer, lengths = make_pacer("history"), long_tailed(64, 100, longest=380)
    rollouts = [simulate(world, pacer, lengths, seed=i) for i in range(4)]
    for outcome in rollouts[1:]:
        assert speculating(outcome, 20) > 0.7 and outcome.strategies[-1] == PLAIN


@pytest.mark.parametrize("running", [1, 8, 64])
def test_pacer_drops_a_collapsed_drafter_within_a_bounded_number_of_steps(running):
    collapse = 400
    world = World(
        {
            "eagle": SimulatedDrafter(
                lambda d, context, step: 0.85 if step < collapse else 0.0, lambda k, bucket: 2.5e-4 * k
            )
        }
    )
    outcome = simulate(world, make_pacer("eagle"), [4000] * running)
    assert all(s.count for s in outcome.strategies[collapse - 50 : collapse]), "it was worth speculating"
    after = outcome.strategies[collapse:]
    left = next(i for i, strategy in enumerate(after) if strategy == PLAIN)
    assert left <= DEFAULT_TUNING.alarm_steps + 2 * DEFAULT_TUNING.decision_steps + 8, left
    assert sum(s.count > 0 for s in after) < 0.06 * len(after), "and it is not believed again soon"


def test_pacer_drops_a_strategy_slower_than_plain_whatever_its_expected_rate(monkeypatch):
    """The model is wrong by a factor of three; the guard goes by what was measured."""
    honest = RateModel._of_drafter

    def three_times_too_fast(self, *args, **kwargs):
        return {strategy: 3.0 * rate for strategy, rate in honest(self, *args, **kwargs).items()}

    monkeypatch.setattr(RateModel, "_of_drafter", three_times_too_fast)
    world = World({"bad": head(0.0, seconds_per_token=4e-4)})  # at best a tenth slower than plain decoding
    pacer = make_pacer("bad")
    outcome = simulate(world, pacer, [3000] * 4)
    longest, current = 0, 0
    for decision in outcome.decisions:
        current = current + 1 if decision.strategy.count else 0
        longest = max(longest, current)
    assert 0 < longest <= DEFAULT_TUNING.guard_steps + 3 * DEFAULT_TUNING.decision_steps
    assert any(decision.reason == "guard" for decision in outcome.decisions)


def test_pacer_chooses_a_drafter_again_when_it_improves():
    world = World(
        {
            "eagle": SimulatedDrafter(
                lambda d, context, step: 0.0 if step < 600 else 0.8, lambda k, bucket: 2.5e-4 * k
            )
        }
    )
    outcome = simulate(
        world, make_pacer("eagle"), [6000] * 4, prompt=2100
    )  # in one context class from start to end
    taken_up = next(
        i for i in range(600, len(outcome.strategies)) if all(s.count for s in outcome.strategies[i : i + 40])
    )
    assert taken_up < 600 + 1200


def test_pacer_finds_the_better_of_two_drafters_and_follows_a_change():
    drafters = {
        "eagle": head(0.6),
        "history": SimulatedDrafter(lambda d, context, step: 0.95 if context > 1024 else 0.3),
    }
    outcome = simulate(World(drafters), make_pacer("eagle", "history"), [4000] * 8)
    named = [s.drafter for s in outcome.strategies]
    assert named[100:180].count("eagle") > 70, "while contexts are short"
    assert named[-100:].count("history") > 90, "when they are long"


@pytest.mark.slow
def test_pacer_does_not_thrash_at_a_boundary():
    """Two strategies within a percent of each other, and a batch that crosses a bucket's boundary at every
    step.
    """
    world = World({"eagle": head(0.12, seconds_per_token=1e-5)})
    steady = simulate(world, make_pacer("eagle"), [1500] * 8)
    assert steady.switches < len(steady.strategies) / 60, steady.switches

    pacer, switches, last = make_pacer("eagle"), 0, PLAIN
    moments = [Moment(running, 300.0) for running in (8, 9)]
    rng = random.Random(0)
    for step in range(2000):
        moment = moments[step % 2]
        decision = pacer.choose(moment)
        k = decision.strategy.count
        accepted = [
            sum(rng.random() < 0.12 for _ in range(moment.running)) if d == 0 else 0 for d in range(k)
        ]
        seconds = world.verify_seconds(moment.running, k + 1, 300.0) * (1 + 0.02 * rng.gauss(0, 1))
        pacer.observe(
            Observation(
                decision,
                moment.running,
                300.0,
                1e-5 * k,
                seconds,
                moment.running + sum(accepted),
                moment.running if k else 0,
                tuple(accepted),
            )
        )
        switches += decision.strategy != last
        last = decision.strategy
    assert switches < 2000 / 40, switches


@pytest.mark.slow
def test_pacer_choices_are_a_function_of_the_recorded_inputs():
    """The same inputs give the same choices, on any rank; another seed tries at other times."""
    world, lengths = World({"x": head(0.3), "y": head(0.0)}), long_tailed(64, 400)
    outcome = simulate(world, make_pacer("x", "y", seed=3), lengths)

    def replay(seed: int) -> list[Strategy]:
        pacer, chosen, decisions = make_pacer("x", "y", seed=seed), [], []
        theirs = {}
        for event in outcome.events:
            if isinstance(event, Moment):
                decisions.append(pacer.choose(event))
                theirs[id(outcome.decisions[len(chosen)])] = decisions[-1]
                chosen.append(decisions[-1].strategy)
            else:
                recorded = Observation(**{**event.__dict__, "decision": theirs[id(event.decision)]})
                pacer.observe(recorded)
        return chosen

    assert replay(3) == outcome.strategies
    assert any(
        simulate(world, make_pacer("x", "y", seed=seed), lengths).strategies != outcome.strategies
        for seed in (4, 5, 6)
    )


def test_saving_changes_no_choice():
    class Saving(AdaptivePacer):
        def choose(self, moment):
            if self.steps % 37 == 0:
                self.state()
            return super().choose(moment)

    world, lengths = World({"x": head(0.3), "y": head(0.6)}, noise=0.05), long_tailed(64, 200)
    settings = PacingSettings(BUCKETS, tuple(strategies("x", "y")), seed=3)
    assert (
        simulate(world, Saving(settings), lengths).strategies
        == simulate(world, AdaptivePacer(settings), lengths).strategies
    )


def test_pacer_state_survives_a_restart():
    world, lengths = World({"eagle": head(0.8)}), long_tailed(64, 200)
    pacer = make_pacer("eagle")
    simulate(world, pacer, lengths)
    resumed = make_pacer("eagle")
    resumed.load_state(json.loads(json.dumps(pacer.state())))
    early = simulate(world, resumed, lengths).strategies[:8]
    assert all(strategy.count for strategy in early), "it starts from what it knew"


def test_pacer_chooses_only_strategies_that_fit():
    world, pacer = World({"eagle": head(0.9)}), make_pacer("eagle")
    moment = Moment(4, 100.0, max_queries=4)
    deepest = 0
    for _ in range(300):
        decision = pacer.choose(moment)
        k = decision.strategy.count
        deepest = max(deepest, k)
        pacer.observe(
            Observation(
                decision,
                4,
                100.0,
                2.5e-4 * k,
                world.verify_seconds(4, k + 1, 100.0),
                4 * (k + 1),
                4 if k else 0,
                (4,) * k,
            )
        )
    assert deepest == 3
    assert pacer.choose(Moment(4, 100.0, max_queries=1)).strategy == PLAIN
