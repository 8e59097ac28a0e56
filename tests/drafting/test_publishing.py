"""A trained head reaches the engine by copy, and keeps its place there."""

import copy

import pytest
import torch

from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle
from paceline.engine.engine import Engine, EngineSettings
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.types import Precision, Request, SamplingParams
from tests.drafting.online_helpers import follow, groups_of, online


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


@pytest.fixture
def head(policy):
    return load_eagle("builtin-eagle", policy, torch.float32)


def engine_of(policy, head, **settings) -> Engine:
    made = EngineSettings(max_running=4, kv_tokens=2048, request_tokens=96, max_proposal=3, **settings)
    return Engine(policy, made, drafters=[EagleDrafter(head)], pacer=FixedPacer(Strategy("eagle", 3), 4))


def storages(tensors) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def snapshot(head) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in head.named_parameters()}


def test_publishing_fills_the_storage_that_captured_steps_read(policy, head):
    """The publisher may keep writing to what was published."""
    engine = engine_of(policy, head)
    own = storages(head.parameters())
    published = {name: tensor + 1 for name, tensor in snapshot(head).items()}
    engine.publish_drafter(1, published)
    assert storages(head.parameters()) == own and not own & storages(published.values())
    kept = snapshot(head)
    for tensor in published.values():
        tensor.zero_()
    assert all(torch.equal(p, kept[name]) for name, p in head.named_parameters())


def test_published_head_survives_sleep_weights_and_another_precision(policy, head):
    """Its own parameters, bit for bit; what drafts with them is looked at in a longer test."""
    from paceline.policy.huggingface import exported_tensors

    engine = engine_of(copy.deepcopy(policy), head, precision=Precision.FP8)
    published = {name: tensor * 1.5 for name, tensor in snapshot(head).items()}
    engine.publish_drafter(3, published)
    weights = [(name, tensor.clone()) for name, tensor in exported_tensors(engine.policy)]
    for change in (
        engine.sleep,
        engine.wake,
        lambda: engine.update_weights(1, weights),
        engine.fall_back_to_base_precision,
    ):
        change()
        assert all(torch.equal(p, published[name]) for name, p in head.named_parameters())
        assert engine.take_stats().drafter_version == 3


@pytest.mark.gpu
def test_published_head_is_where_the_graphs_read_it():
    """Drafts of an engine whose graphs were captured before the head learned are those of a new engine."""
    policy = load_policy(BUILTIN_POLICY, torch.bfloat16, torch.device("cuda"))
    head = load_eagle("builtin-eagle", policy, torch.bfloat16, torch.device("cuda"))

    def engine() -> Engine:
        settings = EngineSettings(max_running=8, kv_tokens=4096, deterministic=True)
        return Engine(policy, settings, drafters=[EagleDrafter(head)], pacer=FixedPacer(Strategy("eagle", 3)))

    def accepted(engine: Engine) -> list[int]:
        requests = [
            Request(str(i), (3 + i, 9, 4, 8), i, SamplingParams(max_tokens=60, ignore_eos=True))
            for i in range(8)
        ]
        engine.submit(requests)
        assert len(list(engine.completions())) == 8
        return engine.take_stats().drafts["eagle"].accepted_at

    old = engine()
    before = accepted(old)
    drafter = online(policy, head, lr=1e-2)
    drafter.drafting = old
    assert follow(drafter, 1, groups_of(policy, 16))["drafter/version"] == 1
    assert accepted(old) == accepted(engine()) != before
