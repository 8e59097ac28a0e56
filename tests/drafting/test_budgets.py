"""Rows that share a step's tokens get the same bits as plain decoding, whoever proposes and gets what."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from paceline.config import ConfigError, load_config
from paceline.drafting.base import Drafter
from paceline.drafting.history import HistoryDrafter
from paceline.engine import outcomes, step_tokens, tree_path
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.factory import make_engine
from paceline.kernels.allotment import Allotment
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from paceline.types import FinishReason, Request, SamplingParams
from tests.drafting.test_exactness import (  # noqa: F401
    HalfRightDrafter,
    OracleDrafter,
    folders,
    plain_run,
    run,
)
from tests.drafting.test_model_drafters import make_drafter
from tests.drafting.test_trees import BranchingDrafter
from tests.drafting.test_wrong_drafters import SHAPE
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import EVERY_FAMILY, FAMILIES


def valued_at_random(drafter: Drafter) -> Drafter:
    """Returns the drafter with values that say nothing, so that who gets what is luck."""
    generator = torch.Generator().manual_seed(0)
    for name in ("propose_scored", "propose_tree"):
        propose = getattr(drafter, name)

        def valued(slots_R, count, truncates, propose=propose) -> None:
            propose(slots_R, count, truncates)
            drafter.context.values_SK.copy_(torch.randn(drafter.context.values_SK.shape, generator=generator))

        setattr(drafter, name, valued)
    return drafter


def shared_run(folder, requests, drafter: Drafter, count: int, tree: bool = False, **settings):
    strategy = Strategy(drafter.name, count, tree, most=15)
    return run(folder, requests, [drafter], strategy, **settings, shares=True, trees=tree)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_shared_tokens_give_the_same_bits(family, folders):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=3, longest=40)
    plain = plain_run(folders[family], requests)
    for drafter, count, tree in (
        (HalfRightDrafter(plain), 2, False),
        (HistoryDrafter(bank_tokens=200), 1, False),
        (BranchingDrafter(plain), 4, True),
        (HistoryDrafter(bank_tokens=200), 3, True),
    ):
        drafter = valued_at_random(drafter) if drafter.name != "history" else drafter
        _, done = shared_run(folders[family], requests, drafter, count, tree)
        assert bits(done) == bits(plain), (drafter.name, tree)


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES)])
@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_models_that_share_give_the_same_bits(family, kind, tree, folders):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=2, longest=30)
    plain = plain_run(folders[family], requests)
    engine, done = shared_run(folders[family], requests, make_drafter(kind, folders[family]), 2, tree)
    assert bits(done) == bits(plain)
    assert engine.take_stats().drafts[kind].drafts > 0


@pytest.mark.parametrize("family, precision", [("qwen3", "fp8+kv"), ("qwen3_moe", "fp8+kv")])
def test_fp8_keeps_its_bits(family, precision, folders):  # noqa: F811
    requests = grouped_requests(prompts=3, samples=2, longest=25)
    plain = plain_run(folders[family], requests, precision=precision)
    drafter = valued_at_random(BranchingDrafter(plain))
    _, done = shared_run(folders[family], requests, drafter, 4, tree=True, precision=precision)
    assert bits(done) == bits(plain)


def test_changing_who_shares_changes_nothing(folders):  # noqa: F811
    """With a pool so small that rows are preempted and come back."""
    requests = grouped_requests(prompts=5, samples=3, longest=40)
    plain = plain_run(folders["qwen3"], requests)
    rng = random.Random(5)
    choices = [
        PLAIN,
        Strategy("history", 2, most=9),
        Strategy("history", 3, tree=True, most=15),
        Strategy("eagle", 1, most=3),
        Strategy("eagle", 3, tree=True, most=7),
        Strategy("eagle", 3, tree=True),
        Strategy("draft_model", 2, most=5),
        Strategy("draft_model", 2, tree=True, most=8),
    ]

    def switch(engine: Engine, count: int) -> None:
        engine.pacer = FixedPacer(rng.choice(choices), 1000)

    drafters = [
        HistoryDrafter(),
        *(make_drafter(kind, folders["qwen3"]) for kind in ("eagle", "draft_model")),
    ]
    settings = dict(kv_tokens=288, prefill_tokens=11, shares=True, trees=True)
    engine, done = run(folders["qwen3"], requests, drafters, choices[4], switch, **settings)
    assert bits(done) == bits(plain)
    assert engine.preemptions > 0 and len(set(engine.take_stats().strategies)) >= 4


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_stops_and_limits_cut_what_rows_share(tree, folders):  # noqa: F811
    prompt = (5, 6, 7)
    free = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9)
    long = plain_run(folders["llama"], [Request("r", prompt, 3, free)])
    tokens = long["r"].tokens
    requests = [Request(str(n), prompt, 3, replace(free, max_tokens=n)) for n in range(1, 21)]
    requests += [
        Request(f"stop{i}", prompt, 3, replace(free, stop_token_ids=(t,))) for i, t in enumerate(tokens)
    ]
    answers = {r.id: long["r"] for r in requests}
    drafter = BranchingDrafter(answers, right=1.3) if tree else OracleDrafter(answers)
    settings = dict(max_running=40, kv_tokens=4096)
    _, done = shared_run(folders["llama"], requests, valued_at_random(drafter), 5, tree, **settings)
    for n in range(1, 21):
        assert done[str(n)].tokens == tokens[:n] and done[str(n)].finish_reason is FinishReason.LENGTH
    for i, token in enumerate(tokens):
        end = tokens.index(token) + 1
        assert done[f"stop{i}"].tokens == tokens[:end]
        assert done[f"stop{i}"].logprobs == long["r"].logprobs[:end]


def test_the_models_own_limit_is_respected(folders):  # noqa: F811
    requests = [
        Request(str(i), (5,) * (238 + i), 3, SamplingParams(max_tokens=50, ignore_eos=True)) for i in range(3)
    ]
    plain = plain_run(folders["llama"], requests)
    _, done = shared_run(folders["llama"], requests, BranchingDrafter(plain, right=1.3), 6, tree=True)
    assert bits(done) == bits(plain)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_top_logprobs_truncation_and_greedy_rows(tree, folders):  # noqa: F811
    settings = (
        {"top_logprobs": 3},
        {"temperature": 0.0, "top_logprobs": 2},
        {"top_k": 5, "temperature": 0.8},
        {"top_p": 0.7, "top_logprobs": 1},
        {"min_p": 0.1},
    )
    requests = [
        Request(
            str(i),
            (5 + i % 3, 6, 7),
            50 + i,
            SamplingParams(max_tokens=20, ignore_eos=True, **settings[i % 5]),
        )
        for i in range(10)
    ]
    plain = plain_run(folders["qwen3"], requests)
    drafter = make_drafter("eagle", folders["qwen3"], draft_vocab=70)
    _, done = shared_run(folders["qwen3"], requests, drafter, 2, tree)
    assert bits(done) == bits(plain)
    assert {n: c.top_logprobs for n, c in done.items()} == {n: c.top_logprobs for n, c in plain.items()}


def test_routing_moves_with_the_path(folders):  # noqa: F811
    requests = grouped_requests(prompts=3, samples=3, longest=30)
    plain = plain_run(folders["qwen3_moe"], requests, records_routing=True)
    drafter = valued_at_random(BranchingDrafter(plain))
    _, done = shared_run(folders["qwen3_moe"], requests, drafter, 5, True, records_routing=True)
    assert bits(done) == bits(plain)
    assert {n: c.routing for n, c in done.items()} == {n: c.routing for n, c in plain.items()}


@pytest.mark.parametrize("bug", ["another row's tokens", "an unverified node's child"])
def test_planted_bugs_are_seen(bug, folders, monkeypatch):  # noqa: F811
    requests = grouped_requests(prompts=2, samples=3, longest=30)
    plain = plain_run(folders["llama"], requests)
    if bug == "another row's tokens":
        pack = step_tokens.pack_queries

        def mistaken(*arguments):
            packed = pack(*arguments)
            return replace(packed, index_RQ=packed.index_RQ.roll(1, 0))

        monkeypatch.setattr(step_tokens, "pack_queries", mistaken)
    else:
        walk = tree_path.walk_tree

        def mistaken_walk(slots_R, tokens_SK, parents_SK, queries, *others):
            slots_RQ = queries.cache_slots_RQ
            everything = replace(
                queries, cache_slots_RQ=torch.where(slots_RQ < 0, slots_RQ[:, :1] + 1, slots_RQ)
            )
            return walk(slots_R, tokens_SK, parents_SK, everything, *others)

        monkeypatch.setattr(tree_path, "walk_tree", mistaken_walk)
    _, done = shared_run(folders["llama"], requests, valued_at_random(BranchingDrafter(plain)), 3, True)
    assert bits(done) != bits(plain)


class OneKnowsDrafter(OracleDrafter):
    """Right for one request, and wrong for all others; it says so."""

    name = "one-knows"

    def tokens_for(self, request: Request, start: int, count: int) -> list[int]:
        right = super().tokens_for(request, start, count)
        return right if request.id == "0" else [(t + 1) % 97 for t in right]

    def propose_scored(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        super().propose_scored(slots_R, count, truncates)
        for slot, request in self.requests.items():
            self.context.values_SK[slot] -= 0.0 if request.id == "0" else 50.0


def test_who_gains_gets_the_tokens(folders, monkeypatch):  # noqa: F811
    """Four rows share four tokens: the one that gains gets all of them, as if it were alone."""
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(str(i), (5, 6, 7 + i), i, free) for i in range(4)]
    plain = plain_run(folders["llama"], requests)
    seen: list[Allotment] = []
    allot = step_tokens.allot_tokens
    monkeypatch.setattr(step_tokens, "allot_tokens", lambda *a: seen.append(allot(*a)) or seen[-1])
    strategy = Strategy("one-knows", 1, most=4)
    engine, done = run(folders["llama"], requests, [OneKnowsDrafter(plain)], strategy, shares=True)
    assert bits(done) == bits(plain)
    assert seen[0].tokens_R.tolist() == [5, 1, 1, 1], "four tokens of the first row and every row's last"
    drafts = engine.take_stats().drafts["one-knows"]
    assert drafts.accepted >= 30, "most of what the first row wrote"
    alone, _ = run(folders["llama"], requests, [OneKnowsDrafter(plain)], Strategy("one-knows", 1))
    assert drafts.accepted > 1.5 * alone.take_stats().drafts["one-knows"].accepted


def test_how_right_a_drafter_is_does_not_depend_on_who_shares(folders, monkeypatch):  # noqa: F811
    """Whose first token was right is counted row by row: shared numbers stand for many rows' proposals."""
    requests = grouped_requests(prompts=4, samples=3, longest=40)
    plain = plain_run(folders["llama"], requests)
    seen: list[tuple[int, int]] = []
    observe = outcomes._observation

    def counted(launched, gained, proposed, path):
        observation = observe(launched, gained, proposed, path)
        seen.append((int((gained > 1).sum()), observation.begun_right))
        return observation

    monkeypatch.setattr(outcomes, "_observation", counted)
    engine, _ = shared_run(folders["llama"], requests, HalfRightDrafter(plain), 2)
    assert all(right == counted for right, counted in seen), "a chain goes on where its first token is right"
    drafts = engine.take_stats().drafts["half-right"]
    assert 0 < drafts.begun_right == sum(right for right, _ in seen) < drafts.begun <= drafts.drafts
    alone, _ = run(folders["llama"], requests, [HalfRightDrafter(plain)], Strategy("half-right", 2))
    unshared = alone.take_stats().drafts["half-right"]
    assert unshared.begun_right == unshared.accepted_at[0]
    assert abs(drafts.first_accepted - unshared.first_accepted) < 0.1
    assert drafts.accepted_shares[0] > drafts.first_accepted + 0.05, "what numbers say of rows that share"


def test_a_rows_own_first_node_is_told_beside_shared_numbers():
    """The first row goes on with its first node, the second with its second, the third ends at the root."""
    order_RK = torch.tensor([[0, 1, 2], [0, 0, 1], [1, 2, 2]])
    path_RQ = torch.tensor([[0, 1, 3, 3], [0, 2, 2, 2], [0, 0, 0, 0]])
    tokens, walk = SimpleNamespace(order_RK=order_RK), SimpleNamespace(path_RQ=path_RQ)
    numbers = tree_path.numbered_path(tokens, walk)
    assert numbers.tolist() == [[2, 1, 3, 3], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert outcomes._first_is_right(numbers.numpy()).tolist() == [True, False, False]
    assert outcomes._first_is_right(path_RQ.numpy()).tolist() == [True, False, False]


def test_a_strategys_name_says_what_rows_share():
    for strategy in (Strategy("eagle", 3, most=7), Strategy("history", 1, tree=True, most=15)):
        assert Strategy.parse(str(strategy)) == strategy
    assert str(Strategy("eagle", 3, tree=True, most=7)) == "eagle:tree3~7"
    assert Strategy("eagle", 3, most=7).row_tokens(1) == 3, "one row has nobody to share with"
    assert Strategy("eagle", 1, most=15).row_tokens(4) == 4
    assert Strategy("eagle", 3).row_tokens(64) == 3 and PLAIN.row_tokens(8) == 0


SHARED = ["rollout.speculation.drafters=[history]", "rollout.max_running=8"]


def test_a_fixed_recipe_verifies_what_its_step_may():
    fixed = ["rollout.speculation.pacing=fixed", "rollout.speculation.tokens=7"]
    config = load_config(None, [*SHARED, *fixed, "rollout.speculation.step_tokens=16"])
    engine = make_engine(Decoder(SHAPE).initialise(0), config.rollout, 1024, tokenizer=None)
    engine.submit([Request(str(i), (5, 6, 7), i, SamplingParams(max_tokens=10 + 4 * i)) for i in range(8)])
    assert len(list(engine.completions())) == 8
    used = set(engine.take_stats().strategies)
    assert {"history:1~7", "history:3~7", "history:7~7"} & used >= {"history:1~7"}, used
    assert not used - {"history:1~7", "history:3~7", "history:7~7"}, "8 rows, 4 rows, and two or one"


def test_an_adaptive_recipe_with_a_budget_shares():
    budget = load_config(None, [*SHARED, "rollout.speculation.step_tokens=64"]).rollout
    engine = make_engine(Decoder(SHAPE).initialise(0), budget, 1024, tokenizer=None)
    assert engine.settings.shares and all(s.most == 7 for s in engine.pacer.settings.strategies)
    engine = make_engine(
        Decoder(SHAPE).initialise(0), load_config(None, SHARED).rollout, 1024, tokenizer=None
    )
    assert not engine.settings.shares and not any(s.most for s in engine.pacer.settings.strategies)


def test_recipes_say_what_sharing_needs():
    with pytest.raises(ConfigError, match="step_tokens = 64 does not apply.*drafters is empty"):
        load_config(None, ["rollout.speculation.step_tokens=64"])
    with pytest.raises(
        ConfigError, match="step_tokens = 64 needs rollout.speculation.verify = 'shared-noise'"
    ):
        load_config(
            None, [*SHARED, "rollout.speculation.step_tokens=64", "rollout.speculation.verify=rejection"]
        )
    with pytest.raises(ValueError, match="rejection verifies as many of each row"):
        EngineSettings(shares=True, verify="rejection")
