"""A what-if that starts from a run: what is measured stays measured, what changes scales."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import Config, dump_config
from paceline.simulate.from_run import MeasuredRun, read_run
from paceline.simulate.question import questions
from paceline.simulate.report import Answer


@pytest.fixture
def run(tmp_path):
    """A run directory as `paceline train` leaves it, with speculation, ten steps and samples of each."""
    folder = tmp_path / "a-run"
    (folder / "samples").mkdir(parents=True)
    speculation = {"drafters": ["history"], "tokens": 3}
    rollout = {"speculation": speculation, "prompts_per_step": 4, "samples_per_prompt": 4}
    (folder / "config.yaml").write_text(dump_config(Config.model_validate({"rollout": rollout})))
    times = {"time/rollout": 2.0, "time/learn": 1.0, "time/sync": 0.1}
    counts = {"rollout/tokens": 480, "rollout/length_mean": 30, "rollout/length_p95": 60}
    record = {"kind": "train"} | times | counts | {"speculation/accept_length": 2.5}
    lines = [json.dumps({"step": step} | record) for step in range(1, 11)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step in range(1, 11):
        samples = [
            {"tokens": [0] * n, "request": {"prompt": [1] * 9}} for n in (10, 20, 30, 40, 20, 10, 30, 80)
        ]
        (folder / "samples" / f"step_{step:06d}.jsonl").write_text(json.dumps({"samples": samples}) + "\n")
    return folder


def test_lengths_stage_times_and_acceptance_are_the_runs_own(run):
    facts = read_run(run)
    assert facts.lengths.observed[:4] == (10, 20, 30, 40) and facts.lengths.origin.source == "measured"
    assert (facts.rollout_seconds, facts.learn_seconds, facts.prompt_tokens) == (2.0, 1.0, 9)
    assert facts.acceptance.accept_length(3) == pytest.approx(2.5)


def test_proposal_length_is_what_the_pacer_chose(run):
    """Not what drafters had to say: a step verifies its k tokens whether they were proposed or not."""
    rows = [("history:1", 10), ("plain", 500), ("history:2", 90)]
    figures = {"step": 9, "reason": "best", "context": 1, "expected": 1, "steps": 1, "seconds": 1}
    records = [figures | {"strategy": name, "rows": n, "tokens": n} for name, n in rows]
    early = {**records[0], "step": 1, "strategy": "history:3"}
    (run / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (early, *records)))
    acceptance = read_run(run).acceptance
    assert "at k = 2" in acceptance.origin.note and acceptance.accept_length(2) == pytest.approx(2.5)


def what_if(run, **changes) -> Answer:
    measured = MeasuredRun.simulated(read_run(run), "h200")
    ((_, question),) = questions(changes, measured.keys)
    return measured.what_if(question, changes)


def test_what_if_without_changes_gives_the_measured_times(run):
    outcome = what_if(run).outcome
    assert outcome.rollout_seconds == pytest.approx(2.0) and outcome.step_seconds == pytest.approx(3.1)


def test_what_if_scales_with_longer_responses_and_a_better_drafter(run):
    longer = what_if(run, length_scale=4.0)
    assert longer.outcome.rollout_seconds > 6 and longer.outcome.stages.train == pytest.approx(4.0)
    better = what_if(run, k="3", accept="0.95")
    assert better.outcome.rollout_seconds < 2.0
    assert better.scenario.speculation.acceptance.by_depth == (0.95,)
    assert longer.scenario.speculation.acceptance == read_run(run).acceptance, (
        "what is not changed is measured"
    )
    assert better.outcome.provenance["training"].source == "measured"
    moved = what_if(run, hardware="b200")
    assert moved.outcome.provenance["training"].source == "assumed", "it was not measured there"


def test_lengths_of_few_samples_come_from_the_metrics(run):
    for file in (run / "samples").glob("*.jsonl"):
        file.unlink()
    facts = read_run(run)
    assert facts.lengths.origin.source == "fitted" and facts.lengths.mean == 30
    drawn = sorted(facts.lengths.draw(4000, 0))
    assert drawn[3800] == pytest.approx(60, rel=0.1)


def test_run_without_a_step_is_refused(run):
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no finished training step"):
        read_run(run)


def test_slow_generation_holds_up_an_asynchronous_step(run):
    """The correction belongs into the simulation: generation hidden without it may not be with it."""
    answer = what_if(run, mode="async", gpus=8)
    assert answer.scenario.correction > 100 and answer.outcome.exposed_generation_seconds > 0.1
    assert answer.outcome.step_seconds > answer.outcome.stages.train + 0.2


def test_text_table_and_json_have_the_same_figures(run):
    def invoke(*words: str) -> str:
        arguments = ["simulate", "--from-run", str(run), "--ran-on=h200", *words]
        return CliRunner().invoke(app, arguments, catch_exceptions=False).output

    said = invoke("length_scale=2")
    (record,) = json.loads(invoke("length_scale=2", "--json"))
    printed = {
        line.split()[0]: line.split()[1:3] for line in said.splitlines() if line[:4] in ("roll", "step")
    }
    rollout, step = (f"{record['this'][name]:.2f}" for name in ("rollout_seconds", "step_seconds"))
    assert (printed["rollout"], printed["step"]) == (["2.00", rollout], ["3.10", step])
    assert "measured over simulated" in said
    assert [rollout, step] in [line.split()[1:3] for line in invoke("length_scale=[1, 2]").splitlines()]


def test_keys_that_the_run_answers_are_refused(run):
    with pytest.raises(ValueError, match="mean_length = 5.0 does not apply with --from-run.*length_scale"):
        what_if(run, mean_length=5)


@pytest.mark.parametrize(
    "content", ['{"samples": [{"tok', '{"a": 1}\n', "[1]\n", '{"samples": [{"tokens": [1]}]}\n']
)
def test_damaged_samples_are_named(run, content):
    (run / "samples" / "step_000009.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"step_000009\.jsonl, line 1: damaged or cut off; remove the file"):
        read_run(run)


@pytest.mark.parametrize(
    "key, value",
    [("time/rollout", 0), ("time/rollout", float("nan")), ("time/learn", -1.0), ("rollout/length_mean", 0)],
)
def test_steps_with_impossible_figures_are_left_out(run, key, value):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[7] = json.dumps(json.loads(lines[7]) | {key: value})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    facts = read_run(run)
    assert (facts.steps, facts.rollout_seconds, facts.learn_seconds) == (5, 2.0, 1.0)


@pytest.mark.parametrize("value", [None, "x", 0.5, float("nan")])
def test_impossible_accept_length_is_left_out(run, value):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[8]["speculation/accept_length"] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(run).acceptance.accept_length(3) == pytest.approx(2.5)
