"""Traces of steps: what the engine records of requests, how it is kept, and what Perfetto gets."""

import gzip
import json
import time

import pytest

import paceline.stats as stats_module
from paceline.certify.closing_check import SpeculationCheck
from paceline.loop import train
from paceline.pacing.trace import read_trace
from paceline.report import step_trace as module
from paceline.report.clock import StageSpan
from paceline.report.console import speed_verdict
from paceline.report.step_trace import DECODING, ROWS, STEP, WAITING, write_step_trace
from paceline.stats import RequestTrace, RolloutStats
from paceline.types import FinishReason
from tests.loop_helpers import make_tiny_policy, tiny_config
from tests.report.made_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    policy = make_tiny_policy(folder / "policy")
    train(tiny_config(policy, folder, "run", "rollout.max_running=6", "report.closing_pairs=2"))
    return folder / "run"


def events_of(run, step):
    return json.loads((run / "requests" / f"step_{step:06d}.json").read_text())["traceEvents"]


def test_step_trace_follows_every_request(run):
    assert sorted(file.name for file in (run / "requests").iterdir()) == [
        f"step_{i:06d}.json" for i in range(1, 7)
    ]
    events = events_of(run, 4)
    slices = [e for e in events if e["ph"] == "X"]
    rollout = next(e for e in slices if e["name"] == "rollout")
    decoded = [e for e in slices if e["pid"] == ROWS and "tokens" in e.get("args", {})]
    assert len({e["name"] for e in decoded}) == 16 and {e["tid"] for e in decoded} == set(range(1, 7)), (
        "six rows"
    )
    for event in decoded:
        assert (
            rollout["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= rollout["ts"] + rollout["dur"] + 2
        )
        assert event["args"]["prompt"] and event["args"]["reward"] is not None
    waiting = [e for e in events if e["pid"] == WAITING and e["ph"] in "be"]
    assert {e["name"] for e in waiting} == {e["name"] for e in decoded} and len(waiting) >= 2 * 16
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_step = next(r for r in metrics if r["kind"] == "train" and r["step"] == 4)
    tokens = {e["name"]: e["args"]["tokens"] for e in decoded}
    assert sum(tokens.values()) == of_step["rollout/tokens"]
    decisions = [e["args"] for e in slices if e["pid"] == DECODING]
    assert sum(row["steps"] for row in decisions) == of_step["rollout/decode_steps"]
    drafting = sum(row["draft_seconds"] for row in decisions)
    assert drafting == pytest.approx(of_step["time/drafting"], abs=1e-4)


def test_step_trace_tracks_have_names_and_do_not_overlap(run):
    events = events_of(run, 3)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[STEP, 0] == "step 3" and names[ROWS, 0] == "replica 0" and names[ROWS, 1] == "row 0"
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in slices if e["pid"] == STEP} == {"rollout", "learn", "sync"}
    ends = {}
    for event in sorted(slices, key=lambda e: e["ts"]):
        track = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(track, -1e9) - 5000, f"{event['name']} overlaps in {track}"
        ends[track] = event["ts"] + event["dur"]


def test_run_writes_its_report_and_closing_check(run):
    assert (run / "report.html").is_file() and not (run / "profile").exists()
    closing = json.loads((run / "closing.json").read_text())
    assert closing["identical"] and len(closing["plain"]) == closing["repeats"] == 2
    assert closing["ratio_low"] <= closing["ratio"] <= closing["ratio_high"]


@pytest.mark.slow
def test_torch_profiler_records_one_step(tmp_path):
    config = tiny_config(make_tiny_policy(tmp_path / "policy"), tmp_path, "run", "run.steps=2")
    train(config, profile_step=2)
    (profile,) = (tmp_path / "run" / "profile").iterdir()
    events = json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    assert profile.name == "step_000002.json.gz" and any("aten::" in e.get("name", "") for e in events)


def test_step_trace_is_bounded_and_quick(tmp_path, monkeypatch):
    """Less than 1% of a step may go into its trace; 64 requests take a GPU a second and more."""
    monkeypatch.setattr(stats_module, "MOST_REQUESTS", 64)
    monkeypatch.setattr(module, "KEPT_STEPS", 2)
    stats = RolloutStats()
    moments = (("waiting", 1.0, -1), ("prefill", 1.1, 0), ("decode", 1.2, 0), ("left", 1.9, -1))
    for i in range(70):
        stats.note_request(RequestTrace(f"r{i}", moments, 3, 4, FinishReason.STOP))
    times = []
    for step in range(1, 21):
        begun = time.process_time()
        write_step_trace(tmp_path / "requests", step, [StageSpan("rollout", 1.0, 2.0)], stats, [])
        times.append(time.process_time() - begun)
    assert min(times) < 0.01
    kept = sorted((tmp_path / "requests").iterdir())
    assert [file.name for file in kept] == ["step_000019.json", "step_000020.json"]
    record = json.loads(kept[1].read_text())
    assert record["otherData"] == {"step": 20, "requests left out": 6}
    assert len([e for e in record["traceEvents"] if "args" in e and e["ph"] == "X"]) == 64


def test_read_trace_reads_one_steps_decisions(tmp_path):
    path = make_run(tmp_path / "run", steps=50) / "trace.jsonl"
    with path.open("a") as file:
        file.write('{"step": brok\n{"step": 7}\n[7]\n')
    found = read_trace(path, [7, 50, 99])
    assert {step: len(rows) for step, rows in found.items()} == {7: 4, 50: 4}
    assert str(found[7]) == str(read_trace(path)[7]) and read_trace(tmp_path / "none", [1]) == {}


@pytest.mark.parametrize(
    ("paced", "words"),
    [
        ((1.0, 1.1, 0.9, 1.0, 1.0), "speed: 2.00x, between 1.82 and 2.22 in 5 pairs"),
        ((1.0, 1.1, 2.5, 1.0, 1.0), "speed: too noisy to tell (2.00x, between 0.80 and 2.00 in 5 pairs)"),
        ((1.0, 1.1), "speed: too noisy to tell (1.91x, between 1.82 and 2.00 in 2 pairs)"),
        ((1.0, 1.02, 0.98), "speed: 2.00x, between 1.86 and 2.15 in 3 pairs"),
        ((1.0, 1.6, 1.9), "speed: too noisy to tell (1.25x, between 0.42 and 4.54 in 3 pairs)"),
    ],
)
def test_speed_verdict_claims_only_what_it_saw(paced, words):
    check = SpeculationCheck((2.0,) * len(paced), paced, 288, 172, 2.0, True)
    assert speed_verdict(check) == words
