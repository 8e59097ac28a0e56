"""Trees give the same bits as plain decoding, whatever proposes them and whichever way they branch."""

import random
from dataclasses import replace

import pytest
import torch

from paceline.config import ConfigError, load_config
from paceline.drafting import eagle
from paceline.drafting.base import Drafter
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.growth import CANDIDATES, TreeGrowth, TreeShape
from paceline.drafting.history import HistoryDrafter
from paceline.engine import step, tree_path
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.factory import make_engine
from paceline.kernels.candidates import best_candidates
from paceline.kernels.rejection import Truncation
from paceline.kernels.row_step import TreeKeys
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.paged.cache import KVCache
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.types import Completion, FinishReason, Request, SamplingParams
from tests.drafting.test_exactness import OracleDrafter, folders, plain_run, run  # noqa: F401
from tests.drafting.test_model_drafters import make_drafter
from tests.drafting.test_wrong_drafters import SHAPE
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import EVERY_FAMILY

VOCABULARY = 97


class BranchingDrafter(Drafter):
    """Random trees that hold the right answer more or less far, at a random place among wrong siblings."""

    name = "branching"
    max_tokens = 15

    def __init__(self, answers: dict[str, Completion], right: float = 0.8, missing: float = 0.1) -> None:
        self.answers = answers
        self.right = right
        self.missing = missing
        self.rng = random.Random(0)
        self.requests: dict[int, Request] = {}

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        self.requests[slot] = request

    def propose_tree(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        for slot in slots_R.tolist():
            if slot in self.requests and bool(self.context.rows.active[slot]):
                tokens, parents = self.tree(slot, count)
                self.context.proposals_SK[slot, :count] = torch.tensor(tokens)
                self.context.parents_SK[slot, :count] = torch.tensor(parents)

    def tree(self, slot: int, count: int) -> tuple[list[int], list[int]]:
        request = self.requests[slot]
        start = int(self.context.rows.length[slot]) - len(request.prompt)
        answer = self.answers[request.id].tokens[start:]
        tokens, parents = [], []
        path = [0]  # the nodes that say what will be sampled
        for node in range(1, count + 1):
            depth = len(path) - 1
            if depth < len(answer) and self.rng.random() < self.right * 0.6:
                tokens.append(answer[depth])
                parents.append(path[-1])
                path.append(node)
            elif self.rng.random() < self.missing:
                tokens.append(-1)
                parents.append(self.rng.randrange(node))
            else:
                parent = self.rng.randrange(node)
                wrong = set(range(VOCABULARY)) - {
                    t for t, p in zip(tokens, parents, strict=True) if p == parent
                }
                if parent in path and path.index(parent) < len(answer):
                    wrong -= {answer[path.index(parent)]}
                tokens.append(self.rng.choice(sorted(wrong)))
                parents.append(parent)
        return tokens, parents


def tree_run(folder, requests, drafter: Drafter, count: int, **settings):
    return run(folder, requests, [drafter], Strategy(drafter.name, count, tree=True), **settings)


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("count", [pytest.param(4, marks=pytest.mark.slow), 15])
def test_trees_give_the_bits_of_plain_decoding(family, count, folders):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=3, longest=50)
    plain = plain_run(folders[family], requests)
    for drafter in (BranchingDrafter(plain), OracleDrafter(plain), HistoryDrafter(bank_tokens=200)):
        engine, done = tree_run(folders[family], requests, drafter, count)
        assert bits(done) == bits(plain), drafter.name
        if drafter.name == "branching" and count == 15:
            assert engine.take_stats().drafts["branching"].accept_length > 2


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
@pytest.mark.parametrize(
    "count", [5, pytest.param(1, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow)]
)
def test_grown_trees_give_the_bits_of_plain_decoding(family, kind, count, folders):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=3, longest=40)
    plain = plain_run(folders[family], requests)
    _, done = tree_run(folders[family], requests, make_drafter(kind, folders[family]), count)
    assert bits(done) == bits(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "deepest", [pytest.param(TreeShape.SHALLOWEST, marks=pytest.mark.slow), TreeShape.LIMIT]
)
def test_flat_and_deep_trees_give_the_bits_of_plain_decoding(deepest, folders, monkeypatch):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=3, longest=40)
    plain = plain_run(folders["qwen3"], requests)
    drafter = make_drafter("eagle", folders["qwen3"])
    drafter.deepest = deepest
    grown: list[TreeShape] = []
    monkeypatch.setattr(eagle, "TreeGrowth", lambda shape, *of: grown.append(shape) or TreeGrowth(shape, *of))
    _, done = tree_run(folders["qwen3"], requests, drafter, 15)
    assert bits(done) == bits(plain)
    assert {len(shape.widths) + 1 for shape in grown} == {deepest}


@pytest.mark.parametrize(
    "family, precision",
    [
        pytest.param("qwen3", "fp8+kv", marks=pytest.mark.slow),
        pytest.param("qwen2", "fp8", marks=pytest.mark.slow),
        ("qwen3_moe", "fp8+kv"),
    ],
)
def test_fp8_policy_keeps_its_bits_in_trees(family, precision, folders):  # noqa: F811
    requests = grouped_requests(prompts=3, samples=2, longest=30)
    plain = plain_run(folders[family], requests, precision=precision)
    for drafter, count in ((BranchingDrafter(plain), 15), (HistoryDrafter(bank_tokens=240), 5)):
        _, done = tree_run(folders[family], requests, drafter, count, precision=precision)
        assert bits(done) == bits(plain), drafter.name


@pytest.mark.slow
def test_trees_keep_bits_when_shapes_and_drafters_change(folders):  # noqa: F811
    """With a pool so small that rows are preempted and come back, chunked prefills and siblings."""
    requests = grouped_requests(prompts=6, samples=3, longest=50)
    plain = plain_run(folders["qwen3"], requests)
    rng = random.Random(3)
    choices = [
        PLAIN,
        Strategy("history", 3),
        Strategy("history", 9, tree=True),
        Strategy("eagle", 4),
        Strategy("eagle", 7, tree=True),
        Strategy("draft_model", 3),
        Strategy("draft_model", 12, tree=True),
        Strategy("branching", 15, tree=True),
    ]

    def switch(engine: Engine, count: int) -> None:
        engine.pacer = FixedPacer(rng.choice(choices), 1000)

    drafters = [HistoryDrafter(), BranchingDrafter(plain)]
    drafters += [make_drafter(kind, folders["qwen3"]) for kind in ("eagle", "draft_model")]
    engine, done = run(
        folders["qwen3"], requests, drafters, choices[4], switch, kv_tokens=256, prefill_tokens=11
    )
    assert bits(done) == bits(plain)
    assert engine.preemptions > 0 and len(set(engine.take_stats().strategies)) >= 5


def test_trees_stop_at_stops_and_limits_inside_an_accepted_path(folders):  # noqa: F811
    """Every max_tokens from 1 to 20 and a stop token inside the path, with a drafter that is mostly right."""
    prompt = (5, 6, 7)
    free = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9)
    long = plain_run(folders["llama"], [Request("r", prompt, 3, free)])
    tokens = long["r"].tokens
    requests = [Request(str(n), prompt, 3, replace(free, max_tokens=n)) for n in range(1, 21)]
    requests += [
        Request(f"stop{i}", prompt, 3, replace(free, stop_token_ids=(t,))) for i, t in enumerate(tokens)
    ]
    drafter = BranchingDrafter({r.id: long["r"] for r in requests}, right=1.3)
    _, done = tree_run(folders["llama"], requests, drafter, 15, max_running=40, kv_tokens=4096)
    for n in range(1, 21):
        assert done[str(n)].tokens == tokens[:n] and done[str(n)].finish_reason is FinishReason.LENGTH
    for i, token in enumerate(tokens):
        end = tokens.index(token) + 1
        assert done[f"stop{i}"].tokens == tokens[:end]
        assert done[f"stop{i}"].finish_reason is FinishReason.STOP
        assert done[f"stop{i}"].logprobs == long["r"].logprobs[:end]


def test_trees_respect_the_models_own_limit(folders):  # noqa: F811
    request = Request("r", (5,) * 240, 3, SamplingParams(max_tokens=50, ignore_eos=True))
    plain = plain_run(folders["llama"], [request])
    _, done = tree_run(folders["llama"], [request], BranchingDrafter(plain, right=1.3), 15)
    assert bits(done) == bits(plain) and len(plain["r"].tokens) == 16


@pytest.mark.parametrize(
    "kind", ["eagle", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("history", "draft_model"))]
)
def test_trees_keep_top_logprobs_truncation_and_greedy_rows(kind, folders):  # noqa: F811
    """A head with a vocabulary of its own, too."""
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
            SamplingParams(max_tokens=16, ignore_eos=True, **settings[i % 5]),
        )
        for i in range(10)
    ]
    plain = plain_run(folders["qwen3"], requests)
    drafter = HistoryDrafter() if kind == "history" else make_drafter(kind, folders["qwen3"], draft_vocab=70)
    _, done = tree_run(folders["qwen3"], requests, drafter, 7)
    assert bits(done) == bits(plain)
    assert {n: c.top_logprobs for n, c in done.items()} == {n: c.top_logprobs for n, c in plain.items()}


def test_routing_moves_with_the_path(folders):  # noqa: F811
    requests = grouped_requests(prompts=3, samples=3, longest=40)
    plain = plain_run(folders["qwen3_moe"], requests, records_routing=True)
    _, done = tree_run(folders["qwen3_moe"], requests, BranchingDrafter(plain), 11, records_routing=True)
    assert bits(done) == bits(plain)
    assert {n: c.routing for n, c in done.items()} == {n: c.routing for n, c in plain.items()}


@pytest.mark.parametrize("bug", ["a sibling's keys", "a path that does not move", "the wrong parent's child"])
def test_tree_tests_detect_planted_bugs(bug, folders, monkeypatch):  # noqa: F811
    """The tests above can fail."""
    requests = grouped_requests(prompts=2, samples=3, longest=40)
    plain = plain_run(folders["llama"], requests)
    if bug == "a sibling's keys":
        gather = step.gather_tree

        def mistaken(*arguments):
            queries, keys = gather(*arguments)
            shifted = torch.roll(keys.slots_RQD, 1, dims=1)
            return queries, TreeKeys(
                keys.depth_RQ, torch.where(keys.depth_RQ[..., None] > 1, shifted, keys.slots_RQD)
            )

        monkeypatch.setattr(step, "gather_tree", mistaken)
    elif bug == "a path that does not move":
        monkeypatch.setattr(KVCache, "move_slots", lambda *arguments: None)
    else:
        walk = tree_path.walk_tree

        def mistaken_walk(slots_R, proposals_SK, parents_SK, *others):
            return walk(slots_R, proposals_SK, torch.zeros_like(parents_SK), *others)

        monkeypatch.setattr(tree_path, "walk_tree", mistaken_walk)
    _, done = tree_run(folders["llama"], requests, BranchingDrafter(plain), 11)
    assert bits(done) != bits(plain)


# -- what is proposed -------------------------------------------------------------------------------------


class WatchedTrees:
    """Keeps each row's tokens and the tree that was proposed behind them."""

    def __init__(self, drafter: Drafter) -> None:
        self.seen = []
        propose = drafter.propose_tree

        def record(slots_R: torch.Tensor, count: int, truncates: bool) -> None:
            propose(slots_R, count, truncates)
            rows = drafter.context.rows
            for slot in slots_R.tolist():
                length = int(rows.length[slot])
                if rows.active[slot] and length > 1 and length + count < rows.limit[slot]:
                    names = ("temperature", "seed", "top_k", "top_p", "min_p")
                    sampling = tuple(getattr(rows, name)[slot : slot + 1].clone() for name in names)
                    tree = (
                        drafter.context.proposals_SK[slot, :count].tolist(),
                        drafter.context.parents_SK[slot, :count].tolist(),
                    )
                    self.seen.append((rows.tokens[slot, :length].clone(), sampling, *tree, truncates))

        drafter.propose_tree = record


def draft_model_logits(policy: Decoder, tokens_L: torch.Tensor, path: list[int]) -> torch.Tensor:
    tokens = torch.tensor([*tokens_L.tolist(), *path])
    packed = PackedAttention([len(tokens)], policy.device)
    return policy.logits(policy(tokens, packed.positions_T, packed)[-1:])[0]


def eagle_logits(policy: Decoder, head: EagleHead, tokens_L: torch.Tensor, path: list[int]) -> torch.Tensor:
    """From the definition in `eagle_head.py`, without any cache."""
    captured = []
    packed = PackedAttention([len(tokens_L) - 1], policy.device)
    x = policy.embedding(tokens_L[:-1])
    for index, layer in enumerate(policy.layers):
        if index in head.config.captured_layers:
            captured.append(x)
        x = layer(x, policy.rope_table[packed.positions_T], index, packed)
    states = head.features(captured)
    for end in range(len(path) + 1):
        tokens = torch.tensor([*tokens_L.tolist(), *path[:end]])
        packed = PackedAttention([len(tokens) - 1], policy.device)
        out = head(states, policy.embedding(tokens[1:]), packed.positions_T, packed)[-1:]
        states = torch.cat((states, out))
    logits_V = torch.full((policy.config.vocab_size,), -torch.inf, dtype=out.dtype)
    logits_V[head.draft_to_target] = head.logits(out)[0]
    return logits_V


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, truncated, draft_vocab",
    [
        ("eagle", False, 70),
        ("eagle", False, 0),
        ("eagle", True, 70),
        ("draft_model", False, 0),
        ("draft_model", True, 0),
    ],
)
def test_tree_nodes_are_the_best_candidates_behind_their_path(kind, truncated, draft_vocab, folders):  # noqa: F811
    """In float64, against a computation without caches: through shared prompts, chunks, preemption, and walks
    whose paths moved.
    """
    requests = grouped_requests(prompts=3, samples=2, longest=40, seed=4)
    cut = dict(top_k=20, top_p=0.9) if truncated else {}
    sampling = SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True, **cut)
    requests = [Request(r.id, r.prompt, r.seed, sampling) for r in requests]
    policy = load_policy(folders["qwen3"], torch.float64)
    drafter = make_drafter(kind, folders["qwen3"], torch.float64, draft_vocab=draft_vocab)
    watched = WatchedTrees(drafter)
    settings = EngineSettings(max_running=4, kv_tokens=144, prefill_tokens=13)
    pacer = FixedPacer(Strategy(kind, 12, tree=True), 1000)
    engine = Engine(policy, settings, drafters=[drafter], pacer=pacer)
    engine.submit(requests)
    list(engine.completions())
    assert engine.preemptions > 0
    branched = deep = 0
    with torch.no_grad():
        for tokens_L, sampling, tokens, parents, truncates in watched.seen[::4]:
            temperature, seed, *truncation = sampling
            children: dict[int, list[int]] = {}
            for token, parent in zip(tokens, parents, strict=True):
                children.setdefault(parent, []).append(token)
            for parent, found in children.items():
                assert len(set(found)) == len(found), "siblings differ"
                path, node = [], parent
                while node:
                    path.insert(0, tokens[node - 1])
                    node = parents[node - 1]
                logits_V = (
                    eagle_logits(policy, drafter.head, tokens_L, path)
                    if kind == "eagle"
                    else draft_model_logits(drafter.policy, tokens_L, path)
                )
                position = torch.tensor([len(tokens_L) + len(path)])
                best, _ = best_candidates(
                    logits_V[None],
                    temperature,
                    seed,
                    position,
                    CANDIDATES,
                    Truncation(*truncation) if truncates else None,
                )
                assert set(found) <= set(best[0].tolist())
                branched += len(found) > 1
                deep += len(path) > 1
    assert branched > 10 and deep > 10


@pytest.mark.slow
def test_tree_gains_more_than_a_chain_of_as_many_tokens(folders):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=4, longest=60)
    gained = {}
    for tree in (False, True):
        drafter = make_drafter("draft_model", folders["qwen3"])
        engine, _ = run(folders["qwen3"], requests, [drafter], Strategy("draft_model", 11, tree))
        gained[tree] = engine.take_stats().drafts["draft_model"].accept_length
    assert gained[True] > 1.05 * gained[False], gained  # 1.66 and 1.51 tokens a step


def test_history_tree_proposes_every_match(folders):  # noqa: F811
    """Two siblings went different ways at the same place: a tree has both, so either is foreseen."""
    prompt = tuple(range(5, 30))
    free = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0)
    first = [Request(str(seed), prompt, seed, free) for seed in range(6)]
    accepted = {}
    for tree in (False, True):
        engine, _ = run(folders["llama"], first, [HistoryDrafter()], Strategy("history", 15, tree))
        engine.take_stats()
        engine.submit([replace(request, id=request.id + "again") for request in first])
        list(engine.completions())
        accepted[tree] = engine.take_stats().drafts["history"].accept_length
    assert accepted[True] > 2 and accepted[True] >= accepted[False], accepted


def test_recipe_errors_name_what_trees_need():
    with pytest.raises(ConfigError, match="shape = 'tree' does not apply.*drafters is empty"):
        load_config(None, ["rollout.speculation.shape=tree"])
    with pytest.raises(ConfigError, match="shape = 'tree' needs rollout.speculation.verify = 'shared-noise'"):
        load_config(
            None,
            [
                "rollout.speculation.drafters=[history]",
                "rollout.speculation.shape=tree",
                "rollout.speculation.verify=rejection",
            ],
        )


@pytest.mark.parametrize("pacing", ["fixed", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_recipe_configures_its_trees(pacing):
    config = load_config(
        None,
        [
            "rollout.speculation.drafters=[history]",
            "rollout.speculation.shape=tree",
            f"rollout.speculation.pacing={pacing}",
        ],
    )
    engine = make_engine(Decoder(SHAPE).initialise(0), config.rollout, 1024, tokenizer=None)
    if pacing == "adaptive":
        assert all(strategy.tree for strategy in engine.pacer.settings.strategies)
    engine.submit([Request(str(i), (5, 6, 7), i, SamplingParams(max_tokens=40)) for i in range(4)])
    assert len(list(engine.completions())) == 4
    stats = engine.take_stats()
    if pacing == "fixed":  # an adaptive pacer may find that plain steps are faster here
        assert any(name.startswith("history:tree") for name in stats.strategies)


def test_strategy_name_contains_its_shape():
    for strategy in (PLAIN, Strategy("eagle", 7), Strategy("eagle", 15, tree=True)):
        assert Strategy.parse(str(strategy)) == strategy
    with pytest.raises(ValueError, match="'eagle:tree3~4': rows that share .* slower; use eagle:tree3$"):
        Strategy.parse("eagle:tree3~4")
