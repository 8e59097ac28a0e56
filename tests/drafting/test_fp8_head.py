"""An eagle head that proposes in FP8: the same completions, nearly the same acceptance, half the bytes."""

import pytest
import torch

from paceline.config import ConfigError, load_config
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.head_products import HeadProducts
from paceline.engine.engine import Engine, EngineSettings
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.plan.rollout import rollout_bytes
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.types import Request, SamplingParams
from tests.drafting.test_exactness import folders, plain_run, run  # noqa: F401
from tests.drafting.test_model_drafters import make_drafter
from tests.engine.test_engine import bits, grouped_requests

PRECISION = "rollout.speculation.eagle_precision"


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


def engine_of(policy: Decoder, fp8: bool) -> Engine:
    head = load_eagle("builtin-eagle", policy, torch.float32)
    settings = EngineSettings(max_running=8, kv_tokens=4096, request_tokens=96, max_proposal=3)
    pacer = FixedPacer(Strategy("eagle", 3), 8)
    return Engine(policy, settings, drafters=[EagleDrafter(head, fp8=fp8)], pacer=pacer)


def accepted(engine: Engine) -> list[int]:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit([Request(str(i), (3 + i, 9, 4, 8), i, sampling) for i in range(8)])
    assert len(list(engine.completions())) == 8
    return engine.take_stats().drafts["eagle"].accepted_at


@pytest.mark.parametrize("tree", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])
def test_fp8_head_keeps_completions(family, tree, folders):  # noqa: F811
    requests = grouped_requests(prompts=3, samples=3, longest=30)
    plain = plain_run(folders[family], requests)
    drafter = make_drafter("eagle", folders[family])
    drafter.fp8 = True
    _, done = run(folders[family], requests, [drafter], Strategy("eagle", 5, tree=tree))
    assert drafter.products.copies and bits(done) == bits(plain)


@pytest.mark.slow
def test_fp8_head_is_accepted_nearly_as_often_and_follows_what_is_published(policy):
    base = sum(accepted(engine_of(policy, fp8=False)))
    engine = engine_of(policy, fp8=True)
    drafted = accepted(engine)
    assert abs(sum(drafted) - base) < 0.1 * base
    good = {name: p.detach().clone() for name, p in engine.trainable_head.named_parameters()}
    engine.publish_drafter(1, {name: torch.zeros_like(tensor) for name, tensor in good.items()})
    assert sum(accepted(engine)) < 0.5 * sum(drafted), "it still drafts with the old copies"
    engine.publish_drafter(2, good)
    assert accepted(engine) == drafted


@pytest.mark.slow
def test_restored_head_is_quantised_again(policy):
    engine = engine_of(policy, fp8=True)
    drafted, state = accepted(engine), engine.drafter_state()
    engine.load_drafter_state({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert sum(accepted(engine)) < 0.5 * sum(drafted)
    engine.load_drafter_state(state)
    assert accepted(engine) == drafted


def test_fp8_head_copies_only_weights_that_propose(policy):
    head = load_eagle("builtin-eagle", policy, torch.float32)
    products = HeadProducts(head, fp8=True, deterministic=False)
    for weight in (head.attention.qkv.weight, head.feed_forward.down.weight, head.head.weight):
        x = torch.randn(5, weight.shape[1])
        exact, quantised = x @ weight.t(), products(x, weight, torch.float32)
        error = (quantised - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.06, "FP8's own rounding, and no more"
    x = torch.randn(5, head.fc.weight.shape[1])
    assert torch.equal(products(x, head.fc.weight), HeadProducts(head, False, False)(x, head.fc.weight))
    assert all(weight is not head.fc.weight for weight, _ in products.copies)


def test_plan_counts_the_fp8_copies(policy):
    planned = Decoder(policy.config, torch.bfloat16, torch.device("meta"))
    given = ["rollout.speculation.drafters=[eagle]"]
    base = rollout_bytes(planned, load_config(None, given)).drafter
    fp8 = rollout_bytes(planned, load_config(None, [*given, f"{PRECISION}=fp8"])).drafter
    copies = HeadProducts(load_eagle("builtin-eagle", policy, torch.float32), True, False).tensors
    assert fp8 - base == sum(tensor.numel() * tensor.itemsize for tensor in copies)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.speculation.drafters=[history]"], "eagle_precision = 'fp8' does not apply.*lacks 'eagle'"),
        (
            [
                "rollout.speculation.drafters=[eagle]",
                "rollout.backend=vllm",
                "rollout.speculation.verify=rejection",
                "rollout.speculation.pacing=fixed",
            ],
            "eagle_precision = 'fp8': vLLM runs the head in its own type",
        ),
    ],
)
def test_fp8_head_precision_is_refused_where_it_does_not_apply(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*overrides, f"{PRECISION}=fp8"])


def bits_of(products: HeadProducts) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in products.tensors]


@pytest.mark.parametrize("how", ["published", "restored"])
def test_fp8_copies_follow_the_weights_in_place(policy, how):
    engine = engine_of(policy, fp8=True)
    drafter = engine.drafters["eagle"]
    before, places = bits_of(drafter.products), [tensor.data_ptr() for tensor in drafter.products.tensors]
    if how == "published":
        engine.publish_drafter(1, {name: 1.3 * p.detach() for name, p in drafter.head.named_parameters()})
    else:
        state = {
            name: 1.3 * tensor if name.endswith("weight") else tensor
            for name, tensor in engine.drafter_state().items()
        }
        engine.load_drafter_state(state)
    after, expected = bits_of(drafter.products), bits_of(HeadProducts(drafter.head, True, False))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, expected, strict=True))
    assert not all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
    assert [tensor.data_ptr() for tensor in drafter.products.tensors] == places, "captured steps read them"
