"""A head's gradients written out, against those that torch finds along the plain definition."""

import pytest
import torch

from paceline.drafting import draft_attention
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.head_pass import HeadPass
from paceline.drafting.training import teacher_states
from paceline.drafting.unroll import unroll
from paceline.learning.batch import pack
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from tests.drafting.test_draft_attention import PlainFlash
from tests.drafting.test_eagle_training import SEQUENCES, make_head, make_sequence
from tests.oracles import small_model


@pytest.fixture(scope="module", params=[2, 4])  # key heads, of four
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    shape = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=request.param)
    model = small_model("llama", **shape)
    model.save_pretrained(folder)
    return folder


def expected(policy: Decoder, head: EagleHead, batch, d_URE: torch.Tensor) -> list[torch.Tensor]:
    """Returns the states, and the gradients of all parameters that they have any of, by torch."""
    _, captured = teacher_states(policy, batch, head.config.captured_layers)
    states = list(unroll(head, captured, policy.embedding.weight, batch, len(d_URE)))
    torch.autograd.backward(states, list(d_URE.unbind()))
    return [torch.stack(states).detach(), *taken_gradients(head)]


def computed(policy: Decoder, head: EagleHead, batch, d_URE: torch.Tensor) -> list[torch.Tensor]:
    _, captured = teacher_states(policy, batch, head.config.captured_layers)
    run = HeadPass(head, captured, policy.embedding.weight, batch, len(d_URE))
    states_URE = run.states_URE.clone()
    run.backward(d_URE.clone())
    return [states_URE, *taken_gradients(head)]


def taken_gradients(head: EagleHead) -> list[torch.Tensor]:
    found = [p.grad for name, p in head.named_parameters() if name not in ("head.weight", "norm.weight")]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in found)
    for parameter in head.parameters():
        parameter.grad = None
    return found


def draw(head: EagleHead, batch, steps: int) -> torch.Tensor:
    """Returns random gradients of the states."""
    generator = torch.Generator().manual_seed(steps)
    rows = len(batch.predictors_R)
    d_URE = torch.randn(steps, rows, head.config.layer.hidden_size, generator=generator, dtype=torch.float64)
    return d_URE.to(batch.tokens_T.device)


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("flash", [False, True])
def test_head_pass_gradients_are_those_of_the_definition(folder, steps, flash, monkeypatch):
    policy = load_policy(folder, torch.float64)
    if flash:  # its bounds and places, with plain products in the kernel's place
        plain = PlainFlash()
        monkeypatch.setattr(draft_attention, "flash_forward", plain.forward)
        monkeypatch.setattr(draft_attention, "flash_backward", plain.backward)
        monkeypatch.setattr(draft_attention, "has_flash", lambda device, dtype: True)
    head, batch = make_head(policy, 31), pack(SEQUENCES, policy.device)
    d_URE = draw(head, batch, steps)
    theirs = expected(policy, head, batch, d_URE)
    for ours, wanted in zip(computed(policy, head, batch, d_URE), theirs, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def test_head_pass_gradients_add_up(folder):
    policy = load_policy(folder, torch.float64)
    head, batch = make_head(policy, 31), pack(SEQUENCES, policy.device)
    d_URE = draw(head, batch, 3)
    once = computed(policy, head, batch, d_URE)[1:]
    _, captured = teacher_states(policy, batch, head.config.captured_layers)
    for _ in range(2):
        HeadPass(head, captured, policy.embedding.weight, batch, 3).backward(d_URE.clone())
    for twice, gradient in zip(taken_gradients(head), once, strict=True):
        torch.testing.assert_close(twice, 2 * gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_pass_kernels_compute_the_same_gradients(folder, dtype):
    """On a GPU they are as far from those in double precision as torch's gradients in the same type."""
    sequences = [*SEQUENCES, make_sequence(40, 130), make_sequence(3, 200)]
    exact = load_policy(folder, torch.float64)
    wide = make_head(exact, 31)
    batch = pack(sequences, exact.device)
    d_URE = draw(wide, batch, 5)
    wanted = expected(exact, wide, batch, d_URE)
    policy = load_policy(folder, dtype, "cuda")
    head = EagleHead(wide.config, dtype, "cuda")
    head.load_state_dict(wide.state_dict())
    on_gpu, d_URE = pack(sequences, policy.device), d_URE.to("cuda", dtype)
    rounding = 0.01 if dtype == torch.bfloat16 else 1e-5
    found, torchs = (run(policy, head, on_gpu, d_URE) for run in (computed, expected))
    for ours, theirs, exactly in zip(found, torchs, wanted, strict=True):
        error, usual = ((x.double().cpu() - exactly).norm() / exactly.norm() for x in (ours, theirs))
        assert error < 1.3 * usual + rounding, (error, usual)
