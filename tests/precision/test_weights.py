"""FP8 weights follow the learner's, by exact names, in storage that stays where it is; one that was not
written is loud.
"""

from dataclasses import replace

import pytest
import torch

from paceline.backend import WeightsNotFinite
from paceline.config import LoraConfig
from paceline.kernels.fp8_format import BlockMatrix
from paceline.kernels.fp8_quantise import quantise_blocks, quantise_blocks_reference
from paceline.kernels.fp8_quantise_many import MatrixTable, WeightUpdate
from paceline.kernels.triton_support import INTERPRETED
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import exported_tensors
from paceline.policy.lora import add_adapters, merge_adapters
from paceline.precision.weights import QuantisedWeights, quantised_parameters

DENSE = DecoderConfig("qwen3", 97, 48, 80, 4, 6, 2, 16, 256, qk_norm=True)
EXPERTS = DecoderConfig(
    "qwen3_moe",
    97,
    48,
    80,
    3,
    6,
    2,
    16,
    256,
    qk_norm=True,
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=40,
)


@pytest.fixture
def policy() -> Decoder:
    return Decoder(DENSE).initialise(0)


def test_quantised_weights_are_exactly_the_projections():
    names = [name for name, _ in quantised_parameters(Decoder(DENSE).initialise(0))]
    kinds = ("attention.qkv", "attention.output", "feed_forward.gate_up", "feed_forward.down")
    assert names == [f"layers.{i}.{kind}.weight" for i in range(4) for kind in kinds]
    names = [name for name, _ in quantised_parameters(Decoder(EXPERTS).initialise(0))]
    assert [n for n in names if n.startswith("layers.1.")] == [
        "layers.1.attention.qkv.weight",
        "layers.1.attention.output.weight",
        "layers.1.feed_forward.gate_up",
        "layers.1.feed_forward.down",
    ]
    assert not any(word in name for name in names for word in ("router", "norm", "embedding", "head"))


def test_base_precision_layers_keep_the_policys_type_at_both_ends(policy):
    assert {name.split(".")[1] for name, _ in quantised_parameters(policy, base_layers=1)} == {"1", "2"}
    weights = QuantisedWeights(policy, base_layers=1)
    assert weights.of(policy.layers[0].attention.qkv.weight) is None
    assert weights.of(policy.layers[1].attention.qkv.weight) is not None
    assert weights.of(policy.head.weight) is None


@pytest.mark.parametrize("layers, asked, most", [(4, 2, 1), (4, 100, 1), (3, 2, 1), (2, 1, 0), (1, 1, 0)])
def test_base_precision_layers_that_leave_none_in_fp8_are_refused(layers, asked, most):
    """Such a rollout would call itself FP8."""
    policy = Decoder(replace(DENSE, num_layers=layers), device="meta")
    with pytest.raises(
        ValueError,
        match=rf"rollout.base_precision_layers = {asked}: .* of {layers} layers.*the most is {most} ",
    ):
        quantised_parameters(policy, asked)
    assert quantised_parameters(policy, most)


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_sync_updates_weights_in_place(config):
    policy = Decoder(config).initialise(0)
    weights = QuantisedWeights(policy)
    addresses = [(matrix.values.data_ptr(), matrix.scales.data_ptr()) for matrix in weights.matrices]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    weights.sync()
    assert [(matrix.values.data_ptr(), matrix.scales.data_ptr()) for matrix in weights.matrices] == addresses
    assert weights.sync_seconds > 0
    for (name, parameter), matrix in zip(weights.sources, weights.matrices, strict=True):
        expected = BlockMatrix.poisoned(parameter.shape, torch.device("cpu"))
        quantise_blocks_reference(parameter.detach(), expected)
        assert torch.equal(matrix.values.view(torch.uint8), expected.values.view(torch.uint8)), name
        assert torch.equal(matrix.scales, expected.scales) and torch.equal(matrix.wide, expected.wide)


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
@pytest.mark.parametrize("kernel", [False, True])
def test_sync_copies_and_quantises_arrived_tensors(config, kernel, monkeypatch):
    """All that `copied_names` says, as copying it and then quantising would have done."""
    if kernel and not INTERPRETED:
        pytest.skip("kernels are compiled here, not interpreted")
    policy, newer = Decoder(config).initialise(0), Decoder(config).initialise(1)
    weights, expected = QuantisedWeights(policy), QuantisedWeights(newer)
    if kernel:
        monkeypatch.setattr(weights._quantiser, "quantise", weights._quantiser.quantise_triton)
    arrived = dict(exported_tensors(newer))
    weights.sync({name: arrived[name] for name in weights.copied_names})
    for i, (name, parameter) in enumerate(weights.sources):
        assert torch.equal(parameter, newer.get_parameter(name)), name
        assert torch.equal(weights.matrices[i].scales, expected.matrices[i].scales), name
        assert torch.equal(
            weights.matrices[i].values.view(torch.uint8), expected.matrices[i].values.view(torch.uint8)
        ), name
    assert weights.copied_names == {name for name in arrived if "_proj." in name}


def test_lora_weights_are_quantised_as_merged():
    policy = Decoder(DENSE).initialise(0)
    add_adapters(policy, LoraConfig(rank=4), 0)
    weights = QuantisedWeights(policy)
    before = weights.matrices[0].wide.clone()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith(".B"):
                parameter.add_(0.05)
    merge_adapters(policy)
    weights.sync()
    assert weights.of(policy.layers[0].attention.qkv.weight) is weights.matrices[0]
    assert not torch.equal(weights.matrices[0].wide, before)


def test_sync_names_a_projection_that_was_not_written(policy, monkeypatch):
    weights = QuantisedWeights(policy)

    def skip_one(updates) -> None:
        for index, update in enumerate(updates):
            if index != 5:
                quantise_blocks(update.weight, update.out)

    monkeypatch.setattr(weights._quantiser, "quantise", skip_one)
    with pytest.raises(RuntimeError, match=r"did not write 1 of 16 .*layers\.1\.attention\.output\.weight"):
        weights.sync()
    assert weights.matrices[5].scales.isnan().all()


def test_sync_names_a_projection_missing_from_the_kernels_tables(policy, monkeypatch):
    if not INTERPRETED:
        pytest.skip("kernels are compiled here, not interpreted")
    weights = QuantisedWeights(policy)
    monkeypatch.setattr(weights._quantiser, "quantise", weights._quantiser.quantise_triton)
    weights.sync()
    tables = weights._quantiser._tables
    one_layer = WeightUpdate(weights.sources[7][1], weights.matrices[7])
    tables[-1] = MatrixTable.of([one_layer])  # of four
    with pytest.raises(RuntimeError, match=r"write 3 of 16 .*layers\.0\.feed_forward\.down\.weight"):
        weights.sync()


def test_fresh_fp8_storage_is_poisoned_with_nan():
    matrix = BlockMatrix.poisoned(torch.Size((130, 200)), torch.device("cpu"))
    assert matrix.values.float().isnan().all() and matrix.scales.isnan().all() and matrix.wide.isnan().all()
    assert matrix.dequantise().isnan().all()


def test_sync_names_weights_that_are_not_finite(policy):
    with torch.no_grad():
        policy.layers[2].feed_forward.down.weight[3, 3] = torch.inf
    with pytest.raises(WeightsNotFinite, match=r"1 of 16 .*layers\.2\.feed_forward\.down\.weight"):
        QuantisedWeights(policy)
