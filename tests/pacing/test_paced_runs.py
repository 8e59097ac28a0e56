"""A whole run under the adaptive pacer: what it learns is the same as ever, and the pacing is kept with the
run.
"""

import json

import pytest

from paceline.cli.main import app
from paceline.config import load_config
from paceline.engine.engine import Engine
from paceline.learning.learner import Learner
from paceline.loop import train
from paceline.pacing.strategy import PLAIN, Decision, Moment
from paceline.pacing.trace import TraceRow, append_trace, read_trace
from paceline.rollout.sources import LiveRollouts
from paceline.session import Session, open_session
from paceline.tasks.order import ProblemOrder
from paceline.tasks.running_sums import RunningSums
from tests.length_reward import pay_for_length
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config
from tests.page_data import page_data

PACED = (
    "rollout.speculation.pacing=adaptive",
    "rollout.speculation.max_running=0",
    "run.steps=3",
    "eval.every=0",
)
# How the time was spent; under an adaptive pacer that depends on the clock, as `time/` does.
PACE = ("speculation/", "rollout/decode_steps", "rollout/tail_steps")


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


def what_was_learnt(run) -> list[dict]:
    return [{k: v for k, v in record.items() if not k.startswith(PACE)} for record in comparable_metrics(run)]


def test_graphs_are_not_captured_while_the_learner_updates(tmp_path, monkeypatch):
    guards, during, sampling = [], [], []
    make, update, collect = Engine.__init__, Learner.update, LiveRollouts.collect

    def may_capture() -> bool:
        free = guards[0].begin_capture()
        if free:
            guards[0].end_capture()
        return free

    monkeypatch.setattr(
        Engine, "__init__", lambda self, *a, **k: (make(self, *a, **k), guards.append(self.runner.guard))[0]
    )
    monkeypatch.setattr(
        Learner,
        "update",
        lambda *a: (during.append(may_capture()), update(*a), during.append(may_capture()))[1],
    )
    monkeypatch.setattr(LiveRollouts, "collect", lambda *a: (sampling.append(may_capture()), collect(*a))[1])
    train(tiny_config(make_tiny_policy(tmp_path / "policy"), tmp_path, "run", "run.steps=2", "eval.every=0"))
    assert during == [False] * 4 and sampling == [True] * 2


def test_pacing_times_are_kept_by_precision_and_mode(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy")

    def session(*overrides: str) -> Session:
        return open_session(tiny_config(policy, tmp_path, "run", *PACED, *overrides))

    kinds = [(), ("rollout.precision=fp8",), ("rollout.precision=fp8+kv",), ("rollout.deterministic=true",)]
    opened = [session(*overrides) for overrides in kinds]

    def machine(opened: Session) -> str:
        return opened.machine(opened.backend.precision)

    assert len({machine(s) for s in opened}) == len(kinds) and machine(opened[0]) == machine(session())
    base, reduced = opened[:2]
    reduced.backend.fall_back_to_base_precision()
    assert machine(reduced) == machine(base), "what it runs in now, not what the recipe asked for"


def test_pacing_times_are_measured_again_after_a_fall_back(tmp_path):
    session = open_session(
        tiny_config(make_tiny_policy(tmp_path / "policy"), tmp_path, "run", *PACED, "rollout.precision=fp8")
    )
    order = ProblemOrder(session.task.train, 0, 0)
    LiveRollouts(session.sampler, order, 4, 4, session.train_sampling()).collect(1)
    pacer = session.backend.pacer
    accepted = pacer.state()["acceptance"]
    assert pacer.state()["cost"]["verify"]["estimates"]
    session.backend.fall_back_to_base_precision()
    assert not pacer.state()["cost"]["verify"]["estimates"] and pacer.state()["acceptance"] == accepted
    assert pacer.choose(Moment(4, 100.0)).strategy == PLAIN, "nothing is known that could be compared"


def test_pacing_does_not_change_training_and_is_kept_with_the_run(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy")
    paced = train(tiny_config(policy, tmp_path, "paced", *PACED)).summary.run
    fixed = train(tiny_config(policy, tmp_path, "fixed", "run.steps=3", "eval.every=0")).summary.run
    assert what_was_learnt(paced) == what_was_learnt(fixed)
    assert sorted(read_trace(paced / "trace.jsonl")) == [1, 2, 3]

    known = json.loads((paced / "pacing.json").read_text())
    assert known["cost"]["verify"]["estimates"] and "history" in known["acceptance"]
    append_trace(
        paced / "trace.jsonl", 4, [TraceRow(Decision(PLAIN), steps=123456)]
    )  # of a rollout that was never learnt from
    loaded = []
    with pytest.MonkeyPatch.context() as patch:
        from paceline.pacing import adaptive

        real = adaptive.AdaptivePacer.load_state
        patch.setattr(
            adaptive.AdaptivePacer,
            "load_state",
            lambda self, state: (loaded.append(state), real(self, state)),
        )
        train(load_config(str(paced / "config.yaml"), ["run.steps=4"]), resume=paced)
    assert loaded and loaded[0]["cost"] == known["cost"], "a resumed run starts from what this one knew"
    trace = read_trace(paced / "trace.jsonl")
    assert sorted(trace) == [1, 2, 3, 4] and all(row.steps < 123456 for row in trace[4])

    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["report", str(paced), "--step", "2"], catch_exceptions=False)
    (tail,) = page_data((paced / "report.html").read_text())["tails"]
    assert result.exit_code == 0 and tail["chosen"] == 2 and 2 in tail["steps"]
    assert "tail-accept" in json.dumps(tail["views"])
