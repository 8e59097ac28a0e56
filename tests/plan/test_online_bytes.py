"""What the plan says of a drafter that learns, against tensors that exist."""

import pytest
import torch

from paceline.config import load_config
from paceline.drafting import online
from paceline.drafting.eagle_folder import load_eagle, save_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.training import teacher_states
from paceline.learning.batch import pack
from paceline.plan.learning import meta_policy, one_response_sequence
from paceline.plan.machine import Machine
from paceline.plan.memory_tracker import MemoryTracker
from paceline.plan.online import online_bytes
from paceline.plan.plan import make_plan
from paceline.policy.decoder import Decoder
from tests.plan.shapes import SMALL_SHAPES

SHAPE = SMALL_SHAPES["qwen3"]


@pytest.fixture
def overrides(tmp_path, monkeypatch):
    monkeypatch.setattr(online, "MAX_TOKENS", 48)
    monkeypatch.setattr("paceline.plan.online.MAX_TOKENS", 48)
    monkeypatch.setattr(online, "MICRO_BATCH_TOKENS", {"cpu": 144, "meta": 144})
    policy = Decoder(SHAPE).initialise(0)
    save_eagle(EagleHead(config_for(SHAPE, (0, 1))).initialise(policy, 0), tmp_path / "eagle")
    speculation = {
        "drafters": "[eagle]",
        "eagle_path": tmp_path / "eagle",
        "online.when": "always",
        "online.unroll": 3,
    }
    return [f"rollout.speculation.{key}={value}" for key, value in speculation.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pass_is_that_of_a_real_drafter(overrides, dtype):
    config = load_config(None, overrides)
    planned = online_bytes(meta_policy(SHAPE, config, dtype), config)
    policy = Decoder(SHAPE, dtype).initialise(0)
    head = load_eagle(config.rollout.speculation.eagle_path, policy, dtype)
    drafter = online.make_online(policy, head, config, print)
    optimiser = drafter.trainer.optimiser
    assert planned.optimiser == sum(tensor.nbytes for name, tensor in optimiser.state().items())
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = pack([one_response_sequence(48)] * 3, policy.device)
    known = [
        *policy.parameters(),
        policy.rope_table,
        *head.parameters(),
        *head.buffers(),
        head.rope_table,
        *(p.grad for p in head.parameters()),
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), MemoryTracker(known) as memory:
        drafter.trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
    gradients = sum(parameter.nbytes for parameter in head.parameters())
    assert planned.training == pytest.approx(gradients + memory.peak, rel=0.05)


def test_the_plan_names_its_parts(overrides):
    machine = Machine("test", 10**10, taken_bytes=0)
    with_it, without = (
        make_plan(load_config(None, keys), SHAPE, torch.bfloat16, machine)
        for keys in (overrides, overrides[:2])
    )
    assert with_it.bytes_of("drafter's optimiser") > 0 == without.bytes_of("drafter's optimiser")
    needs = online_bytes(
        meta_policy(SHAPE, load_config(None, overrides), torch.bfloat16), load_config(None, overrides)
    )
    assert with_it.phase_bytes("learning") == max(without.phase_bytes("learning"), needs.training), (
        "one after the other"
    )


def test_no_cut_holds_more_than_the_one_that_is_watched(overrides):
    """Whatever the lengths: sequences are padded to the longest, and so counted."""
    policy = Decoder(SHAPE).initialise(0)
    config = load_config(None, overrides)
    head = load_eagle(config.rollout.speculation.eagle_path, policy, torch.float32)
    drafter = online.make_online(policy, head, config, print)
    known = [*policy.parameters(), policy.rope_table, *head.parameters(), *head.buffers(), head.rope_table]

    def peak(lengths: list[int]) -> int:
        largest = 0
        for part in online.cut_padded(
            [one_response_sequence(length) for length in lengths], drafter.token_budget
        ):
            batch = pack(part, policy.device)
            with (
                torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
                MemoryTracker(known) as memory,
            ):
                drafter.trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
            drafter.trainer.discard()
            largest = max(largest, memory.peak)
        return largest

    assert peak([48] + [9] * 12) <= peak([48] * 3) >= peak([20] * 7)
