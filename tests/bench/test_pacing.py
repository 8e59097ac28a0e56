"""The pacing bench: the same tokens under every strategy, and figures that say where the time went."""

import pytest

from paceline.bench.oracle import OracleDrafter
from paceline.bench.pacing import bench_pacing, stages
from paceline.bench.setup import bench_requests
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import buckets_up_to
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.strategy import PLAIN, Decision, Strategy
from paceline.pacing.trace import TraceRow
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder

CONFIG = DecoderConfig("llama", 97, 32, 64, 2, 2, 1, 16, 256, eos_token_ids=(2,))


def test_every_rollout_is_told_by_stages():
    lengths = [4, 4, 8, 8, 16, 40, 90]
    requests = bench_requests(lengths, 5, CONFIG.vocab_size)
    oracle = OracleDrafter(requests, [0.9])
    engine = Engine(
        Decoder(CONFIG).initialise(0), EngineSettings(max_running=8, kv_tokens=2048), drafters=[oracle]
    )
    pacer = AdaptivePacer(
        PacingSettings(tuple(buckets_up_to(8)), tuple(Strategy("oracle", k) for k in (1, 3)))
    )
    result = bench_pacing(engine, requests, [Strategy("oracle", 3)], pacer, 2, oracle.learn)
    assert [p.name for p in result.points] == ["plain", "oracle:3", "paced 1", "paced 2"]
    for point in result.points:
        record = point.record()
        assert point.identical == 1.0 and [stage["running"] for stage in record["stages"]] == [8, 4, 2, 1]
        assert sum(stage["steps"] for stage in record["stages"]) == point.decode_steps
        assert sum(stage["tokens"] for stage in record["stages"]) == sum(lengths), (
            "what was generated to warm up is not in it"
        )
        assert (
            0
            < sum(stage["disturbed_seconds"] for stage in record["stages"])
            < sum(stage["seconds"] for stage in record["stages"])
        )
    plain, fixed, first, _ = result.points
    assert [stage.steps for stage in plain.stages] == [8, 8, 24, 50]
    assert (
        plain.trial_steps == fixed.trial_steps == 0.0 < first.trial_steps < 0.5
        and 0 < first.trial_seconds < 1
    )


def test_stages_are_halves():
    trace = [TraceRow(Decision(PLAIN), 2, 2 * running, running, 0.1) for running in (9, 8, 5, 4, 3, 2, 1)]
    assert [(stage.running, stage.steps, stage.tokens) for stage in stages(trace)] == [
        (16, 2, 9),
        (8, 4, 13),
        (4, 4, 7),
        (2, 2, 2),
        (1, 2, 1),
    ]
    assert stages(trace)[1].seconds == pytest.approx(0.2)
