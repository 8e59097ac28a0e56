"""Traces of requests: what the engine records, how it is kept, and what Perfetto gets."""

import gzip
import json
import time

import pytest
from typer.testing import CliRunner

import paceline.stats as stats_module
from paceline.certify.closing_check import SpeculationCheck
from paceline.cli.main import app
from paceline.config import ConfigError
from paceline.loop import train
from paceline.report import step_trace as module
from paceline.report.clock import StageSpan
from paceline.report.console import speed_verdict
from paceline.report.perfetto import DECODING, ROWS, STEP, WAITING, to_perfetto
from paceline.report.step_lines import lines_of_step
from paceline.report.step_trace import read_step_trace, traced_steps, write_step_trace
from paceline.stats import RequestTrace, RolloutStats
from paceline.types import FinishReason
from tests.loop_helpers import make_tiny_policy, tiny_config
from tests.report.made_run import make_run, trace_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    policy = make_tiny_policy(folder / "policy")
    train(tiny_config(policy, folder, "run", "rollout.max_running=6", "report.closing_pairs=2"))
    return folder / "run"


def test_every_request_of_a_step_is_followed(run):
    assert traced_steps(run / "requests") == [1, 2, 3, 4, 5, 6]
    trace = read_step_trace(run / "requests", 4)
    assert len(trace["requests"]) == 16 and trace["left_out"] == 0
    rollout = next(stage for stage in trace["stages"] if stage[0] == "rollout")
    for request in trace["requests"]:
        stages = [stage for stage, _, _ in request["moments"]]
        times = [start for _, start, _ in request["moments"]]
        assert stages[0] == "waiting" and stages[-1] == "left" and "decode" in stages
        assert times == sorted(times) and rollout[1] <= times[0] and times[-1] <= rollout[2]
        assert request["prompt"] and request["tokens"] > 0 and request["reward"] is not None
    rows = {row for request in trace["requests"] for stage, _, row in request["moments"] if stage == "decode"}
    assert rows == set(range(6)), "six rows served all sixteen"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_step = next(r for r in metrics if r["kind"] == "train" and r["step"] == 4)
    assert sum(request["tokens"] for request in trace["requests"]) == of_step["rollout/tokens"]
    assert sum(row["steps"] for row in trace["decisions"]) == of_step["rollout/decode_steps"]
    assert sum(row["draft_seconds"] for row in trace["decisions"]) == pytest.approx(
        of_step["time/drafting"], abs=1e-4
    )


def test_a_run_has_its_report_and_closing_check(run):
    assert (run / "report.html").is_file() and not (run / "profile").exists()
    closing = json.loads((run / "closing.json").read_text())
    assert closing["identical"] and len(closing["plain"]) == closing["repeats"] == 2
    assert closing["ratio_low"] <= closing["ratio"] <= closing["ratio_high"]


@pytest.mark.slow
def test_one_step_can_be_profiled(tmp_path):
    config = tiny_config(make_tiny_policy(tmp_path / "policy"), tmp_path, "run", "run.steps=2")
    train(config, profile_step=2)
    (profile,) = (tmp_path / "run" / "profile").iterdir()
    events = json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    assert profile.name == "step_000002.json.gz" and any("aten::" in e.get("name", "") for e in events)


def test_recording_takes_next_to_nothing(run):
    """Less than 0.5% of a step is allowed; a step of this size takes 0.1 s, so that is 0.5 ms."""
    trace = read_step_trace(run / "requests", 4)
    seconds = max(stop for _, _, stop in trace["stages"])
    requests = [
        RequestTrace(r["id"], tuple(map(tuple, r["moments"])), 7, r["tokens"], FinishReason.STOP)
        for r in trace["requests"]
    ]
    stats = RolloutStats(requests=requests)
    times = []
    for _ in range(20):
        begun = time.process_time()
        write_step_trace(run / "again", 1, [StageSpan("rollout", 0.0, 1.0)], stats, [])
        times.append(time.process_time() - begun)
    assert min(times) < max(0.005 * seconds, 2e-3)


def test_perfetto_gets_tracks_that_do_not_overlap(run, tmp_path):
    out = tmp_path / "trace.json"
    CliRunner().invoke(app, ["trace", str(run), "--step", "3", "--out", str(out)], catch_exceptions=False)
    events = json.loads(out.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[STEP, 1] == "stages" and names[ROWS, 1] == "row 0"
    assert {names[DECODING, i] for i in (1, 2, 3)} == {"strategy", "drafting", "verification"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in slices if e["pid"] == STEP} == {"rollout", "learning", "sync"}
    tracks = {}
    for event in sorted(slices, key=lambda e: e["ts"]):
        track = (event["pid"], event["tid"])
        assert event["ts"] >= tracks.get(track, -1e9) - 5000, f"{event['name']} overlaps in {names[track]}"
        tracks[track] = event["ts"] + event["dur"]
    waiting = [e for e in events if e["pid"] == WAITING and e["ph"] in "be"]
    assert len([e for e in waiting if e["ph"] == "b"]) == len([e for e in waiting if e["ph"] == "e"]) >= 16


def test_drafter_training_is_a_track(tmp_path):
    path = make_run(tmp_path / "run", steps=2)
    events = to_perfetto(read_step_trace(path / "requests", 2))["traceEvents"]
    drafter = next(e for e in events if e["name"] == "drafter training")
    assert drafter["ts"] == pytest.approx(3.8e6) and drafter["dur"] == pytest.approx(0.2e6)


def test_what_is_kept_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(stats_module, "MOST_REQUESTS", 3)
    monkeypatch.setattr(module, "KEPT_STEPS", 2)
    stats = RolloutStats()
    for i in range(5):
        stats.note_request(RequestTrace(f"r{i}", (("waiting", 1.0, -1),), 3, 4, FinishReason.STOP))
    for step in (1, 2, 3, 4):
        write_step_trace(tmp_path / "requests", step, [StageSpan("rollout", 1.0, 2.0)], stats, [])
    assert traced_steps(tmp_path / "requests") == [3, 4]
    trace = read_step_trace(tmp_path / "requests", 4)
    assert len(trace["requests"]) == 3 and trace["left_out"] == 2


def test_the_command_says_what_there_is(tmp_path):
    path = make_run(tmp_path / "run", steps=2)
    with pytest.raises(ConfigError, match="--step 1: requests are recorded of steps 2 to 2"):
        CliRunner().invoke(app, ["trace", str(path), "--step", "1"], catch_exceptions=False)
    (path / "requests" / "step_000002.json").write_text('{"step": 2}')
    with pytest.raises(ConfigError, match="are damaged"):
        CliRunner().invoke(app, ["trace", str(path)], catch_exceptions=False)
    (path / "requests" / "step_000002.json").unlink()
    with pytest.raises(ConfigError, match="holds no requests"):
        CliRunner().invoke(app, ["trace", str(path)], catch_exceptions=False)


def test_a_steps_lines_are_found_without_reading_all(tmp_path):
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for step in range(1, 1001):
            for row in trace_rows(step):
                file.write(json.dumps(row) + "\n")
            if step % 50 == 0:
                file.write('{"step": brok\n')
    for step in (1, 2, 499, 500, 501, 1000):
        assert lines_of_step(path, step) == trace_rows(step)
    assert lines_of_step(path, 1001) == [] and lines_of_step(tmp_path / "none", 1) == []


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
def test_the_closing_check_claims_only_what_it_saw(paced, words):
    check = SpeculationCheck((2.0,) * len(paced), paced, 288, 172, 2.0, True)
    assert speed_verdict(check) == words
