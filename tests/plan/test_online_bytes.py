"""What the plan says of a drafter that learns, against tensors that exist."""

from dataclasses import replace

import pytest
import torch

from paceline.config import load_config
from paceline.drafting import head_learner, slices, training
from paceline.drafting.eagle_folder import load_eagle, save_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.examples import Example, passages
from paceline.drafting.head_learner import HeadLearner
from paceline.drafting.recorder import RecorderShape, StateRecorder
from paceline.drafting.replica_trainer import record_bytes
from paceline.drafting.training import teacher_states
from paceline.learning.batch import TrainingSequence, pack
from paceline.plan.learning import meta_policy, one_response_sequence
from paceline.plan.machine import Machine
from paceline.plan.memory_tracker import MemoryTracker
from paceline.plan.online import online_bytes
from paceline.plan.plan import make_plan
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from tests.plan.shapes import SMALL_SHAPES

SHAPE = SMALL_SHAPES["qwen3"]


@pytest.fixture
def overrides(tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "SLICE_TOKENS", {"cpu": 192, "meta": 192})
    monkeypatch.setattr(slices, "UPDATE_ROWS", {"cpu": 48, "meta": 48})
    monkeypatch.setattr(head_learner, "UNROLL", 3)
    monkeypatch.setattr(training, "STEPS_AT_ONCE", {"cpu": 1, "meta": 1})
    policy = Decoder(SHAPE).initialise(0)
    save_eagle(EagleHead(config_for(SHAPE, (0, 1))).initialise(policy, 0), tmp_path / "eagle")
    speculation = {
        "drafters": "[eagle]",
        "eagle_path": tmp_path / "eagle",
        "online.share": 0.02,
    }
    return [
        "rollout.max_tokens=40",
        "eval.max_tokens=40",
        "task.max_prompt_tokens=24",
        *(f"rollout.speculation.{key}={value}" for key, value in speculation.items()),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_online_pass_bytes_are_those_of_a_real_drafter(overrides, dtype):
    config = load_config(None, overrides)
    planned = online_bytes(meta_policy(SHAPE, config, dtype), config)
    policy = Decoder(SHAPE, dtype).initialise(0)
    head = load_eagle(config.rollout.speculation.eagle_path, policy, dtype)
    drafter = HeadLearner(policy, head, config.rollout.speculation.online, 0, print)
    optimiser, parameters = drafter.trainer.optimiser, list(drafter.head.parameters())
    weights = sum(parameter.nbytes for parameter in parameters)
    moments = sum(tensor.nbytes for tensor in optimiser.state().values())
    average = sum(mean.nbytes for mean in drafter.mean.values())
    # States of all of a step's responses, which are few: 16 x 8 of 64 tokens.
    states = 128 * 64 * 3 * SHAPE.hidden_size * dtype.itemsize
    assert planned.optimiser == weights + moments + average + states
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    batch = pack([ending(64, 16)] * 3, policy.device)
    known = [
        *policy.parameters(),
        policy.rope_table,
        *parameters,
        *drafter.head.buffers(),
        drafter.head.rope_table,
        *(p.grad for p in parameters),
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), MemoryTracker(known) as memory:
        drafter.trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
    assert planned.training == pytest.approx(weights + memory.peak, rel=0.05)


def test_replica_plans_its_recorded_states_and_gradients_twice(overrides):
    """A slice that work interrupts is dropped without those from before it."""
    policy = meta_policy(SHAPE, load_config(None, overrides), torch.float32)
    alone, replica = (
        online_bytes(policy, load_config(None, [*overrides, *more])) for more in ([], ["cluster.replicas=2"])
    )
    config = load_config(None, [*overrides, "cluster.replicas=2"])
    recorded = RecorderShape.within(record_bytes(config), (0, 1), 64, SHAPE.hidden_size, torch.float32)
    recorder = StateRecorder(recorded, 4, torch.device("cpu"))
    assert recorder.record_CNLE.nbytes == recorded.bytes > 0
    states = 128 * 64 * 3 * SHAPE.hidden_size * 4
    assert replica.optimiser - recorded.bytes == alone.optimiser - states
    head = EagleHead(config_for(SHAPE, (0, 1)))
    assert replica.training - alone.training == sum(p.nbytes for p in head.parameters())


def ending(tokens: int, rows: int) -> TrainingSequence:
    """A text that is learned from at its end."""
    whole = one_response_sequence(tokens)
    mask, logprobs = whole.loss_mask[-rows:], whole.rollout_logprobs[-rows:]
    return replace(whole, prompt_length=tokens - rows, loss_mask=mask, rollout_logprobs=logprobs)


def test_plan_names_the_parts_of_online_learning(overrides):
    machine = Machine("test", 10**10, taken_bytes=0)
    with_it, without = (
        make_plan(load_config(None, keys), SHAPE, torch.bfloat16, machine)
        for keys in (overrides, [*overrides[:-1], "rollout.speculation.online.share=0"])
    )
    assert with_it.bytes_of("drafter's optimiser") > 0 == without.bytes_of("drafter's optimiser")
    needs = online_bytes(
        meta_policy(SHAPE, load_config(None, overrides), torch.bfloat16), load_config(None, overrides)
    )
    assert with_it.phase_bytes("learning") == max(without.phase_bytes("learning"), needs.training), (
        "one after the other"
    )


@pytest.mark.slow
def test_online_slices_hold_no_more_than_the_tracked_one(overrides):
    """Whatever the lengths: texts are padded to the longest, and so counted."""
    policy = Decoder(SHAPE).initialise(0)
    config = load_config(None, overrides)
    head = load_eagle(config.rollout.speculation.eagle_path, policy, torch.float32)
    drafter = HeadLearner(policy, head, config.rollout.speculation.online, 0, print)
    own = drafter.head
    known = [*policy.parameters(), policy.rope_table, *own.parameters(), *own.buffers(), own.rope_table]

    def peak(lengths: list[int]) -> int:
        largest = 0
        texts = [Example(one_response_sequence(length), TextStates(torch.empty(0), ())) for length in lengths]
        slicing = drafter.slicing
        cut = slicing.cut([p for text in texts for p in passages(text, slicing.passage_rows)])
        for part in cut:
            batch = pack([passage.sequence for passage in part], policy.device)
            with (
                torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
                MemoryTracker(known) as memory,
            ):
                drafter.trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
            drafter.trainer.discard()
            largest = max(largest, memory.peak)
        return largest

    batch = pack([ending(64, 16)] * 3, policy.device)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), MemoryTracker(known) as memory:
        drafter.trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
    for lengths in ([64] * 4, [64] + [9] * 12, [20] * 7):
        assert peak(lengths) <= 1.05 * memory.peak, lengths
