"""What the engine records of its routing: the experts that each token really went through, whatever else
happened meanwhile.
"""

from unittest import mock

import pytest
import torch

from paceline.config import ConfigError, RolloutConfig, load_config
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.factory import make_engine as engine_from_recipe
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.paged.cache import BLOCK_SIZE, KVCache
from paceline.paged.routing import RoutingRecord
from paceline.plan.rollout import kv_pool_bytes, rollout_bytes
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder, ExpertFeedForward
from paceline.policy.huggingface import exported_tensors, load_policy
from paceline.policy.replay import packed_replay
from paceline.tasks.dialogue import Dialogue
from paceline.types import Completion, FinishReason, Request, SamplingParams
from tests.drafting.test_exactness import HalfRightDrafter, OracleDrafter, RandomDrafter
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import small_model

FREE = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Experts in layers 0 and 2 of three."""
    path = tmp_path_factory.mktemp("moe")
    small_model("qwen3_moe", mlp_only_layers=[1]).save_pretrained(path)
    return path


def make_engine(folder, dtype=torch.float32, drafters=(), strategy=PLAIN, **settings) -> Engine:
    settings = EngineSettings(**{"max_running": 8, "kv_tokens": 2048, "records_routing": True, **settings})
    return Engine(load_policy(folder, dtype), settings, drafters=drafters, pacer=FixedPacer(strategy, 1000))


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    return {c.request.id: c for c in engine.completions()}


def recorded(completion: Completion) -> torch.Tensor:
    tokens = len(completion.request.prompt) + len(completion.tokens)
    assert completion.routing.tokens == tokens - 1
    return packed_replay([completion.routing], [tokens - 1], torch.device("cpu")).recorded_TLK.long()


def learners_choice(policy: Decoder, completion: Completion) -> torch.Tensor:
    """The same, from the learner's definition of the policy."""
    chosen, route = [], ExpertFeedForward.route

    def watched(self, *arguments):
        chosen.append(route(self, *arguments)[1])
        return route(self, *arguments)

    tokens_T = torch.tensor(completion.request.prompt + completion.tokens)
    attention = PackedAttention([len(tokens_T)], torch.device("cpu"))
    with mock.patch.object(ExpertFeedForward, "route", watched), torch.no_grad():
        policy(tokens_T, attention.positions_T, attention)
    return torch.stack(chosen, dim=1)[:-1]


@pytest.mark.parametrize(
    "count, settings",
    [
        pytest.param(4, {}, id="roomy"),
        pytest.param(1, {"kv_tokens": 128, "prefill_tokens": 7}, id="cramped", marks=pytest.mark.slow),
    ],
)
def test_routing_record_equals_the_learners_choice_in_float64(folder, count, settings):
    engine = make_engine(
        folder, torch.float64, [HistoryDrafter(bank_tokens=240)], Strategy("history", count), **settings
    )
    done = run(engine, grouped_requests(prompts=5, samples=3, longest=50))
    assert len(done) == 15 and all(c.tokens for c in done.values())
    for completion in done.values():
        assert torch.equal(recorded(completion), learners_choice(engine.policy, completion)), (
            completion.request.id
        )
    assert bool(engine.preemptions) == bool(settings)


@pytest.mark.slow
def test_routing_depends_on_nothing_but_the_request(folder):
    """Speculation that is right, wrong or both; batches; a pool with preemption: the same float32 bits, and
    those without recording.
    """
    requests = grouped_requests(prompts=4, samples=3, longest=50)
    plain = run(make_engine(folder), requests)
    silent = run(make_engine(folder, records_routing=False), requests)
    assert bits(silent) == bits(plain) and all(c.routing is None for c in silent.values())
    engines = [make_engine(folder, max_running=3), make_engine(folder, kv_tokens=160)]
    for drafter in (RandomDrafter(), OracleDrafter(plain), HalfRightDrafter(plain)):
        engines += [
            make_engine(folder, drafters=[drafter], strategy=Strategy(drafter.name, count))
            for count in (1, 7)
        ]
    for engine in engines:
        done = run(engine, requests)
        assert bits(done) == bits(plain)
        assert {name: c.routing for name, c in done.items()} == {name: c.routing for name, c in plain.items()}


def test_routing_is_recomputed_after_a_weight_update(folder):
    """The cache is recomputed, so everything before the update is routed by the new weights too."""
    engine = make_engine(folder, torch.float64)
    generator = torch.Generator().manual_seed(1)
    changed = dict(exported_tensors(engine.policy))
    for name, tensor in changed.items():
        if name.endswith("gate.weight"):  # a router's
            changed[name] = tensor + torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    engine.submit(
        [
            Request("short", (9, 8), 1, SamplingParams(max_tokens=10, ignore_eos=True)),
            Request("long", tuple(range(3, 30)), 2, FREE),
        ]
    )
    for _ in engine.completions():
        engine.pause()
    engine.update_weights(1, changed.items())
    engine.sleep()
    assert engine.cache.routing.storage.tensor is None, (
        "its memory is lent out too; on a GPU the address stays"
    )
    engine.wake()
    engine.resume()
    (long,) = engine.completions()
    assert [s.weight_version for s in long.segments] == [0, 1] and long.segments[0].stop >= 9
    assert torch.equal(recorded(long), learners_choice(engine.policy, long))
    old = learners_choice(load_policy(folder, torch.float64), long)
    assert not torch.equal(recorded(long)[:30], old[:30])


def test_routing_of_held_caches_carries_over_to_the_next_turn(folder):
    engine, prompt = make_engine(folder), tuple(range(3, 40))
    dialogue = Dialogue(Request("a", prompt, 5, SamplingParams(max_tokens=40, ignore_eos=True), hold=True))
    engine.submit([Request("a", prompt, 5, FREE, hold=True)])
    dialogue.add_response(next(engine.completions()), "")
    engine.take_stats()
    engine.submit([dialogue.continue_with((50, 51, 52), "")])
    (second,) = engine.completions()
    assert engine.take_stats().prefill_tokens == 3, "the rest comes from the held cache"
    dialogue.add_response(second, "")
    merged = dialogue.completion()
    fresh = run(make_engine(folder), [Request("a", second.request.prompt, 5, second.request.sampling)])["a"]
    assert merged.routing == fresh.routing and merged.routing.tokens == len(prompt) + len(merged.tokens) - 1


def test_routing_of_aborted_requests_covers_their_tokens(folder):
    engine = make_engine(folder, torch.float64)
    engine.submit(
        [
            Request("short", (9, 8), 1, SamplingParams(max_tokens=5, ignore_eos=True)),
            Request("long", (7, 8, 9), 2, FREE),
        ]
    )
    engine.submit([Request("preempted", (4, 5), 3, FREE)])
    for _ in engine.completions():
        engine.pause()
    engine.abort(["long"])
    engine.update_weights(1)
    engine.abort(["preempted"])
    engine.resume()
    done = list(engine.completions())
    assert [c.finish_reason for c in done] == [FinishReason.ABORTED] * 2
    for completion in done:
        assert completion.tokens and torch.equal(
            recorded(completion), learners_choice(engine.policy, completion)
        )


@pytest.mark.parametrize("num_experts, dtype", [(256, torch.uint8), (257, torch.int16)])
def test_routing_record_keeps_every_expert_and_skips_negative_slots(num_experts, dtype):
    config = DecoderConfig(
        "qwen3_moe",
        97,
        48,
        80,
        3,
        6,
        2,
        16,
        256,
        num_experts=num_experts,
        num_experts_per_token=2,
        dense_layers=(0,),
    )
    record = RoutingRecord(config, 4, BLOCK_SIZE, torch.device("cpu"))
    assert record.storage.dtype == dtype
    chosen = [
        torch.tensor([[num_experts - 1, 0], [3, 4], [5, 6]]) + layer * torch.tensor([-1, 1])
        for layer in range(2)
    ]
    record.write(torch.tensor([2 * BLOCK_SIZE, -1, 2 * BLOCK_SIZE + 1]), chosen)
    routing = record.read([2, 3], 2)
    read = packed_replay([routing], [2], torch.device("cpu")).recorded_TLK
    assert read.tolist() == [[[num_experts - 1, 0], [num_experts - 2, 1]], [[5, 6], [4, 7]]]
    assert record.storage.tensor[1:].count_nonzero() == record.storage.tensor[2].count_nonzero(), (
        "only its own block was written"
    )


def test_routing_is_copied_with_the_blocks_of_siblings():
    config = DecoderConfig("qwen3_moe", 97, 48, 80, 3, 6, 2, 16, 256, num_experts=8, num_experts_per_token=2)
    cache = KVCache(config, 4, torch.float32, torch.device("cpu"), records_routing=True)
    cache.routing.write(torch.tensor([BLOCK_SIZE]), [torch.tensor([[5, 6]])] * 3)
    cache.copy_blocks([1], [3])
    assert cache.routing_of([3], 1) == cache.routing_of([1], 1) != cache.routing_of([2], 1)


def test_router_replay_is_refused_where_routing_cannot_be_recorded():
    with pytest.raises(
        ConfigError, match="rollout.router_replay.*'reference' does not record.*rollout.backend=native"
    ):
        load_config(None, ["rollout.router_replay=true", "rollout.backend=reference"])
    dense = Decoder(DecoderConfig("qwen3", 97, 48, 80, 1, 6, 2, 16, 256)).initialise(0)
    with pytest.raises(ConfigError, match="rollout.router_replay = True: this policy has no experts"):
        engine_from_recipe(dense, RolloutConfig(router_replay=True), 64, tokenizer=None)


def test_rollout_plan_includes_recorded_routing(folder):
    policy = load_policy(folder, torch.float32)
    config = load_config(None, ["rollout.router_replay=true", "rollout.max_running=4"])
    engine = engine_from_recipe(policy, config.rollout, 512, tokenizer=None)
    planned = rollout_bytes(Decoder(policy.config, torch.float32, "meta"), config)
    assert (
        kv_pool_bytes(planned.kv_token, 512)
        == engine.cache.num_bytes + engine.cache.routing.storage.num_bytes
    )
