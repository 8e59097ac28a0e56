"""Steps are timed before the first request, for a pacer that asks, and no request notices."""

import pytest

from paceline.config import load_config
from paceline.engine.factory import make_engine
from paceline.engine.start_timing import time_steps
from paceline.pacing.strategy import PLAIN, FixedPacer
from paceline.policy.decoder import Decoder
from paceline.types import Request, SamplingParams
from tests.drafting.test_wrong_drafters import SHAPE
from tests.engine.test_engine import bits

RECIPE = ["rollout.speculation.drafters=[history]", "rollout.speculation.tokens=3", "rollout.max_running=8"]


def engine_of(*overrides: str):
    rollout = load_config(None, [*RECIPE, *overrides]).rollout
    return make_engine(Decoder(SHAPE).initialise(0), rollout, 2048, tokenizer=None)


def completed(engine) -> dict:
    engine.submit([Request(str(i), (5, 6, 7), i, SamplingParams(max_tokens=30)) for i in range(6)])
    return {completion.request.id: completion for completion in engine.completions()}


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_start_timing_gives_the_pacer_times_before_its_first_step(shape, cpu_clock):
    plain = engine_of()
    plain.pacer = FixedPacer(PLAIN)
    expected = completed(plain)
    assert not plain.take_stats().drafts
    engine = engine_of(f"rollout.speculation.shape={shape}")
    assert engine.pacer.untimed() == (PLAIN, *engine.pacer.settings.strategies)
    seen = []
    take_times = engine.pacer.take_times
    engine.pacer.take_times = lambda times: (seen.append(times), take_times(times))
    assert bits(completed(engine)) == bits(expected)
    assert len(seen) == 1 and not engine.pacer.untimed(), "once, and for all"
    assert {time.running for time in seen[0]} == {8, 2, 1}
    assert all(time.verify_seconds > 0 for time in seen[0])
    assert all((time.draft_seconds > 0) == (time.strategy.count > 0) for time in seen[0])
    assert [time.strategy for time in seen[0]][:3] == [PLAIN] * 3, "what tells most comes first"


def test_start_timing_ends_when_its_seconds_are_spent():
    engine = engine_of()
    strategies = (PLAIN, *engine.pacer.settings.strategies)
    assert len(time_steps(engine.launcher, strategies, seconds=0.0)) == 1
    assert len(time_steps(engine.launcher, strategies, seconds=60.0)) == 3 * len(strategies)
