"""The folder of a run survives a crash at any moment, and says so where something else has damaged it."""

import json
import logging
import math
import os

import pytest

from paceline.config import ConfigError, load_config
from paceline.report.run_directory import RunDirectory, enclosing_run
from paceline.report.summary import summarise_run


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(
        load_config(None, [f"run.root={tmp_path}", "run.name=run", "learning.algorithm=gspo"]), "default"
    )


def test_write_config_replaces_the_recipe_as_a_whole(run, monkeypatch):
    """A crash while it is written leaves the old one."""
    changed = load_config(str(run.config_path), ["run.steps=7"])

    def crash(*_):
        raise KeyboardInterrupt

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, crash)
            with pytest.raises(KeyboardInterrupt):
                run.write_config(changed)
        assert run.config().run.steps != 7 and run.config().learning.algorithm == "gspo"
    run.write_config(changed)
    assert run.config() == changed


def test_write_config_leaves_an_unchanged_recipe(run):
    before = run.config_path.stat()
    run.write_config(run.config())
    after = run.config_path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("content", ["", "\n", "# nothing\n", "{}\n"])
def test_config_refuses_an_empty_recipe(run, content):
    run.config_path.write_text(content)
    with pytest.raises(ConfigError, match="config.yaml is empty: the recipe of this run is lost"):
        run.config()


@pytest.mark.parametrize(
    "harm",
    [b'{"step": 1, "ki', b"\xff\xfe", b"\x00" * 20, b"5", b"{}", b""],
    ids=["torn", "bytes", "nulls", "number", "empty", "blank"],
)
def test_read_metrics_skips_a_damaged_line_with_a_warning(run, harm, caplog):
    for step in range(4):
        run.append_metrics({"step": step, "kind": "train"})
    lines = run.metrics_path.read_bytes().split(b"\n")
    lines[1] = harm
    run.metrics_path.write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.WARNING):
        run.cut_back(2)
    assert [record["step"] for record in run.read_metrics()] == [0, 2]
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(run.metrics_path) in said and "line 2 damaged" in said


@pytest.mark.parametrize("unfinished", [b'{"step": 4, "ki', b"\x00" * 20, b"\xff\xfe"])
def test_read_metrics_drops_a_last_line_cut_off_by_a_crash(run, unfinished, caplog):
    for step in range(3):
        run.append_metrics({"step": step, "kind": "train"})
    whole = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(whole + unfinished)
    run.cut_back(9)
    assert run.metrics_path.read_bytes() == whole and not caplog.records


def test_read_metrics_warns_once_of_fifty_megabytes_of_junk(run, caplog):
    run.append_metrics({"step": 1, "kind": "train", "rollout/tokens": 5})
    with run.metrics_path.open("ab") as file:
        file.write(b"\n".join([os.urandom(128).replace(b"\n", b"x")] * 400_000) + b"\n")
    run.append_metrics({"step": 2, "kind": "train", "rollout/tokens": 6})
    with caplog.at_level(logging.WARNING):
        assert [record["step"] for record in run.read_metrics()] == [1, 2]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "400000 lines, first 2, damaged and left out" in said


@pytest.mark.parametrize(
    "line",
    [
        {"step": 2, "kind": "train"},
        {"step": 2, "kind": "train", "rollout/tokens": "many"},
        {"step": 2, "kind": "train", "rollout/tokens": None},
        {"step": 2, "kind": "eval", "eval/accuracy": 0.5},
        {"step": 2, "kind": "eval", "eval/accuracy": [], "eval/length_mean": {}},
        {"step": 2, "kind": "other"},
        {"step": True, "kind": "train"},
        {"step": 2.5, "kind": "train"},
        {"step": 2, "kind": ["train"]},
        {"step": 2, "kind": "train", "rollout/tokens": 1, "time/rollout": "long"},
    ],
)
def test_summary_leaves_out_incomplete_records_with_one_warning(run, line, caplog):
    run.append_metrics({"step": 1, "kind": "train", "rollout/tokens": 5, "time/rollout": 2.0})
    for _ in range(3):
        run.append_metrics(line)
    with caplog.at_level(logging.WARNING):
        run.cut_back(9)
        summary = summarise_run(run)
    assert summary.tokens in (5, 8) and summary.stage_seconds == {"rollout": 2.0}
    assert len(caplog.records) <= 1


def test_cut_back_drops_deeply_nested_lines(run):
    run.metrics_path.write_bytes(b"[" * 200_000 + b"\n")
    run.trace_path.write_bytes(b"[" * 200_000 + b'\n{"step": "x"}\n')
    run.cut_back(3)
    assert run.metrics_path.read_bytes() == b""


def test_cut_back_keeps_sample_files_of_other_names(run, caplog):
    ours = ["step_000001.jsonl", "step_000009.jsonl"]
    strange = [
        "step_12abc.jsonl",
        "step_1\u00b2.jsonl",
        "step_.jsonl",
        "step_000009.jsonl.bak",
        "step_9 (copy).jsonl",
    ]
    for name in (*ours, *strange, "notes.txt"):
        (run.samples_path / name).write_text("")
    (run.samples_path / "step_000010.jsonl").mkdir()
    with caplog.at_level(logging.WARNING):
        run.cut_back(3)
    left = {path.name for path in run.samples_path.iterdir()}
    assert left == {"step_000001.jsonl", "step_000010.jsonl", *strange, "notes.txt"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "6 files with names of their own are left alone" in said


def test_summary_without_a_later_evaluation_has_no_after(run):
    evaluation = {
        "eval/accuracy": 0.5,
        "eval/accuracy_margin": 0.1,
        "eval/length_mean": 7,
        "eval/problems": 8,
    }
    run.append_metrics({"step": 0, "kind": "eval", **evaluation})
    run.append_metrics({"step": 1, "kind": "train", "rollout/tokens": 5})
    summary = summarise_run(run)
    assert summary.before is not None and summary.after is None
    run.append_metrics(
        {"step": 1, "kind": "eval", **evaluation, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.7}
    )
    assert summarise_run(run).after.accuracy_text == "50.0% [20.0, 70.0]"


def test_run_directory_appears_with_its_recipe_or_not_at_all(tmp_path, monkeypatch):
    config = load_config(None, [f"run.root={tmp_path}", "run.name=run"])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.report.run_directory.replace_file", full)
    with pytest.raises(ConfigError, match="No space left"):
        RunDirectory.create(config, "default")
    assert list(tmp_path.iterdir()) == []


STRANGE = {"policy/gradient_norm": math.nan, "mismatch/k3": math.inf, "reward/mean": -math.inf}


def strictly(line: str) -> dict[str, object]:
    """Reads JSON as its standard has it."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_append_metrics_writes_values_that_are_not_finite_as_null(run):
    """Also where a resumed run writes records of an earlier version again, which have NaN."""
    record = {"step": 1, "kind": "train", "rollout/tokens": 5, **STRANGE}
    run.append_metrics(record)
    run.append_metrics({"step": 2, "kind": "train", "rollout/tokens": 6})
    first, second = map(strictly, run.metrics_path.read_text().splitlines())
    assert first == {**record, **dict.fromkeys(STRANGE)} and second["rollout/tokens"] == 6
    run.metrics_path.write_text(json.dumps(record) + "\n")
    assert "NaN" in run.metrics_path.read_text()
    assert list(run.read_metrics()) == [first]
    run.cut_back(1)
    assert strictly(run.metrics_path.read_text()) == first
    assert summarise_run(run).tokens == 5


def test_interval_without_ends_is_its_margins(run):
    evaluation = {
        "eval/accuracy": 0.5,
        "eval/accuracy_margin": 0.1,
        "eval/length_mean": 7,
        "eval/problems": 8,
    }
    ends = {"eval/accuracy_low": math.nan, "eval/accuracy_high": math.nan}
    run.append_metrics({"step": 0, "kind": "eval", **evaluation, **ends})
    run.append_metrics({"step": 1, "kind": "eval", **evaluation, "eval/accuracy": math.nan})
    summary = summarise_run(run)
    assert summary.before.accuracy_text == "50.0% [40.0, 60.0]" and summary.after is None


def test_enclosing_run_finds_the_run_of_a_path(run, tmp_path):
    assert enclosing_run(run.path) is None, "a recipe beside other files makes no run"
    run.append_metrics({"step": 1, "kind": "train"})
    (tmp_path / "link").symlink_to(run.samples_path)
    inside = (run.path, run.samples_path, run.path / "new/folder", tmp_path / "link/x")
    assert {enclosing_run(path) for path in inside} == {run.path}
    assert enclosing_run(tmp_path) is None and enclosing_run(tmp_path / "run-2") is None
    (run.path / "run.lock").write_text("")
    run.config_path.unlink()
    assert enclosing_run(run.path) == run.path, "it lost its recipe and is a run still"


def test_summary_names_the_policy_of_the_highest_reward_though_it_is_zero(run):
    """Among penalties a reward of 0 is the best, and is not taken for a missing one."""
    for step, reward in enumerate((-1.0, 0.0, -0.5)):
        lengths = {"eval/accuracy_margin": 0.1, "eval/length_mean": 7, "eval/problems": 8}
        rewards = {"eval/accuracy": -2.0, "eval/reward": reward}
        run.append_metrics({"step": step, "kind": "eval", **rewards, **lengths})
    assert summarise_run(run).best.step == 1
