"""pacing.json only saves learning the machine again: a damaged one is reported and leaves nothing behind."""

import json

import pytest

from paceline.engine.graphs import buckets_up_to
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.store import (
    FORMAT,
    load_pacing,
    load_times,
    save_pacing,
    save_times,
    times_path,
)
from paceline.pacing.strategy import Decision, Moment, Observation, Strategy

STRATEGY = Strategy("history", 3)


def make_pacer() -> AdaptivePacer:
    return AdaptivePacer(PacingSettings(tuple(buckets_up_to(8)), (STRATEGY,), seed=0))


def make_taught_pacer() -> AdaptivePacer:
    """Returns a pacer that has seen fifty steps of four rows."""
    pacer = make_pacer()
    seen = Observation(Decision(STRATEGY), 4, 100.0, 0.001, 0.01, 8, 4, (3, 1, 0))
    for _ in range(50):
        pacer.observe(seen)
    pacer.choose(Moment(4, 100.0, 8))  # learns the observations
    return pacer


def torn(state: dict) -> str:
    """Halfway through it turns into something else: what comes before it can be loaded."""
    return json.dumps({**state, "acceptance": {"history": [{"situation": None, "reached": 5}]}})


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda _: "{no",
        lambda _: "[]",
        lambda _: "5",
        lambda _: json.dumps({"format": FORMAT}),
        torn,
        lambda s: json.dumps(s)[:-30],
    ],
    ids=["empty", "garbage", "list", "number", "no machine", "wrong inside", "cut off"],
)
def test_damaged_pacing_file_is_reported_and_ignored(tmp_path, damage):
    path = tmp_path / "pacing.json"
    save_pacing(path, make_taught_pacer(), "here")
    state = json.loads(path.read_text())
    assert state["cost"]["verify"]["estimates"], "there is something to lose"
    path.write_text(damage(state))
    said, fresh = [], make_pacer()
    assert not load_pacing(path, fresh, "here", said.append)
    assert len(said) == 1 and str(path) in said[0] and "damaged" in said[0]
    assert fresh.state() == make_pacer().state()


def test_pacing_state_is_stored_under_names():
    state = make_taught_pacer().state()
    (estimate,) = state["cost"]["verify"]["estimates"]
    assert estimate["bucket"] == 4 and estimate["queries"] == 4 and estimate["context_class"] == 0
    assert set(estimate["time"]) == {"seconds", "load", "steps", "updated_at"}
    everywhere, here = state["acceptance"]["history"]
    assert everywhere["situation"] is None and here["situation"] == {"batch_class": 1, "context_class": 0}
    assert set(here) == {"workload", "situation", "reached", "survived"} and here["workload"] == "train"


# Written by the version before, after the fifty steps of `make_taught_pacer`.
FORMAT_3 = {
    "format": 3,
    "machine": "here",
    "cost": {
        "steps": [[4, 4, 0, {"seconds": 0.01, "load": 400.0, "steps": 50.0, "noted_at": 50}]],
        "drafts": [["history", 3, 4, {"seconds": 0.001, "load": 0.0, "steps": 50.0, "noted_at": 0}]],
        "switches": [],
        "load": [50, 0.0, 0.0],
    },
    "acceptance": {
        "history": {
            "all": [[200.0, 150.0, 50.0], [150.0, 50.0, 0.0]],
            "1,0": [[200.0, 150.0, 50.0], [150.0, 50.0, 0.0]],
        }
    },
}


def test_pacing_file_of_the_previous_format_is_loaded(tmp_path):
    path, pacer = tmp_path / "pacing.json", make_pacer()
    path.write_text(json.dumps(FORMAT_3))
    assert load_pacing(path, pacer, "here", pytest.fail)
    assert pacer.state() == make_taught_pacer().state()
    assert not load_pacing(path, make_pacer(), "elsewhere", pytest.fail)


@pytest.mark.parametrize("damage", [{"cost": {}}, {"acceptance": {"history": {"all": 5}}}, {"cost": None}])
def test_damaged_pacing_file_of_the_previous_format_is_reported_and_ignored(tmp_path, damage):
    path, pacer, said = tmp_path / "pacing.json", make_pacer(), []
    path.write_text(json.dumps(FORMAT_3 | damage))
    assert not load_pacing(path, pacer, "here", said.append)
    assert len(said) == 1 and pacer.state() == make_pacer().state()


def test_pacing_state_of_a_removed_drafter_is_ignored(tmp_path):
    path, pacer = tmp_path / "pacing.json", make_pacer()
    state = make_taught_pacer().state()
    gone = "history+eagle"
    state["cost"]["drafts"] += [entry | {"drafter": gone} for entry in state["cost"]["drafts"]]
    state["acceptance"][gone] = state["acceptance"]["history"]
    path.write_text(json.dumps({"format": FORMAT, "machine": "here", **state}))
    assert load_pacing(path, pacer, "here", pytest.fail)
    moment = Moment(4, 100.0, 8)
    assert pacer.choose(moment).strategy == make_taught_pacer().choose(moment).strategy
    assert pacer.state()["acceptance"] == make_taught_pacer().state()["acceptance"]


@pytest.mark.parametrize("version", [1, 2, FORMAT + 1, "new", None])
def test_pacing_file_of_an_unknown_format_is_ignored(tmp_path, version):
    path, pacer = tmp_path / "pacing.json", make_pacer()
    path.write_text(json.dumps({"format": version, "machine": "here", "anything": [1, 2]}))
    assert not load_pacing(path, pacer, "here", pytest.fail)
    assert pacer.state() == make_pacer().state()


def test_new_run_loads_this_machines_times_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not load_times(make_pacer(), "here"), "there are none yet"
    save_times(make_pacer(), "here")
    assert not list(tmp_path.rglob("*.json")), "who knows no times leaves none"
    taught = make_taught_pacer()
    save_times(taught, "here")
    assert [path.parent for path in tmp_path.rglob("*")][-1] == tmp_path / "paceline" / "pacing"
    fresh = make_pacer()
    assert fresh.untimed() and load_times(fresh, "here") and not fresh.untimed()
    assert fresh.cost.state() == taught.cost.state()
    assert fresh.state()["acceptance"] == make_pacer().state()["acceptance"], "that is the other run's"
    assert not load_times(make_pacer(), "elsewhere")
    assert not load_times(taught, "here"), "what a run knows itself is newer"


@pytest.mark.parametrize(
    "damage", ["", "{no", "[]", '{"format": 4, "machine": "here", "cost": {"verify": 5}}']
)
def test_damaged_times_cache_is_ignored(tmp_path, damage, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_times(make_taught_pacer(), "here")
    times_path("here").write_text(damage)
    pacer = make_pacer()
    assert not load_times(pacer, "here") and pacer.state() == make_pacer().state()


def test_times_cache_that_cannot_be_written_is_ignored(tmp_path, monkeypatch):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    save_times(make_taught_pacer(), "here")
    assert in_the_way.read_text() == "" and not load_times(make_pacer(), "here")
