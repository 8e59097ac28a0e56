"""Trees on a GPU: in deterministic mode completions are plain decoding's bits, chains beside them."""

import random

import pytest
import torch

from paceline.drafting.growth import TreeShape
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from tests.drafting.test_drafters_gpu import make_engine, policy  # noqa: F401  (a fixture)
from tests.engine.test_engine_gpu import bits, make_requests, run

pytestmark = pytest.mark.gpu
NAMES = ("history", "draft_model", "eagle")


def plain_bits(policy: Decoder, requests: list, **settings) -> dict:  # noqa: F811
    alone = {"max_running": 1, "kv_tokens": 32768, "deterministic": True, **settings}
    return bits(run(Engine(policy, EngineSettings(**alone)), requests))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["base", "fp8+kv"])
def test_trees_give_the_bits_of_plain_decoding_on_a_gpu(policy, name, precision):  # noqa: F811
    requests = make_requests(40)
    expected = plain_bits(policy, requests, precision=precision)
    for count in (1, 5, 15):
        engine = make_engine(policy, trees=True, precision=precision)
        engine.pacer = FixedPacer(Strategy(name, count, tree=True), 1000)
        assert bits(run(engine, requests)) == expected, count
        assert engine.take_stats().drafts[name].drafts > 0


def test_tree_gains_more_than_a_chain_of_as_many_passes(policy):  # noqa: F811
    requests = make_requests(40)
    gained = {}
    for tree, count in ((False, TreeShape.DEEPEST), (True, 11)):
        engine = make_engine(policy, trees=tree)
        engine.pacer = FixedPacer(Strategy("draft_model", count, tree), 1000)
        run(engine, requests)
        gained[tree] = engine.take_stats().drafts["draft_model"].accept_length
    assert gained[True] > gained[False], gained


def test_trees_keep_bits_when_shape_and_drafter_change_and_rows_are_preempted(policy):  # noqa: F811
    requests = make_requests(40)
    expected = plain_bits(policy, requests)
    engine, rng, done = make_engine(policy, kv_tokens=2048, trees=True), random.Random(1), {}
    shapes = ((2, False), (7, True), (15, True))
    choices = [PLAIN, *(Strategy(name, count, tree) for name in NAMES for count, tree in shapes)]
    engine.pacer = FixedPacer(choices[-1], 1000)
    engine.submit(requests)
    for completion in engine.completions():
        done[completion.request.id] = completion
        engine.pacer = FixedPacer(rng.choice(choices), 1000)
    assert bits(done) == expected and engine.preemptions > 0


def test_fast_mode_runs_trees(policy):  # noqa: F811
    requests = make_requests(24)
    for name in NAMES:
        engine = make_engine(policy, deterministic=False, trees=True)
        engine.pacer = FixedPacer(Strategy(name, 15, tree=True), 1000)
        done = run(engine, requests)
        assert len(done) == len(requests) and all(c.tokens for c in done.values())
    torch.cuda.synchronize()
