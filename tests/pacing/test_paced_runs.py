"""A whole run under the adaptive pacer: what it learns is the same as ever, and the pacing is kept with the run."""

import json

import pytest

from paceline.cli import app
from paceline.config import load_config
from paceline.loop import train
from paceline.pacing.strategy import PLAIN, Decision
from paceline.pacing.trace import TraceRow, append_trace, read_trace
from paceline.tasks.running_sums import RunningSums
from tests.length_reward import pay_for_length
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config

PACED = ("rollout.speculation.pacing=adaptive", "rollout.speculation.max_running=0", "run.steps=3", "eval.every=0")
# How the time was spent; under an adaptive pacer that depends on the clock, as `time/` does.
PACE = ("speculation/", "rollout/decode_steps", "rollout/tail_steps")


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


def what_was_learnt(run) -> list[dict]:
    return [{k: v for k, v in record.items() if not k.startswith(PACE)} for record in comparable_metrics(run)]


def test_pacing_changes_nothing_that_is_learnt_and_is_kept_with_the_run(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy")
    paced = train(tiny_config(policy, tmp_path, "paced", *PACED)).summary.run
    fixed = train(tiny_config(policy, tmp_path, "fixed", "run.steps=3", "eval.every=0")).summary.run
    assert what_was_learnt(paced) == what_was_learnt(fixed)
    assert sorted(read_trace(paced / "trace.jsonl")) == [1, 2, 3]

    known = json.loads((paced / "pacing.json").read_text())
    assert known["cost"]["steps"] and "history" in known["acceptance"]
    append_trace(paced / "trace.jsonl", 4, [TraceRow(Decision(PLAIN), steps=123456)])  # of a rollout that was never learnt from
    loaded = []
    with pytest.MonkeyPatch.context() as patch:
        from paceline.pacing import adaptive

        real = adaptive.AdaptivePacer.load_state
        patch.setattr(adaptive.AdaptivePacer, "load_state", lambda self, state: (loaded.append(state), real(self, state)))
        train(load_config(str(paced / "config.yaml"), ["run.steps=4"]), resume=paced)
    assert loaded and loaded[0]["cost"] == known["cost"], "a resumed run starts from what this one knew"
    trace = read_trace(paced / "trace.jsonl")
    assert sorted(trace) == [1, 2, 3, 4] and all(row.steps < 123456 for row in trace[4])

    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["report", str(paced), "--step", "2"], catch_exceptions=False)
    assert result.exit_code == 0 and "rollout of step 2" in (paced / "report.html").read_text()
