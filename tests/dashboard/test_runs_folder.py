"""What the dashboard reads: runs as they grow, long ones at once, and nothing outside its folder."""

import json
import os
import threading
import time

import pytest

from paceline.config import ConfigError
from paceline.dashboard.runs_folder import MOST_POINTS, RunsFolder, UnknownRun
from paceline.report import live_run
from paceline.report.live_run import LiveRun, sampled_records
from tests.report.made_run import make_hostile_run, make_run, train_record


def charts_of(view):
    return {chart["id"]: chart for section in view["sections"] for chart in section["charts"]}


def append(run, *records):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_runs_are_listed_the_newest_first_and_shown(tmp_path):
    old = make_run(tmp_path / "old", steps=3)
    new = make_run(tmp_path / "new", steps=4)
    for age, path in enumerate((new, old)):
        os.utime(path / "metrics.jsonl", (1e9 - age, 1e9 - age))
    (tmp_path / "no run").mkdir()
    folder = RunsFolder(tmp_path)
    assert folder.names() == ["new", "old"]
    view = folder.view(["new", "old"])
    assert [s["label"] for s in charts_of(view)["reward"]["series"]] == ["new", "old"]
    assert len(folder.tail("old", 2)["charts"]) == 3 and folder.tail("old", 99)["charts"] == []
    assert folder.samples("old", 2)[0]["step"] == 2 and folder.samples("old", 99) == []
    assert folder.slowest("old")["rows"]
    assert RunsFolder(tmp_path / "old").names() == ["old"], "a run directory is a folder of one"
    with pytest.raises(ConfigError, match="is not a folder"):
        RunsFolder(tmp_path / "none")


def test_new_steps_arrive_and_a_half_written_one_waits(tmp_path):
    path = make_run(tmp_path / "run", steps=3)
    run = LiveRun(path, "run")
    first = run.poll()
    assert run.poll() == first and run.data.train.steps == [1, 2, 3]
    line = json.dumps(train_record(4)) + "\n"
    with (path / "metrics.jsonl").open("a") as file:
        file.write(line[:50])
    run.poll()
    assert run.data.train.steps == [1, 2, 3]
    with (path / "metrics.jsonl").open("a") as file:
        file.write(line[50:])
    assert run.poll() > first and run.data.train.steps == [1, 2, 3, 4]


def test_a_run_that_was_cut_back_is_read_again(tmp_path):
    path = make_run(tmp_path / "run", steps=5)
    run = LiveRun(path, "run")
    run.poll()
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.tmp").write_text("".join(lines[:3]))
    (path / "metrics.tmp").replace(path / "metrics.jsonl")
    run.poll()
    assert run.data.train.steps == [1, 2]


def test_a_long_run_is_shown_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "READ_AT_ONCE", 10_000)
    monkeypatch.setattr(live_run, "FIRST_LOOK", 50)
    monkeypatch.setattr(live_run, "FIRST_PAUSE", 0.0)
    shown = threading.Event()
    load_whole = LiveRun._load_whole

    def load_once_shown(self):
        assert shown.wait(300)
        load_whole(self)

    monkeypatch.setattr(LiveRun, "_load_whole", load_once_shown)
    path = make_run(tmp_path / "run", steps=600)
    folder = RunsFolder(tmp_path)
    first = charts_of(folder.view(["run"]))["reward"]
    assert first["xs"][0] <= 2 and first["xs"][-1] == 600 and len(first["xs"]) <= 105
    shown.set()
    run = folder.run("run")
    until = time.monotonic() + 300
    while run._loading and time.monotonic() < until:
        time.sleep(0.02)
    append(path, train_record(601, **{"reward/mean": -5.0}))
    whole = charts_of(folder.view(["run"]))["reward"]
    assert len(run.data.train) == 601 and len(whole["xs"]) <= MOST_POINTS
    assert whole["series"][0]["y"][-1] == -5 and whole["xs"][-1] == 601


def test_places_of_a_file_are_sampled_in_order(tmp_path):
    path = make_run(tmp_path / "run", steps=500) / "metrics.jsonl"
    steps = [record["step"] for record in sampled_records(path, path.stat().st_size, 20)]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 500 and 35 <= len(steps) <= 44


def test_nothing_outside_the_folder_is_read(tmp_path):
    secret = make_run(tmp_path / "secret" / "run", steps=2, text="the secret")
    runs = tmp_path / "runs"
    inside = make_run(runs / "inside", steps=2)
    (runs / "linked").symlink_to(secret)
    half = make_run(runs / "half", steps=2)
    (half / "metrics.jsonl").unlink()
    (half / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    for name in ("trace.jsonl", "samples", "requests"):
        target = inside / name
        target.rename(tmp_path / f"moved-{name}")
        target.symlink_to(secret / name)
    folder = RunsFolder(runs)
    assert folder.names() == ["inside"]
    assert folder.tail("inside", 1)["charts"] == [] and folder.samples("inside", 1) == []
    assert folder.slowest("inside") is None
    for name in ("linked", "half", "../secret/run", str(secret), "", "..", "inside/../../secret/run"):
        with pytest.raises(UnknownRun):
            folder.run(name)


def test_hostile_files_are_shown_as_far_as_they_are_sound(tmp_path):
    run = make_hostile_run(tmp_path)
    folder = RunsFolder(tmp_path)
    view = folder.view([run.name])
    assert charts_of(view)["reward"]["xs"][-1] == 21
    json.dumps(view, allow_nan=False)
    assert folder.tail(run.name, 21) == {"charts": [], "tables": []}
    assert len(folder.samples(run.name, 20)) == 2
