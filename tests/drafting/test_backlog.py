"""A head that looks at the policy's steps when it is to propose proposes what one that follows them does."""

import random

import pytest
import torch

from paceline.drafting import backlog
from paceline.drafting.base import Drafter
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import PLAIN, Decision, FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.types import Request, SamplingParams
from tests.drafting.test_exactness import folders, run  # noqa: F401  (a fixture)
from tests.drafting.test_model_drafters import Watched, make_drafter
from tests.engine.test_engine import bits, grouped_requests


def following(drafter: Drafter) -> Drafter:
    """Makes a head look at every step at once."""
    bind = drafter.bind

    def bind_without_backlog(context) -> None:
        bind(context)
        drafter.backlog = None

    drafter.bind = bind_without_backlog
    return drafter


def switching(seed: int):
    """Changes the strategy between completions; the head pauses for long."""
    rng = random.Random(seed)
    choices = [PLAIN, PLAIN, Strategy("history", 3), Strategy("eagle", 4), Strategy("eagle", 1)]

    def switch(engine: Engine, count: int) -> None:
        engine.pacer = FixedPacer(rng.choice(choices), 1000)

    return switch


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [backlog.MAX_BYTES, 20_000])
def test_backlogged_head_proposes_what_a_following_one_does(folders, monkeypatch, max_bytes):  # noqa: F811
    """With preemption, slots and blocks that other rows get, chunked prefills and siblings."""
    monkeypatch.setattr(backlog, "MAX_BYTES", max_bytes)
    requests = grouped_requests(prompts=6, samples=3, longest=50)
    seen, done = [], []
    for prepare in (following, lambda drafter: drafter):
        drafter = prepare(make_drafter("eagle", folders["qwen3"]))
        watched = Watched(drafter)
        engine, completions = run(
            folders["qwen3"],
            requests,
            [HistoryDrafter(), drafter],
            PLAIN,
            switching(4),
            kv_tokens=256,
            prefill_tokens=11,
        )
        assert engine.preemptions > 0
        seen.append([(tokens.tolist(), proposed) for tokens, _, proposed, _ in watched.seen])
        done.append(bits(completions))
    assert done[0] == done[1]
    assert len(seen[0]) > 20 and seen[0] == seen[1]


def test_backlog_processes_a_held_row_before_it_leaves(folders):  # noqa: F811
    """The request that continues it starts from its blocks, the head's entries among them."""
    seen = []
    for prepare in (following, lambda drafter: drafter):
        drafter = prepare(make_drafter("eagle", folders["qwen3"]))
        watched = Watched(drafter)
        policy = load_policy(folders["qwen3"], torch.float32)
        settings = EngineSettings(max_running=4, kv_tokens=512)
        engine = Engine(policy, settings, drafters=[drafter], pacer=FixedPacer(PLAIN, 4))
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.submit([Request("turn 1", (3, 4, 5, 6, 7), 5, sampling, hold=True)])
        (first,) = engine.completions()
        engine.pacer = FixedPacer(Strategy("eagle", 4), 4)
        prompt = (*first.request.prompt, *first.tokens, 8, 9)
        engine.submit([Request("turn 2", prompt, 6, sampling, continues="turn 1")])
        (second,) = engine.completions()
        seen.append([(tokens.tolist(), proposed) for tokens, _, proposed, _ in watched.seen])
    assert len(seen[0]) > 5 and seen[0] == seen[1]


def test_backlogged_head_that_does_not_propose_processes_prefills_only(folders):  # noqa: F811
    """And nothing is kept of rows that are gone."""
    calls = {}
    for name, prepare in (("follows", following), ("waits", lambda drafter: drafter)):
        drafter = prepare(make_drafter("eagle", folders["qwen3"]))
        counted = []
        write = drafter._write_entries

        def count(*tensors, write=write, counted=counted) -> None:
            counted.append(len(tensors[0]))
            write(*tensors)

        drafter._write_entries = count
        run(folders["qwen3"], grouped_requests(2, 2, 20), [HistoryDrafter(), drafter], Strategy("history", 3))
        calls[name] = len(counted)
    assert drafter.backlog.take() is None
    assert calls["waits"] < calls["follows"] / 4


def test_pacer_receives_that_a_head_had_to_catch_up(folders):  # noqa: F811
    """Else the states that waited would count as the time of a proposal."""
    drafter = make_drafter("eagle", folders["qwen3"])
    policy = load_policy(folders["qwen3"], torch.float32)
    pacer = Alternating()
    engine = Engine(policy, EngineSettings(max_running=4, kv_tokens=512), drafters=[drafter], pacer=pacer)
    engine.submit([Request("1", (3, 4, 5), 5, SamplingParams(max_tokens=40, ignore_eos=True))])
    list(engine.completions())
    drafted = [o for o in pacer.observed if o.decision.strategy.count]
    assert [o.switched for o in drafted[:6]] == [True, False, False, True, False, False]


class Alternating(FixedPacer):
    """Three plain steps, three of the head, and so on."""

    def __init__(self) -> None:
        super().__init__(PLAIN, 1)
        self.observed = []

    def choose(self, moment):
        turn = len(self.observed) // 3 % 2
        return Decision(Strategy("eagle", 2) if turn else PLAIN, moment.running, moment.context)

    def observe(self, observation) -> None:
        self.observed.append(observation)
