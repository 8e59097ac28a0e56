"""Views of a decoder's parameters that are kept: they are those of the parameters as they are now."""

import pytest
import torch
from torch import nn

from paceline.config import LoraConfig
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import ExportedWeights, copy_weights, exported_tensors
from paceline.policy.lora import add_adapters

DENSE = DecoderConfig("qwen3", 97, 48, 80, 2, 6, 2, 16, 256, qk_norm=True)
EXPERTS = DecoderConfig(
    "qwen3_moe", 97, 48, 80, 2, 6, 2, 16, 256, qk_norm=True,
    num_experts=4, num_experts_per_token=2, expert_intermediate_size=40,
)  # fmt: skip


def places(weights) -> dict:
    return {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in dict(weights).items()}


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_exported_weights_views_are_the_exported_tensors(config):
    policy = Decoder(config).initialise(0)
    exported = ExportedWeights(policy)
    assert places(exported.views()) == places(exported_tensors(policy))
    add_adapters(policy, LoraConfig(rank=4, targets=("q_proj", "o_proj")), 0)
    assert places(exported.views()) == places(exported_tensors(policy))
    assert exported.views() is exported.views(), "nothing changed, and views are rebuilt"


def test_exported_weights_notice_a_parameter_that_moved():
    policy = Decoder(DENSE).initialise(0)
    exported = ExportedWeights(policy)
    feed_forward, attention = policy.layers[1].feed_forward, policy.layers[0].attention

    def move():
        feed_forward.down.weight.data = feed_forward.down.weight.data.clone()

    def change_type():
        policy.norm.weight.data = policy.norm.weight.data.view(torch.int32).view(torch.float32).double()

    def replace_parameter():
        feed_forward.gate_up.weight = nn.Parameter(torch.zeros_like(feed_forward.gate_up.weight))

    def replace_module():
        attention.output = nn.Linear(*reversed(attention.output.weight.shape), bias=False)

    for change in (move, change_type, replace_parameter, replace_module):
        before = places(exported.views())
        change()
        assert places(exported.views()) == places(exported_tensors(policy)) != before, change.__name__


def test_copy_weights_fills_the_views_and_refuses_what_does_not_fit():
    source, target = Decoder(DENSE).initialise(1), Decoder(DENSE).initialise(2)
    views = ExportedWeights(target).views()
    weights = dict(exported_tensors(source))
    copy_weights(views, weights)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        copy_weights(views, weights | {"model.norm.weight": torch.zeros(3)})
    weights.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match="1 tensors are missing .*layers.1.mlp.up_proj"):
        copy_weights(views, weights)
