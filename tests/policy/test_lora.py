"""LoRA against PEFT, with the same numbers and folders, and against itself: only adapters learn."""

import json

import pytest
import torch
import torch.nn.functional as F

from paceline.config import ConfigError, LoraConfig
from paceline.engine.engine import Engine, EngineSettings
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import exported_tensors, load_policy, save_policy
from paceline.policy.lora import (
    AdaptedLinear,
    adapters_off,
    add_adapters,
    has_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
)
from paceline.types import Request, SamplingParams
from tests.oracles import double_precision, small_model

ALL = list(LoraConfig().targets)
CASES = {
    "llama": ("llama", {}, ALL),
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        ALL,
    ),
    "qwen2-q-v": ("qwen2", {}, ["q_proj", "v_proj"]),
    "qwen3-k-up-down": ("qwen3", {}, ["k_proj", "up_proj", "down_proj"]),
}


@pytest.fixture(autouse=True)
def oracle_in_double():
    with double_precision():
        yield


def randomise(policy: Decoder, seed: int = 0) -> Decoder:
    """Adapters that have learned something, merged."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if name.endswith(".B"):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    merge_adapters(policy)
    return policy


def small_decoder(dtype: torch.dtype = torch.float64, **lora) -> Decoder:
    policy = Decoder(DecoderConfig("qwen2", 97, 48, 80, 2, 6, 2, 16, 256, qkv_bias=True), dtype).initialise(0)
    add_adapters(policy, LoraConfig(**{"rank": 4, "alpha": 6, **lora}), seed=0)
    return policy


def logits(policy: Decoder, tokens_T: torch.Tensor) -> torch.Tensor:
    packed = PackedAttention([len(tokens_T)], torch.device("cpu"))
    return policy.logits(policy(tokens_T, packed.positions_T, packed))


@pytest.mark.parametrize("case", CASES)
def test_peft_folder_loads_with_the_same_logits_and_gradients(case, tmp_path):
    """Logits, and the gradients of every A and B, as PEFT computes them with base and adapter apart."""
    peft = pytest.importorskip("peft")
    family, changes, targets = CASES[case]
    base = small_model(family, **changes)
    base.save_pretrained(tmp_path / "base")
    oracle = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
    ).double()
    for name, parameter in oracle.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    oracle.save_pretrained(tmp_path / "adapter")

    policy = load_policy(tmp_path / "base", torch.float64)
    add_adapters(policy, LoraConfig(rank=4, alpha=6, targets=targets, path=str(tmp_path / "adapter")), seed=1)
    tokens = torch.randint(0, 97, (40,))
    ours, theirs = logits(policy, tokens), oracle(tokens[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)

    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    expected = {n.replace(".default", ""): p.grad for n, p in oracle.named_parameters() if p.requires_grad}
    adapters = [
        adapter
        for module in policy.modules()
        if isinstance(module, AdaptedLinear)
        for adapter in module.adapters.values()
    ]
    assert len(expected) == 2 * len(adapters) == sum(p.requires_grad for p in policy.parameters())
    for adapter in adapters:
        for kind, factor in (("A", adapter.A), ("B", adapter.B)):
            name = f"base_model.model.{adapter.name}.lora_{kind}.weight"
            torch.testing.assert_close(factor.grad, expected[name], rtol=1e-8, atol=1e-9, msg=name)

    with adapters_off(policy), oracle.disable_adapter():
        torch.testing.assert_close(logits(policy, tokens), oracle(tokens[None]).logits[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(logits(policy, tokens), ours, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_saved_adapters_open_in_peft(case, tmp_path):
    peft = pytest.importorskip("peft")
    family, changes, targets = CASES[case]
    base = small_model(family, **changes)
    base.save_pretrained(tmp_path / "base")
    policy = load_policy(tmp_path / "base", torch.float64)
    add_adapters(policy, LoraConfig(rank=3, alpha=7.5, targets=targets), seed=0)
    save_adapters(randomise(policy), tmp_path / "adapter", base_model=str(tmp_path / "base"))
    oracle = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").double().eval()
    tokens = torch.randint(0, 97, (40,))
    torch.testing.assert_close(logits(policy, tokens), oracle(tokens[None]).logits[0], rtol=0, atol=1e-9)
    # PEFT's own merge equals the folder we export
    save_policy(policy, tmp_path / "merged")
    theirs = dict(oracle.merge_and_unload().named_parameters())
    for name, tensor in exported_tensors(load_policy(tmp_path / "merged", torch.float64)):
        torch.testing.assert_close(tensor, theirs[name].data, rtol=0, atol=1e-12, msg=name)


def test_adapter_folder_round_trip_is_exact(tmp_path):
    policy = randomise(small_decoder())
    save_adapters(policy, tmp_path, base_model="base")
    again = small_decoder()
    load_adapters(again, tmp_path)
    for (name, a), (_, b) in zip(policy.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_fresh_adapters_change_nothing_and_depend_on_the_seed_alone():
    policy, plain = small_decoder(), Decoder(small_decoder().config, torch.float64).initialise(0)
    tokens = torch.arange(30)
    torch.testing.assert_close(logits(policy, tokens), logits(plain, tokens), rtol=0, atol=0)
    assert has_adapters(policy) and not has_adapters(plain)
    first = dict(policy.named_parameters())
    assert all(torch.equal(parameter, first[name]) for name, parameter in small_decoder().named_parameters())


def test_engine_samples_from_the_policy_that_learns():
    """Engine with merged weights against base and adapters computed apart, in float64.

    Storage and names stay where they were.
    """
    policy = small_decoder()
    storages = {name: tensor.data_ptr() for name, tensor in exported_tensors(policy)}
    engine = Engine(policy, EngineSettings(max_running=4, kv_tokens=2048))
    randomise(policy, seed=3)  # an update after the engine was made
    engine.update_weights(version=1)
    assert storages == {name: tensor.data_ptr() for name, tensor in exported_tensors(policy)}
    requests = [
        Request(f"{i}", (3 + i, 5, 7), 11 * i, SamplingParams(max_tokens=25, ignore_eos=True))
        for i in range(6)
    ]
    engine.submit(requests)

    def apart(self: AdaptedLinear, x_TI: torch.Tensor) -> torch.Tensor:
        parts = [
            x_TI @ self.base[a.start : a.stop].t() + self.scale * (x_TI @ a.A.t() @ a.B.t())
            for a in self.adapters.values()
        ]
        return torch.cat(parts, -1) + (0 if self.bias is None else self.bias)

    with pytest.MonkeyPatch.context() as patch:
        completions = list(engine.completions())
        patch.setattr(AdaptedLinear, "forward", apart)
        for completion in completions:
            tokens = torch.tensor(completion.request.prompt + completion.tokens)
            with torch.no_grad():
                scores = logits(policy, tokens).log_softmax(-1)
            expected = scores[2:-1].gather(1, tokens[3:, None]).squeeze(1)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-9
            )


def test_adapter_gradients_equal_autograd_through_the_merge():
    """bf16 aside, the factors' gradients are those of F.linear(x, base + scale B A)."""
    policy = randomise(small_decoder(targets=["k_proj", "v_proj"]))
    module = policy.layers[0].attention.qkv
    x = torch.randn(9, 48, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(9, module.weight.shape[0], dtype=torch.float64)
    (module(x) * weights).sum().backward()
    ours = [
        x.grad,
        *(factor.grad for adapter in module.adapters.values() for factor in (adapter.A, adapter.B)),
    ]
    leaves = [x.detach().requires_grad_()]
    merged = module.base.clone()
    for adapter in module.adapters.values():
        a, b = (factor.detach().requires_grad_() for factor in (adapter.A, adapter.B))
        leaves += [a, b]
        padded = F.pad(b @ a, (0, 0, adapter.start, merged.shape[0] - adapter.stop))
        merged = merged + 1.5 * padded
    (F.linear(leaves[0], merged, module.bias) * weights).sum().backward()
    for mine, leaf in zip(ours, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merge_leaves_no_drift_after_a_hundred_times(dtype):
    policy = small_decoder(dtype)
    before = {
        name: parameter.clone()
        for name, parameter in policy.named_parameters()
        if not parameter.requires_grad
    }
    for seed in range(100):
        randomise(policy, seed)
    changed = {
        name
        for name, tensor in before.items()
        if not torch.equal(tensor, dict(policy.named_parameters())[name])
    }
    assert changed and all(
        name.endswith(("qkv.weight", "output.weight", "gate_up.weight", "down.weight")) for name in changed
    )
    for name, parameter in policy.named_parameters():
        if name.endswith(".B"):
            parameter.data.zero_()
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32, "adapters need no masters"
    merge_adapters(policy)
    after = dict(policy.named_parameters())
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_adapter_folders_that_do_not_fit_are_refused_by_name(tmp_path):
    save_adapters(small_decoder(), tmp_path, base_model="base")
    with pytest.raises(ConfigError, match=r"policy.lora.rank = 8: .* have 4; set policy.lora.rank=4"):
        small_decoder(rank=8, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"policy.lora.alpha = 16: .* have 6; set policy.lora.alpha=6"):
        small_decoder(alpha=16, path=str(tmp_path))
    with pytest.raises(ConfigError, match="policy.lora.targets must name the same"):
        small_decoder(targets=["q_proj"], path=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="adapter_config.json"):
        small_decoder(path=str(tmp_path / "nowhere"))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(ConfigError, match="use_dora, which is not supported"):
        small_decoder(path=str(tmp_path))


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"use_rslora": True}, "use_rslora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora'"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"a_setting_of_tomorrow": 3}, "a_setting_of_tomorrow"),
    ],
)
def test_peft_setting_that_changes_the_adapter_is_refused(changes, name, tmp_path):
    """aLoRA, say, is active only after its invocation tokens: as plain LoRA it is another model."""
    save_adapters(small_decoder(), tmp_path, base_model="base")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ConfigError, match=f"uses {name}, which is not supported"):
        small_decoder(path=str(tmp_path))


def test_peft_settings_of_plain_lora_are_all_known(tmp_path):
    peft = pytest.importorskip("peft")
    base = small_model("qwen2", num_hidden_layers=2)
    for number, start in enumerate((True, "gaussian", "orthogonal")):
        settings = peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=ALL, lora_dropout=0.1, init_lora_weights=start
        )
        model = peft.get_peft_model(small_model("qwen2", num_hidden_layers=2), settings)
        model.save_pretrained(tmp_path / str(number))
        base.save_pretrained(tmp_path / "base")
        policy = load_policy(tmp_path / "base", torch.float64)
        add_adapters(policy, LoraConfig(rank=4, alpha=6, path=str(tmp_path / str(number))), seed=0)


def test_lora_targets_of_experts_are_refused(tmp_path):
    small_model("qwen3_moe").save_pretrained(tmp_path)
    policy = load_policy(tmp_path, torch.float64)
    with pytest.raises(
        ConfigError,
        match="gate_proj, up_proj, down_proj cannot have adapters .* it has q_proj, k_proj, v_proj, o_proj",
    ):
        add_adapters(policy, LoraConfig(rank=2), seed=0)
    add_adapters(policy, LoraConfig(rank=2, targets=["q_proj", "o_proj"]), seed=0)
    before = logits(policy, torch.arange(20))
    assert not torch.equal(before, logits(randomise(policy), torch.arange(20)))
