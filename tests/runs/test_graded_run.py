"""A run with a reward of the user's own that grades: what is shown, kept as best, evaluated and resumed."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import ConfigError, load_config
from paceline.report.run_data import RunData
from paceline.report.run_directory import RunDirectory
from paceline.report.views.charts import sections
from paceline.report.views.compare import comparison
from paceline.report.views.verdicts import learning_card
from paceline.runs.inputs import check_inputs, input_digests, write_inputs
from tests.forked import ForkedCommand
from tests.loop_helpers import tiny_overrides
from tests.report.made_run import make_run
from tests.runs.conftest import SMALL

REWARD = "def graded(response):\n    return len(set(response)) / 20\n"


@pytest.fixture(scope="module")
def graded(policy, tmp_path_factory):
    """A run of six steps whose scores lie below 1, so that nothing ever counts as correct."""
    root = tmp_path_factory.mktemp("graded")
    (root / "reward.py").write_text(REWARD)
    recipe = [*tiny_overrides(policy, root, "run"), *SMALL, rewarded(root)]
    command = ForkedCommand(["train", *recipe])
    assert command.wait() == 0, command.text()
    return root / "run", command.text()


def rewarded(root) -> str:
    return f"task.rewards=[{{function: '{root / 'reward.py'}:graded'}}]"


def evaluations(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "eval"]


def test_graded_reward_is_recorded_and_shown_beside_accuracy(graded):
    run, text = graded
    for record in evaluations(run):
        assert record["eval/accuracy"] == 0
        assert record["eval/reward_low"] <= record["eval/reward"] <= record["eval/reward_high"]
        assert 0 < record["eval/reward"] <= 0.4
    assert "held-out reward" in text


def test_report_goes_by_the_reward_where_it_grades(graded, tmp_path):
    run, plain = RunData.read(graded[0]), RunData.read(make_run(tmp_path / "run"))
    rewards = [record["eval/reward"] for record in evaluations(graded[0])]
    card = learning_card(run)
    assert f"{rewards[0]:.3f} → {rewards[-1]:.3f}" in card["verdict"]
    assert "Mean reward of 4 held-out" in card["detail"]
    assert "reward-held-out" in json.dumps(sections([run], 100))
    assert "%" in learning_card(plain)["verdict"]
    assert "reward-held-out" not in json.dumps(sections([plain], 100))


def test_best_policy_is_that_of_the_highest_reward_and_of_equals_the_later(graded):
    run, text = graded
    best = max(evaluations(run), key=lambda record: (record["eval/reward"], record["step"]))
    assert f"best policy: that of step {best['step']}" in text
    state = json.loads((run / "checkpoints" / "step_000006" / "state.json").read_text())
    assert state["best_reward"] == best["eval/reward"]
    if best["step"] == 6:
        weights = [
            run / "checkpoints" / name / "model.safetensors" for name in ("best", "step_000006/policy")
        ]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_eval_uses_the_recipe_of_the_policys_run_and_records_the_result(graded, start, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(graded[0], run)
    whole, best = start("eval", str(run)), start("eval", str(run / "checkpoints" / "best"))
    assert (whole.wait(), best.wait()) == (0, 0), whole.text() + best.text()
    assert "4 held-out problems" in whole.text() and f"by the recipe of {run}" in whole.text()
    found = {r["policy"]: r for r in map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())}
    last = evaluations(run)[-1]
    assert found["checkpoints/step_000006/policy"]["eval/reward"] == last["eval/reward"]
    assert set(found) == {"checkpoints/step_000006/policy", "checkpoints/best"}


def test_eval_by_another_recipe_leaves_the_run_alone(graded, start):
    run = graded[0]
    other = start("eval", str(run / "checkpoints" / "best"), "--recipe", "default", *SMALL)
    assert other.wait() == 0, other.text()
    assert not (run / "evaluations.jsonl").exists()


@pytest.mark.parametrize("command", [["train"], ["eval"]])
def test_drafter_learns_and_is_measured_by_the_recipe_of_the_policys_run(graded, command, monkeypatch):
    """Another task's responses would teach and measure something else."""
    best = str(graded[0] / "checkpoints" / "best")

    def opened(config):
        raise ValueError(f"opened with {config.task.rewards[0].function}, {config.policy.path}")

    monkeypatch.setattr("paceline.session.open_session", opened)
    arguments = ["drafter", *command, best, *(["builtin-eagle"] if command == ["eval"] else [])]
    with pytest.raises(ValueError, match=r"opened with \S*reward.py:graded, \S*best"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_rollout_shows_the_reward_beside_accuracy(policy, graded, start, tmp_path):
    recipe = [*tiny_overrides(policy, tmp_path, "unused"), *SMALL, rewarded(graded[0].parent)]
    rolled = start("rollout", *recipe, "--steps", "1")
    assert rolled.wait() == 0, rolled.text()
    reward = re.search(r"step 1: reward (0\.\d+), accuracy 0\.000", rolled.text())
    assert reward is not None and float(reward.group(1)) > 0


def test_runs_side_by_side_show_the_reward_where_one_grades(graded, tmp_path):
    runs = [RunData.read(graded[0]), RunData.read(make_run(tmp_path / "plain"))]
    reward = evaluations(graded[0])[-1]["eval/reward"]
    outcomes = comparison(runs)[1][0]
    place = outcomes["columns"].index("held-out reward, last")
    assert outcomes["rows"][0][place].startswith(f"{reward:.3f} [") and outcomes["rows"][1][place] == "-"
    assert "held-out reward, last" not in comparison(runs[1:])[1][0]["columns"]


@pytest.mark.parametrize("verb, more", [("eval", []), ("export", ["OUT"])])
@pytest.mark.parametrize("part", ["best", "step_000006", "step_000006/policy"])
def test_damaged_policy_is_refused(graded, start, tmp_path, verb, more, part):
    run = tmp_path / "run"
    shutil.copytree(graded[0], run)
    folder = run / "checkpoints" / part
    weights = next(iter(sorted(folder.rglob("model.safetensors"))))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    refused = start(verb, str(folder), *(str(tmp_path / name) for name in more))
    assert refused.wait() == 2
    assert "is damaged" in refused.text() and "another checkpoint" in refused.text()


def test_resume_refuses_a_changed_reward_unless_asked(graded, start, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(graded[0], run)
    reward = graded[0].parent / "reward.py"
    reward.write_text(REWARD.replace("20", "10"))
    try:
        refused = start("train", "--resume", str(run), "run.steps=7")
        assert refused.wait() == 2
        assert "task.rewards[0].function" in refused.text() and "run.changed_inputs=accept" in refused.text()
        accepted = start("train", "--resume", str(run), "run.steps=7", "run.changed_inputs=accept")
        assert accepted.wait() == 0, accepted.text()
        assert "not the file that" in accepted.text()
    finally:
        reward.write_text(REWARD)


@pytest.mark.parametrize("key", ["path", "held_out_path"])
@pytest.mark.parametrize("change", [lambda path: path.write_text("{}\n"), lambda path: path.unlink()])
def test_resume_refuses_changed_data_by_name(whole, tmp_path, key, change):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("path", "held_out_path")}
    for name, path in files.items():
        path.write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n")
    config = load_config(
        None,
        [
            "task.name=file",
            "task.rewards=[{function: last-number}]",
            *(f"task.data.{name}={p}" for name, p in files.items()),
        ],
    )
    assert set(input_digests(config)) == {"task.data.path", "task.data.held_out_path"}
    run = RunDirectory(tmp_path)
    check_inputs(run, config, print)  # of an earlier version: no record
    write_inputs(run, config)
    check_inputs(run, config, print)
    change(files[key])
    with pytest.raises(ConfigError, match=rf"task\.data\.{key}"):
        check_inputs(run, config, print)


def test_run_ends_with_code_1_where_every_reward_fails(policy, start, tmp_path):
    (tmp_path / "reward.py").write_text("def graded(response):\n    return '1'\n")
    run = start("train", *tiny_overrides(policy, tmp_path, "run"), *SMALL, rewarded(tmp_path))
    assert run.wait() == 1
    assert "step 1: every reward failed" in run.text() and "3 steps in a row" in run.text()
    assert "rewards.log" in run.text()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"digests": 3, "started_in": "x"}'])
def test_damaged_record_of_inputs_is_written_anew_with_a_warning(tmp_path, content):
    config = load_config("default")
    run, said = RunDirectory(tmp_path), []
    run.inputs_path.write_text(content)
    check_inputs(run, config, said.append)
    assert len(said) == 1 and "inputs.json is damaged" in said[0]
    check_inputs(run, config, said.append)
    assert len(said) == 1
