"""Folders with quantised weights: block FP8 is read as the numbers it stands for, the rest refused."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.cli.export import export_policy
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import exported_tensors, load_policy, save_policy
from tests.oracles import small_model

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
# 48 and 80 rows, 320 columns: blocks of 128 that are whole and blocks that are cut off.
SHAPE = DecoderConfig("qwen3", 97, 320, 200, 2, 6, 2, 16, 64, qk_norm=True)


def quantise(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loops over blocks: FP8 numbers and the float32 number that each block is multiplied by."""
    rows, columns = weight.shape
    scale = torch.zeros(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    numbers = torch.zeros_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = weight[part].abs().max() / 448
            numbers[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return numbers, scale


def dequantise(numbers: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """One row at a time."""
    blocks = torch.arange(numbers.shape[1]) // block[1]
    rows = [row.float() * scale[r // block[0], blocks].float() for r, row in enumerate(numbers)]
    return torch.stack(rows)


def make_fp8(
    folder: Path, source: Path, config: dict | None = FP8, block=(128, 128), kept=(), **changes
) -> Path:
    """A copy of a folder with its projections in FP8, but for modules whose name ends in one of `kept`."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight") and not name.endswith(tuple(f"{module}.weight" for module in kept)):
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensor.float(), block)
        else:
            tensors[name] = tensor
    folder.mkdir(parents=True)
    raw = json.loads((source / "config.json").read_text()) | {"quantization_config": config} | changes
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def plain(tmp_path) -> Path:
    save_policy(Decoder(SHAPE).initialise(0), tmp_path / "plain")
    return tmp_path / "plain"


def test_block_fp8_is_read_with_blocks_that_are_cut_off(plain, tmp_path):
    folder = make_fp8(tmp_path / "fp8", plain, kept=("k_proj", "up_proj"))
    stored = load_file(folder / "model.safetensors")
    for name, tensor in exported_tensors(load_policy(folder, torch.float32)):
        if stored[name].dtype == torch.float8_e4m3fn:
            expected = dequantise(stored[name], stored[f"{name}_scale_inv"], (128, 128))
            assert torch.equal(tensor, expected), name
        else:
            assert torch.equal(tensor, stored[name]), name
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.0.self_attn.k_proj.weight"].dtype == torch.float32


def test_block_fp8_is_read_as_transformers_dequantises(tmp_path):
    shape = dict(hidden_size=256, intermediate_size=384, num_attention_heads=8, head_dim=32)
    model = small_model("llama", **shape, num_key_value_heads=4).float()
    model.save_pretrained(tmp_path / "plain")
    folder = make_fp8(tmp_path / "fp8", tmp_path / "plain")
    method = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=method
    ).state_dict()
    for name, tensor in exported_tensors(load_policy(folder, torch.float32)):
        assert torch.equal(tensor, theirs[name]), name


def test_fp8_scales_are_read_in_other_types(plain, tmp_path):
    """bfloat16, exponents of two, and such exponents stored as bytes."""
    folder = make_fp8(tmp_path / "fp8", plain)
    stored = load_file(folder / "model.safetensors")
    scales = [name for name in stored if name.endswith("_scale_inv")]
    powers = {name: 2.0 ** stored[name].log2().round() for name in scales}
    encodings = {
        "float32": powers,
        "bfloat16": {name: power.bfloat16() for name, power in powers.items()},
        "exponents": {name: power.to(torch.float8_e8m0fnu) for name, power in powers.items()},
        "bytes": {name: (power.log2() + 127).to(torch.uint8) for name, power in powers.items()},
    }
    loaded = []
    for encoding in encodings.values():
        save_file({**stored, **encoding}, folder / "model.safetensors", {"format": "pt"})
        loaded.append(dict(exported_tensors(load_policy(folder, torch.float32))))
    for other in loaded[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in loaded[0].items())


def test_fp8_is_read_with_other_blocks_and_one_scale_for_a_tensor(plain, tmp_path):
    small = make_fp8(tmp_path / "small", plain, {**FP8, "weight_block_size": [32, 64]}, (32, 64))
    whole = make_fp8(tmp_path / "whole", plain, {**FP8, "weight_block_size": None}, (10**6, 10**6))
    unsaid = make_fp8(tmp_path / "unsaid", plain, {"quant_method": "fp8"})
    original = dict(exported_tensors(load_policy(plain, torch.float32)))
    for folder in (small, whole, unsaid):
        for name, tensor in exported_tensors(load_policy(folder, torch.float32)):
            # e4m3 has 3 bits of mantissa: half a step is 1/16 of the number, or of the smallest normal one
            near = original[name].abs() / 16 + original[name].abs().max() / 448 / 64
            assert ((tensor - original[name]).abs() <= near).all(), name
    wrong = make_fp8(tmp_path / "wrong", plain, {**FP8, "weight_block_size": [64, 64]})
    with pytest.raises(ValueError, match=r"scale_inv has shape \(1, 3\); blocks of 64 x 64 over .* need"):
        load_policy(wrong, torch.float32)
    for block in ([128], "128", [0, 128]):
        file = make_fp8(tmp_path / f"bad{block}", plain, {**FP8, "weight_block_size": block}) / "config.json"
        with pytest.raises(
            ValueError, match=rf"^{file.parent.parent}.*weight_block_size = .*must be two sizes"
        ):
            load_policy(file.parent, torch.float32)


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
def test_fp8_experts_are_read_single_and_fused(fused, tmp_path):
    """One tensor for each expert, as published, or a layer's in one: blocks then reach across gate and up."""
    config = DecoderConfig(
        "qwen3_moe", 97, 160, 96, 2, 4, 2, 16, 64, qk_norm=True, num_experts=3, num_experts_per_token=2,
        expert_intermediate_size=72, dense_layers=(1,),
    )  # fmt: skip
    save_policy(Decoder(config).initialise(0), tmp_path / "plain")
    folder = make_fp8(tmp_path / "fp8", tmp_path / "plain")
    stored = load_file(folder / "model.safetensors")
    expected = dict(exported_tensors(load_policy(folder, torch.float32)))
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    assert torch.equal(expected[name], dequantise(stored[name], stored[f"{name}_scale_inv"], (128, 128)))
    if not fused:
        return
    layer = "model.layers.0.mlp.experts"
    whole = load_file(tmp_path / "plain/model.safetensors")
    one = {key: tensor for key, tensor in stored.items() if layer not in key}
    for target, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        matrices = [torch.cat([whole[f"{layer}.{x}.{part}.weight"] for part in parts]) for x in range(3)]
        numbers, scales = zip(*(quantise(matrix, (128, 128)) for matrix in matrices), strict=True)
        one[f"{layer}.{target}"] = torch.stack(numbers)
        one[f"{layer}.{target}_scale_inv"] = torch.stack(scales)
    save_file(one, folder / "model.safetensors", {"format": "pt"})
    read = dict(exported_tensors(load_policy(folder, torch.float32)))
    gate_up = dequantise(
        one[f"{layer}.gate_up_proj"][2], one[f"{layer}.gate_up_proj_scale_inv"][2], (128, 128)
    )
    assert torch.equal(read[f"{layer}.2.gate_proj.weight"], gate_up[:72])
    assert torch.equal(read[f"{layer}.2.up_proj.weight"], gate_up[72:])


def test_incomplete_fp8_is_refused(plain, tmp_path):
    folder = make_fp8(tmp_path / "fp8", plain)
    file = folder / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    for change, reason in (
        ({f"{name}_scale_inv": None}, f"{name} is float8_e4m3fn, and its scales .* are missing"),
        ({name: stored[name].bfloat16()}, f"{name} is bfloat16 and has scales"),
        ({name: stored[name].view(torch.int8)}, f"{name} is int8"),
    ):
        changed = {key: value for key, value in (stored | change).items() if value is not None}
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=reason):
            load_policy(folder, torch.float32)
    save_file(stored, file, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": None}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"is float8_e4m3fn, and config.json has no quantization_config"):
        load_policy(folder, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e5m2])
def test_undeclared_quantised_weights_are_refused(dtype, plain):
    file = plain / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(stored | {name: stored[name].to(dtype)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{file}: {name} is {str(dtype).removeprefix('torch.')}"):
        load_policy(plain, torch.float32)


@pytest.mark.parametrize(
    "config, name",
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "'gptq'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "'compressed-tensors'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "fbgemm_fp8"}, "'fbgemm_fp8'"),
        ({"quant_method": "torchao"}, "'torchao'"),
        ({"bits": 4}, "None"),
        ("fp8", "must be an object"),
    ],
)
def test_quantisation_methods_other_than_fp8_are_refused_by_name(config, name, plain, tmp_path):
    raw = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (plain / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=rf"^{plain / 'config.json'}: quantization_config.*{name}"):
        load_policy(plain, torch.float32)


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_quantiser_config_files_are_refused_by_name(file, plain):
    (plain / file).write_text("{}")
    with pytest.raises(ValueError, match=f"{plain / file}: .* weights are not supported"):
        load_policy(plain, torch.float32)


@pytest.mark.parametrize(
    "named, written", [("float8_e4m3fn", "bfloat16"), (None, "bfloat16"), ("float16",) * 2]
)
def test_export_of_fp8_uses_the_type_that_the_config_names(named, written, plain, tmp_path):
    export_policy(make_fp8(tmp_path / "fp8", plain, dtype=named), tmp_path / "out", "")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == written


def test_export_of_fp8_is_a_plain_model(plain, tmp_path):
    folder = make_fp8(tmp_path / "fp8", plain, dtype="bfloat16")
    export_policy(folder, tmp_path / "out", "")
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["dtype"] == "bfloat16" and "quantization_config" not in raw
    expected = dict(exported_tensors(load_policy(folder, torch.bfloat16)))
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
