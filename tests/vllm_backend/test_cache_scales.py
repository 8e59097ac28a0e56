"""Scales of vLLM's FP8 cache: measured on what the policy writes, and set in the layers they are of."""

import runpy
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from paceline.cluster.pool import ReplicaPool
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.attention import PackedAttention
from paceline.policy.huggingface import load_policy
from paceline.types import Completion, FinishReason, Request, SamplingParams
from paceline.vllm_backend.cache_scales import SCALES, set_scales, wants_scales
from paceline.vllm_backend.client import BOOTSTRAP, VllmClient
from paceline.vllm_backend.measured_scales import RANGE, TEXT_TOKENS, TEXTS, MeasuredScales

EXTENSION = BOOTSTRAP.with_name("extension.py")


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


def largest(policy, texts: list[list[int]]) -> torch.Tensor:
    """The largest of every layer's queries, keys and values, text by text."""
    found = torch.zeros(policy.config.num_layers, 3)

    def observe(layer, *tensors):
        for i, tensor in enumerate(tensors):
            found[layer, i] = max(found[layer, i], tensor.abs().max())

    for text in texts:
        packed = PackedAttention([len(text)], policy.device)
        packed.observe = observe
        with torch.no_grad():
            policy(torch.tensor(text), packed.positions_T, packed)
    return found


def random_texts(policy, count: int, length: int) -> list[list[int]]:
    return torch.randint(policy.config.vocab_size, (count, length)).tolist()


def test_scales_are_those_of_the_newest_texts(policy):
    first, *texts = random_texts(policy, TEXTS + 3, 24)
    scales = MeasuredScales(policy, first)
    place = scales.scales_L3.data_ptr()
    torch.testing.assert_close(scales.measure(), largest(policy, [first]) / RANGE)
    for text in texts:
        scales.see(text)
    torch.testing.assert_close(scales.measure(), largest(policy, texts[-TEXTS:]) / RANGE)
    assert scales.measure().data_ptr() == place  # which another process may have mapped


def test_scales_of_a_long_text_are_measured_on_its_beginning(policy):
    room = policy.config.max_positions
    text = random_texts(policy, 1, min(room, TEXT_TOKENS + 40))[0]
    scales = MeasuredScales(policy, [1])
    scales.see(text)
    torch.testing.assert_close(scales.measure(), largest(policy, [text[:TEXT_TOKENS]]) / RANGE)


def test_scales_change_with_the_weights(policy):
    text = random_texts(policy, 1, 24)[0]
    scales = MeasuredScales(policy, text)
    before = scales.measure().clone()
    weight = policy.layers[0].attention.qkv.weight
    with torch.no_grad():
        weight.mul_(2)
        after = scales.measure().clone()
        weight.div_(2)
    assert (after[0, 2] / before[0, 2]).item() == pytest.approx(2)  # values are not normed


class Attention(torch.nn.Module):
    """An attention layer as vLLM has it."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.kv_cache_dtype = dtype
        for which in "qkv":
            self.register_buffer(f"_{which}_scale", torch.tensor(1.0))
            setattr(self, f"_{which}_scale_float", 1.0)
        self._k_scale_cpu = torch.tensor(1.0)


def model_of(*dtypes: str) -> torch.nn.Module:
    layers = [torch.nn.ModuleDict({"attn": Attention(dtype)}) for dtype in dtypes]
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})


def test_scales_reach_their_layers_in_place():
    model = model_of("fp8", "auto", "fp8_e4m3")
    places = [layer["attn"]._k_scale.data_ptr() for layer in model["layers"]]
    set_scales(model, torch.tensor([[0.5, 0.25, 0.125], [3.0, 3.0, 3.0], [1.5, 2.5, 3.5]]))
    found = [
        [float(getattr(layer["attn"], f"_{which}_scale")) for which in "qkv"] for layer in model["layers"]
    ]
    assert found == [[0.5, 0.25, 0.125], [1.0, 1.0, 1.0], [1.5, 2.5, 3.5]]
    assert model["layers"][2]["attn"]._v_scale_float == 3.5
    assert float(model["layers"][2]["attn"]._k_scale_cpu) == 2.5
    assert [layer["attn"]._k_scale.data_ptr() for layer in model["layers"]] == places


def test_scales_without_a_layer_are_an_error():
    with pytest.raises(RuntimeError, match="no attention layer with an FP8 cache"):
        set_scales(model_of("auto"), torch.ones(1, 3))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"quantization": "fp8"}, False),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"}, True),
        ({"kv_cache_dtype": "fp8_e5m2"}, False),
        ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, False),
    ],
)
def test_wants_scales_follows_the_cache_type(options, wanted):
    assert wants_scales(options) is wanted


def test_scales_are_set_after_weights_were_loaded(monkeypatch):
    events = []
    model = model_of("fp8")

    def load_weights(weights):
        events.extend(name for name, _ in weights)

    model.load_weights = load_weights

    @contextmanager
    def current(config):
        yield

    def finalize(model, config):
        model["layers"][0]["attn"]._k_scale.fill_(1.0)
        events.append("finalized")

    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: None, finalize_layerwise_reload=finalize
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(set_current_vllm_config=current))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr("paceline.vllm_backend.patches.apply_patches", lambda: None)
    # Not as a module that others would find: importing it patches vLLM.
    worker = runpy.run_path(str(EXTENSION))["WorkerExtension"]()
    worker.vllm_config = worker.model_config = None
    worker.get_model = lambda: model
    weights = [("a", torch.zeros(1)), (SCALES, torch.tensor([[0.5, 0.25, 0.75]])), ("b", torch.zeros(1))]
    worker.paceline_load_policy(weights)
    assert events == ["a", "b", "finalized"]
    assert float(model["layers"][0]["attn"]._k_scale) == 0.25


def test_client_measures_scales_on_every_text(monkeypatch):
    request = Request("a", (1, 2), 0, SamplingParams())
    completion = Completion(request, (3, 4), (0.0, 0.0), FinishReason.STOP, ())
    monkeypatch.setattr(ReplicaPool, "completions", lambda self: iter([completion]))
    client = VllmClient.__new__(VllmClient)
    seen = []
    client._see = seen.append
    assert list(client.completions()) == [completion] and seen == [(1, 2, 3, 4)]
