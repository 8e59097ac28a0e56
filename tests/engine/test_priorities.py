"""Whose proposals weigh more, where rows share a step's tokens."""

import numpy as np
import pytest

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.priorities import MOST, priorities
from paceline.policy.decoder import Decoder
from paceline.types import Request, SamplingParams
from tests.drafting.test_wrong_drafters import SHAPE


def test_rows_with_longer_to_go_weigh_more_once_nobody_waits():
    left = np.array([10.0, 100.0, 190.0, 1000.0, 1.0])
    assert not priorities(left, anybody_waits=True).any()
    weights = np.exp(priorities(left, anybody_waits=False))
    assert (np.diff(weights[:4]) >= 0).all() and weights[3] == pytest.approx(MOST)
    assert weights.min() == pytest.approx(1 / MOST) == weights[4]
    assert len(priorities(np.zeros(0), anybody_waits=False)) == 0


def test_the_device_is_told_who_will_be_long():
    """Of two prompts one has had long responses; one request of each runs now."""
    engine = Engine(Decoder(SHAPE).initialise(0), EngineSettings(max_running=2, kv_tokens=512, shares=True))
    short, long = (5, 6), (7, 8)
    for prompt, tokens in ((short, 4), (long, 40)):
        request = Request("before", prompt, 0, SamplingParams(max_tokens=tokens, ignore_eos=True))
        engine.submit([request])
        list(engine.completions())
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.submit([Request("a", short, 1, free), Request("b", long, 2, free)])
    generator = engine.completions()
    next(generator)
    by_id = {sequence.request.id: sequence.slot for sequence in engine.running.values()}
    assert not by_id, "both have ended: as long as each other"
    priority = engine.runner.proposals.priority_S.tolist()
    assert priority[0] < 0 < priority[1], "the slots of a and b"
