"""Router replay in learning: the rollout's experts with the learner's weights, and rerouted tokens."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from paceline.engine.engine import Engine, EngineSettings
from paceline.learning.batch import MicroBatch, pack, training_sequence
from paceline.learning.learner import Learner
from paceline.learning.logprobs import token_logprobs
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder, ExpertFeedForward
from paceline.policy.replay import NOT_RECORDED, RouterReplay
from paceline.policy.tokenizer import character_tokenizer
from paceline.rollout.samples import read_groups, write_groups
from paceline.types import Completion, Group, Request, Sample, SamplingParams, Score
from tests.learning.samples import make_config, watch_gradients

CONFIG = DecoderConfig(
    "qwen3_moe",
    31,
    32,
    48,
    3,
    4,
    2,
    8,
    128,
    qk_norm=True,
    num_experts=8,
    num_experts_per_token=2,
    expert_intermediate_size=24,
    normalise_expert_weights=True,
    dense_layers=(1,),
)


def make_policy(dtype=torch.float64, router_seed: int | None = None) -> Decoder:
    """`router_seed`: the same policy with other routers."""
    policy = Decoder(CONFIG, dtype).initialise(0)
    for i in CONFIG.expert_layers:
        generator = torch.Generator().manual_seed(100 * (router_seed or 0) + i)
        policy.layers[i].feed_forward.router.weight.data.normal_(0.0, 1.0, generator=generator)
        for experts in (policy.layers[i].feed_forward.gate_up, policy.layers[i].feed_forward.down):
            experts.data.mul_(20)  # enough that another expert is another distribution
    return policy


def roll_out(policy: Decoder, records: bool = True) -> list[Group]:
    engine = Engine(policy, EngineSettings(max_running=8, kv_tokens=1024, records_routing=records))
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.submit(
        [
            Request(f"{p}/{s}", (3 + p, 7, 5), 4 * p + s, sampling, group=str(p))
            for p in range(2)
            for s in range(4)
        ]
    )
    done = {c.request.id: c for c in engine.completions()}
    return [
        Group(str(p), tuple(Sample(done[f"{p}/{s}"], Score(float(s % 3), False)) for s in range(4)))
        for p in range(2)
    ]


def packed(groups: list[Group], replayed: bool = True) -> MicroBatch:
    completions: list[Completion] = [sample.completion for group in groups for sample in group.samples]
    batch = pack([training_sequence(c) for c in completions], torch.device("cpu"))
    return batch if replayed else dataclasses.replace(batch, replay=None)


def expert_by_expert(module: ExpertFeedForward, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    rows = []
    for token, chosen in zip(x, experts.tolist(), strict=True):
        probabilities = (module.router.weight @ token).softmax(-1)[chosen]
        outputs = []
        for expert in chosen:
            gate, up = (module.gate_up[expert] @ token).chunk(2)
            outputs.append(module.down[expert] @ (F.silu(gate) * up))
        rows.append((probabilities / probabilities.sum()) @ torch.stack(outputs))
    return torch.stack(rows)


def test_replay_runs_recorded_experts_with_the_learners_weights():
    """Output and gradient against a loop over tokens; tokens that were not recorded go by the router."""
    module = make_policy().layers[2].feed_forward
    x = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own = module.route(x)[1]
    recorded = torch.tensor(
        [[1, 2], [7, 0], [3, 4], [6, 5], own[4].flip(0).tolist(), [NOT_RECORDED, NOT_RECORDED]],
        dtype=torch.int16,
    )
    experts = torch.where(recorded >= 0, recorded.long(), own)
    replay = RouterReplay(torch.stack([torch.zeros_like(recorded), recorded], dim=1))
    weight = torch.randn(6, 32, dtype=torch.float64)
    gradients = []
    for out in (module(x, replay), expert_by_expert(module, x, experts)):
        (gradient,) = torch.autograd.grad((out * weight).sum(), module.router.weight)
        gradients.append((out.detach(), gradient))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    assert gradients[0][1].abs().max() > 1e-3, "gradients flow through the router"
    expected = sum(set(a) != set(b) for a, b in zip(own[:5].tolist(), recorded[:5].tolist(), strict=True))
    assert 0 < int(replay.rerouted) == expected <= 4, "another order of the same experts is no other routing"


@pytest.mark.parametrize(
    "dtype, tolerance", [pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow), (torch.float64, 1e-12)]
)
def test_replay_with_the_rollouts_weights_changes_nothing(dtype, tolerance):
    policy = make_policy(dtype)
    groups = roll_out(policy)
    batch = packed(groups)
    with torch.no_grad():
        replayed = token_logprobs(policy, batch)[0]
        own = token_logprobs(policy, packed(groups, replayed=False))[0]
    assert batch.replay.rerouted == 0 and batch.replay.routed == 2 * sum(
        3 + 20 - 1 for g in groups for _ in g.samples
    )
    torch.testing.assert_close(replayed, own, rtol=0, atol=tolerance)
    torch.testing.assert_close(replayed, batch.rollout_logprobs_R.to(dtype), rtol=0, atol=10 * tolerance)


def test_replay_uses_the_rollouts_experts_with_other_routers():
    """Routers that choose other experts, weighted alike: only with replay is it the rollout's policy."""
    policy = make_policy()
    for i in CONFIG.expert_layers:
        # Chosen by the sign of nearly nothing, weighted equally.
        policy.layers[i].feed_forward.router.weight.data.mul_(1e-9)
    groups = roll_out(policy)
    for i in CONFIG.expert_layers:
        policy.layers[i].feed_forward.router.weight.data.neg_()
    batch = packed(groups)
    with torch.no_grad():
        replayed = token_logprobs(policy, batch)[0]
        own = token_logprobs(policy, packed(groups, replayed=False))[0]
    torch.testing.assert_close(replayed, batch.rollout_logprobs_R, rtol=0, atol=1e-6)
    assert (own - batch.rollout_logprobs_R).abs().max() > 0.1
    assert batch.replay.rerouted == batch.replay.routed


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_update_reports_the_share_of_rerouted_tokens(checkpointing):
    """The share of one forward pass; activation checkpointing runs layers twice and must count once."""
    groups = roll_out(make_policy())
    other = make_policy(router_seed=1)
    batch = packed(groups)
    with torch.no_grad():
        token_logprobs(other, batch)
    share = float(batch.replay.rerouted / batch.replay.routed)
    assert 0.3 < share < 1.0
    learner = Learner(other, make_config(f"policy.activation_checkpointing={str(checkpointing).lower()}"))
    gradients = watch_gradients(learner)
    assert learner.update(groups)["mismatch/rerouted"] == pytest.approx(share)
    assert all(
        gradients[f"layers.{i}.feed_forward.router.weight"].abs().max() > 0 for i in CONFIG.expert_layers
    )
    assert Learner(make_policy(), make_config()).update(groups)["mismatch/rerouted"] == 0.0
    assert "mismatch/rerouted" not in Learner(make_policy(), make_config()).update(
        roll_out(make_policy(), records=False)
    )


def test_reference_policy_routes_without_replay():
    groups = roll_out(make_policy())
    policy = make_policy(router_seed=1)
    learner = Learner(policy, make_config("learning.kl_coef=0.1"))
    with torch.no_grad():
        own = token_logprobs(policy, packed(groups, replayed=False))[0]
    assert torch.equal(learner._reference_logprobs(packed(groups)), own)


def test_saved_samples_keep_their_routing(tmp_path):
    groups = roll_out(make_policy())
    write_groups(tmp_path / "a.jsonl", groups, character_tokenizer("0123456789+-= abcdefghijklmnopqrst"))
    assert read_groups(tmp_path / "a.jsonl") == groups


def test_routing_of_another_policy_is_refused():
    other = Decoder(dataclasses.replace(CONFIG, num_experts_per_token=3), torch.float64).initialise(0)
    with pytest.raises(ValueError, match="chooses 3 experts in each of 2 layers.*recorded for 2 in 2"):
        token_logprobs(other, packed(roll_out(make_policy())))
