"""Rows that share a step's tokens on a GPU: in deterministic mode completions are plain decoding's bits."""

import random

import pytest
import torch

from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from tests.drafting.test_drafters_gpu import make_engine, policy  # noqa: F401  (a fixture)
from tests.drafting.test_trees_gpu import NAMES, plain_bits
from tests.engine.test_engine_gpu import bits, make_requests, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["base", "fp8+kv"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_same_bits_as_plain_decoding(policy, name, precision, tree):  # noqa: F811
    requests = make_requests(40)
    expected = plain_bits(policy, requests, precision=precision)
    for count, most in ((1, 4), (3, 15)):
        engine = make_engine(policy, trees=tree, shares=True, precision=precision)
        engine.pacer = FixedPacer(Strategy(name, count, tree, most), 1000)
        assert bits(run(engine, requests)) == expected, (count, most)
        assert engine.take_stats().drafts[name].drafts > 0


def test_same_bits_when_budgets_change_and_rows_are_preempted(policy):  # noqa: F811
    requests = make_requests(40)
    expected = plain_bits(policy, requests)
    engine = make_engine(policy, kv_tokens=2048, trees=True, shares=True)
    rng, done = random.Random(2), {}
    shapes = ((2, False, 7), (3, True, 15), (5, True, 0))
    choices = [PLAIN, *(Strategy(name, *shape) for name in NAMES for shape in shapes)]
    engine.pacer = FixedPacer(choices[-1], 1000)
    engine.submit(requests)
    for completion in engine.completions():
        done[completion.request.id] = completion
        engine.pacer = FixedPacer(rng.choice(choices), 1000)
    assert bits(done) == expected and engine.preemptions > 0


def test_the_fast_mode_shares_too(policy):  # noqa: F811
    requests = make_requests(24)
    for name in NAMES:
        engine = make_engine(policy, deterministic=False, trees=True, shares=True)
        engine.pacer = FixedPacer(Strategy(name, 3, tree=True, most=15), 1000)
        done = run(engine, requests)
        assert len(done) == len(requests) and all(c.tokens for c in done.values())
    torch.cuda.synchronize()
