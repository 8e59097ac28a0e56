"""`report.html`: every view has its data, runs are compared, and whatever a run holds is shown as text."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import ConfigError
from paceline.report.html_report import renew_report, write_report
from paceline.report.run_data import RunData
from paceline.report.run_directory import RunDirectory
from paceline.report.views.samples import MOST_CHARACTERS, spread
from paceline.report.views.verdicts import exactness_card, learning_card, speed_card, time_card
from tests.page_data import page_data
from tests.report.made_run import CLOSING, HOSTILE, eval_record, make_hostile_run, make_run, train_record


def report_of(*runs, out):
    write_report(list(runs), out)
    return page_data(out.read_text())


def charts_of(data):
    """Returns the charts by id, those that are folded away among them."""
    return {c["id"]: c for section in data["sections"] for c in (*section["charts"], *section["more"])}


def test_report_has_every_view_of_a_run(tmp_path):
    data = report_of(make_run(tmp_path / "run"), out=tmp_path / "r.html")
    charts = charts_of(data)
    views = {"reward", "accuracy-held-out", "lengths", "entropy", "stages", "speed", "mismatch"}
    views |= {"accept-length", "acceptance-eagle", "acceptance-history", "metric-rollout/tokens"}
    assert views <= charts.keys()
    reward = charts["reward"]
    assert reward["xs"] == list(range(1, 21)) and reward["series"][0]["y"][0] == pytest.approx(
        1 - 0.9 / 1.1, rel=1e-5
    )
    held_out = charts["accuracy-held-out"]["series"][0]
    assert held_out["y"] == [35, 92] and held_out["low"] == [32, 89] and held_out["high"] == [38, 95]
    assert [mark["x"] for mark in charts["acceptance-eagle"]["marks"]] == [10, 20], "published"
    stages = {series["label"]: series["y"][0] for series in charts["stages"]["series"]}
    assert stages == pytest.approx({"prefill": 0.1, "decode": 1.5, "tail": 0.9, "rest of the rollout": 0.1,
                                    "learning": 1.2, "sync": 0.01})  # fmt: skip
    assert all(chart["y"]["label"] and chart["x"]["label"] for chart in charts.values())
    (tails,) = data["tails"]
    assert tails["steps"] == list(range(1, 21)) and len(tails["views"]["7"]["charts"]) == 3
    (samples,) = data["samples"]
    assert samples["groups"][0]["responses"][0]["text"] == "a1:1;#1 answer 1"
    assert sum(len(section["charts"]) for section in data["sections"]) == 9, "the others are folded away"


def test_report_intervals_are_those_that_the_run_recorded(tmp_path):
    """Wilson's, which never leave 0 to 100%; runs of earlier versions have half their width alone."""
    run = make_run(tmp_path / "run", steps=2)
    ends = {"_low": 0.0, "_high": 0.278, "_margin": 0.139}
    first = {"step": 3, "kind": "eval", "eval/pass@4": 1.0}
    last = {**eval_record(4, 0.0), "eval/pass@4": 0.0}
    last |= {f"eval/{name}{end}": value for name in ("accuracy", "pass@4") for end, value in ends.items()}
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in (first, last))
    data = report_of(run, out=tmp_path / "r.html")
    for chart, whole in (("accuracy-held-out", 100), ("metric-eval/pass@4", 1)):
        (series,) = charts_of(data)[chart]["series"]
        assert (series["low"][-1], series["high"][-1]) == (0, pytest.approx(0.278 * whole))
    assert "before [32.0, 38.0] and after 4 steps [0.0, 27.8]" in data["cards"][0]["detail"]


def test_report_leaves_out_charts_without_metrics(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    kept = ("step", "kind", "reward/mean", "time/rollout", "time/learn")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [{k: r[k] for k in kept} for r in records if r["kind"] == "train"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in trained))
    charts = charts_of(report_of(run, out=tmp_path / "r.html"))
    assert charts.keys() == {"reward", "stages"}
    (run / "metrics.jsonl").unlink()
    assert charts_of(report_of(run, out=tmp_path / "r.html")) == {}, "a run that has not begun"


def test_report_shows_hostile_content_as_text(tmp_path):
    out = tmp_path / "r.html"
    data = report_of(make_hostile_run(tmp_path), out=out)
    page = out.read_text()
    assert "<script>window" not in page and "<img" not in page
    (samples,) = data["samples"]
    shown = [group for group in samples["groups"] if group["step"] == 20]
    assert shown[0]["responses"][0]["text"].startswith(HOSTILE)
    assert shown[1]["prompt"] == "x" * MOST_CHARACTERS and shown[1]["responses"][0]["cut"] > 300_000
    assert len(shown) == 2, "lines that are no groups are left out"
    assert charts_of(data)["reward"]["xs"][-1] == 21, "values that are no numbers are missing"


def test_report_compares_runs_with_the_first(tmp_path):
    slow = make_run(tmp_path / "slow")
    fast = make_run(tmp_path / "fast", **{"time/rollout": 1.3, "time/step": 2.5})
    other = make_run(tmp_path / "other", seed=1, **{"rollout/tokens": 1})
    data = report_of(slow, fast, other, out=tmp_path / "r.html")
    words = " ".join(data["words"])
    assert "The seeds differ (slow: 0, fast: 0, other: 1)" in words
    assert "fast sampled the same as slow in all 20 common steps" in words
    assert "other sampled the same as slow in no step" in words
    tables = {table["id"]: table for table in data["tables"]}
    speedups = {row[0]: row[1:] for row in tables["speedups"]["rows"]}
    assert speedups["rollout"] == ["2.6 s", "2.00x [2.00, 2.00]", "1.00x [1.00, 1.00]"]
    assert ["run.seed", "0", "0", "1"] in tables["differences"]["rows"]
    assert [series["label"] for series in charts_of(data)["reward"]["series"]] == ["slow", "fast", "other"]
    same = report_of(slow, fast, out=tmp_path / "r.html")
    assert "All runs have the same seed (0)." in same["words"]


@pytest.mark.parametrize("missing", ["null", "NaN", "Infinity"])
def test_report_treats_values_that_are_not_finite_as_missing(tmp_path, missing):
    """Runs of earlier versions have NaN and Infinity in their metrics."""
    runs = [make_run(tmp_path / name, steps=3) for name in ("first", "second")]
    for run in runs:
        lines = (run / "metrics.jsonl").read_text().replace('"time/learn": 1.2', f'"time/learn": {missing}')
        lines = lines.replace('"rollout/length_max": 102.0', f'"rollout/length_max": {missing}')
        last = json.dumps(eval_record(4, 0.5)).replace("0.5,", f"{missing},")
        (run / "metrics.jsonl").write_text(f"{lines}{last}\n")
        assert missing in lines and missing in last
    data = report_of(*runs, out=tmp_path / "r.html")
    assert "second sampled the same as first in all 3 common steps." in data["words"]
    outcomes = next(table for table in data["tables"] if table["id"] == "outcomes")
    assert [row[2] for row in outcomes["rows"]] == ["92.0% [89.0, 95.0]"] * 2
    (alone,) = (card for card in data["cards"] if "first: does the policy learn?" in card["question"])
    assert alone["verdict"] == "Yes: 35.0% → 92.0%" and "3 steps" in alone["detail"]


def test_report_numbers_runs_of_the_same_name(tmp_path):
    runs = [make_run(tmp_path / folder / "run", steps=2) for folder in ("a", "b")]
    data = report_of(*runs, out=tmp_path / "r.html")
    assert [tail["run"] for tail in data["tails"]] == ["run", "run (2)"]


def test_columns_count_a_rerun_step_once(tmp_path):
    run = RunData.read(make_run(tmp_path / "run", steps=1))
    run.add([train_record(s, **{"reward/mean": s}) for s in (1, 2, 3)])
    run.add([train_record(2, **{"reward/mean": 7.0})])
    assert run.train.steps == [1, 2] and run.train["reward/mean"].tolist() == [1.0, 7.0]


@pytest.mark.parametrize(
    ("after", "tone", "words"),
    [(0.92, "good", "Yes: 35.0% → 92.0%"), (0.2, "bad", "It got worse"), (0.36, "warn", "Too close to tell")],
)
def test_learning_card_rests_on_the_intervals(tmp_path, after, tone, words):
    run = RunData.read(make_run(tmp_path / "run", steps=1))
    run.add([eval_record(0, 0.35), eval_record(20, after)])
    card = learning_card(run)
    assert card["tone"] == tone and card["verdict"].startswith(words)


def test_time_card_names_the_largest_stage(tmp_path):
    card = time_card(RunData.read(make_run(tmp_path / "run")))
    assert card["verdict"] == "Rollout: 68%" and sum(share for _, share, _ in card["shares"]) > 0.99
    assert "is 35% of the rollout" in card["detail"]


@pytest.mark.parametrize(
    ("low", "high", "noisy", "verdict"),
    [
        (1.1, 1.3, False, "1.20x as fast"),
        (0.7, 0.9, False, "Slower: 1.20x"),
        (0.9, 1.3, True, "Too noisy to tell"),
    ],
)
def test_speed_card_is_the_closing_checks_verdict(tmp_path, low, high, noisy, verdict):
    path = make_run(tmp_path / "run")
    RunDirectory(path).write_closing(CLOSING | {"ratio_low": low, "ratio_high": high, "too_noisy": noisy})
    card = speed_card(RunData.read(path))
    assert card["verdict"] == verdict and "172 policy steps instead of 288" in card["detail"]


@pytest.mark.parametrize(
    ("identical", "verdict", "tone"),
    [
        (True, "Yes: the same tokens", "good"),
        (False, "No: other tokens than plain decoding", "bad"),
        (None, "Mismatch 1e-09", ""),
    ],
)
def test_exactness_card_is_the_closing_checks_verdict_or_the_mismatch(tmp_path, identical, verdict, tone):
    path = make_run(tmp_path / "run")
    RunDirectory(path).write_closing(CLOSING | {"identical": identical})
    card = exactness_card(RunData.read(path))
    assert (card["verdict"], card["tone"]) == (verdict, tone)
    assert "1e-09 nats per token apart" in card["detail"]


def test_report_folds_charts_of_nothing_but_zeros(tmp_path):
    quiet = {"mismatch/k3": 0.0, "mismatch/kl": 0.0}
    data = report_of(make_run(tmp_path / "run", **quiet), out=tmp_path / "r.html")
    health = next(section for section in data["sections"] if section["id"] == "health")
    assert health["charts"] == [] and [chart["id"] for chart in health["more"]] == ["mismatch"]


def test_report_is_renewed_with_new_records(tmp_path):
    path = make_run(tmp_path / "run", steps=3)
    warnings = []
    renew_report(RunDirectory(path), warnings.append)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_record(4)) + "\n")
    renew_report(RunDirectory(path), warnings.append)
    assert charts_of(page_data((path / "report.html").read_text()))["reward"]["xs"] == [1, 2, 3, 4]
    (path / "config.yaml").unlink()
    renew_report(RunDirectory(path), warnings.append)
    assert len(warnings) == 1 and "was not renewed" in warnings[0], "and the run continues"


def test_report_command_names_the_error(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(run)], catch_exceptions=False)
    assert done.exit_code == 0 and str(run / "report.html") in done.output.replace("\n", "")
    with pytest.raises(ValueError, match="--step 9: .*the run has steps 1 to 3"):
        runner.invoke(app, ["report", str(run), "--step", "9"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="is not a run directory"):
        runner.invoke(app, ["report", str(tmp_path)], catch_exceptions=False)
    before = (run / "report.html").read_text()
    runner.invoke(app, ["report", str(run), "--step", "2"], catch_exceptions=False)
    after = page_data((run / "report.html").read_text())
    assert page_data(before)["tails"][0]["chosen"] is None and after["tails"][0]["chosen"] == 2


def test_report_of_a_long_run_stays_small(tmp_path):
    out = tmp_path / "r.html"
    data = report_of(make_run(tmp_path / "run", steps=2000), out=out)
    assert out.stat().st_size < 10_000_000
    assert len(charts_of(data)["reward"]["xs"]) <= 1000 and len(data["tails"][0]["steps"]) == 30


def test_spread_returns_evenly_spaced_steps():
    assert spread([1, 2, 3], 5) == [1, 2, 3]
    assert spread(list(range(101)), 5) == [0, 25, 50, 75, 100]
