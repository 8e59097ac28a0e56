"""LoRA (arXiv 2106.09685): small adapters on the decoder's projections are trained instead of its weights.

    merged = base + alpha / rank * B A        A [rank, in] and B [out, rank] of each Hugging Face projection

      qkv weight (fused)     adapters
      ┌──────────┐
      │ q_proj   │           B_q A_q
      │ k_proj   │           none, if k_proj is no target
      │ v_proj   │           B_v A_v
      └──────────┘

**One policy, not two.** A projection's own weight always holds the merged rows: that is the storage the
engine reads. The learner multiplies with the same weight, and the adapters' gradients follow from the chain
rule without a gradient of the weight's size (y = x Wᵀ, s = alpha / rank):

    dB = s dyᵀ (x Aᵀ)        dA = s (dy B)ᵀ x        dx = dy W

So learner and engine never disagree by the rounding of a bf16 merge, and the forward pass costs what it costs
without adapters. As with bf16 weights under float32 masters, a step too small to move a rounded weight still
moves its adapter.

**No drift.** `merge` starts from a kept copy of the base every time, adds in float32 and rounds once; nothing
is ever subtracted again. The copy costs the size of the adapted projections (13.9 GB for all seven of an 8B
model in bf16), instead of masters, moments and gradients of the whole model. With `adapters_off` the copy
is the KL reference as well.

Adapters are float32 (float64 for a float64 policy), so they need no masters. Folders are PEFT's:
`adapter_config.json` and `adapter_model.safetensors` with the names of the unfused projections.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from paceline.config import ConfigError, LoraConfig
from paceline.policy.decoder import Decoder
from paceline.policy.files import errors_name, read_json
from paceline.policy.huggingface import Slice, layout
from paceline.policy.model_files import ADAPTER_FILES, replaced_files, save_tensors
from paceline.policy.products import PLAIN, Product

# What PEFT puts before the name of a projection.
PEFT_PREFIX = "base_model.model."
# PEFT's settings that this file does not support, with the value that turns each off.
UNSUPPORTED_OFF = {
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}
# PEFT's settings that are read, or that leave base + alpha / rank * B A as it is. A folder that uses any
# other (aLoRA's invocation tokens, DoRA, replicated layers, ...) is refused by its name rather than misread.
HARMLESS = {
    *("r", "lora_alpha", "target_modules", "peft_type", "task_type", "init_lora_weights"),
    *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version"),
    *("lora_dropout", "exclude_modules", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("eva_config", "runtime_config", "ensure_weight_tying"),
}
# Values of `init_lora_weights` that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and others do not.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


class Adapter(nn.Module):
    """The factors of one Hugging Face projection, which is rows `[start, stop)` of a fused one."""

    def __init__(self, name: str, piece: Slice, in_features: int, rank: int, like: torch.Tensor) -> None:
        super().__init__()
        self.name = name
        self.start = piece.start
        self.stop = piece.stop
        options = dict(dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self.A = nn.Parameter(torch.empty(rank, in_features, **options))
        self.B = nn.Parameter(torch.zeros(piece.stop - piece.start, rank, **options))

    def initialise(self, generator: torch.Generator) -> None:
        """Starts as PEFT does: A uniform in +-1/sqrt(in), B zero, so that the policy is the base."""
        if self.A.is_meta:
            return
        bound = self.A.shape[1] ** -0.5
        self.A.data.copy_(torch.empty(self.A.shape).uniform_(-bound, bound, generator=generator))


class AdaptedLinear(nn.Module):
    """A fused `nn.Linear` with adapters; it keeps the parameters' names, so export and engine find them."""

    def __init__(self, linear: nn.Linear, adapters: Sequence[Adapter], config: LoraConfig) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.adapters = nn.ModuleDict({adapter.name.rsplit(".", 1)[-1]: adapter for adapter in adapters})
        self.rank = config.rank
        self.alpha = config.alpha
        self.scale = config.alpha / config.rank
        self.in_fp8 = False
        self.product: Product | None = None
        # False: compute with the base.
        self.adapted = True
        self.register_buffer("base", linear.weight.detach().clone(), persistent=False)

    def forward(self, x_TI: torch.Tensor, product: Product | None = None) -> torch.Tensor:
        """Multiplies by the merged weight, or by the base while adapters are off.

        `product` wins over the projection's own.
        """
        chosen = product or self.product or PLAIN
        if not self.adapted:
            return chosen.forward(x_TI, self.base, self.bias)
        adapters = tuple(self.adapters.values())
        spans = tuple((adapter.start, adapter.stop) for adapter in adapters)
        factors = (factor for adapter in adapters for factor in (adapter.A, adapter.B))
        return _MergedLinear.apply(x_TI, self.weight, self.bias, chosen, self.scale, spans, *factors)

    @torch.no_grad()
    def merge(self) -> None:
        for adapter in self.adapters.values():
            base = self.base[adapter.start : adapter.stop].to(adapter.A.dtype)
            self.weight[adapter.start : adapter.stop].copy_(
                torch.addmm(base, adapter.B, adapter.A, alpha=self.scale)
            )


class _MergedLinear(torch.autograd.Function):
    """The merged product, with gradients for the input and the factors (the formulas above)."""

    @staticmethod
    def forward(
        ctx, x_TI, weight_OI, bias_O, product, scale: float, spans: tuple[tuple[int, int], ...], *factors
    ):
        ctx.save_for_backward(x_TI, weight_OI, *factors)
        ctx.scale, ctx.spans, ctx.product = scale, spans, product
        return product.forward(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, grad_TO):
        x_TI, weight_OI, *factors = ctx.saved_tensors
        gradients = []
        for (start, stop), a_RI, b_OR in zip(ctx.spans, factors[::2], factors[1::2], strict=True):
            part_TO = grad_TO[:, start:stop]
            a_gradient = (part_TO @ b_OR.to(x_TI.dtype)).t() @ x_TI
            b_gradient = part_TO.t() @ (x_TI @ a_RI.to(x_TI.dtype).t())
            gradients += [ctx.scale * a_gradient.to(a_RI.dtype), ctx.scale * b_gradient.to(b_OR.dtype)]
        x_gradient = ctx.product.backward(grad_TO, weight_OI) if ctx.needs_input_grad[0] else None
        return x_gradient, None, None, None, None, None, *gradients


def add_adapters(policy: Decoder, config: LoraConfig, seed: int) -> None:
    """Freezes the policy and gives it trainable adapters, fresh ones or those of `config.path`."""
    by_module: dict[str, list[tuple[str, Slice]]] = {}
    for name, piece in _projections(policy, config.targets):
        by_module.setdefault(piece.parameter.removesuffix(".weight"), []).append((name, piece))
    policy.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for path, pieces in by_module.items():
        linear = policy.get_submodule(path)
        adapters = [
            Adapter(name, piece, linear.in_features, config.rank, linear.weight) for name, piece in pieces
        ]
        for adapter in adapters:
            adapter.initialise(generator)
        parent, _, attribute = path.rpartition(".")
        setattr(policy.get_submodule(parent), attribute, AdaptedLinear(linear, adapters, config))
    if config.path:
        load_adapters(policy, Path(config.path))


def has_adapters(policy: Decoder) -> bool:
    return any(True for _ in _adapted(policy))


def merge_adapters(policy: Decoder) -> None:
    """Writes base plus adapters into the shared weights; a no-op without adapters."""
    for module in _adapted(policy):
        module.merge()


@contextmanager
def adapters_off(policy: Decoder) -> Iterator[None]:
    """Computes with the base weights within the context."""
    modules = list(_adapted(policy))
    for module in modules:
        module.adapted = False
    try:
        yield
    finally:
        for module in modules:
            module.adapted = True


def adapter_factors(policy: Decoder) -> dict[str, nn.Parameter]:
    return {
        f"{PEFT_PREFIX}{adapter.name}.lora_{kind}.weight": factor
        for adapter in _all_adapters(policy)
        for kind, factor in (("A", adapter.A), ("B", adapter.B))
    }


def save_adapters(
    policy: Decoder, folder: Path, base_model: str, tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Writes a folder that `PeftModel.from_pretrained` and vLLM's LoRA loader open.

    `tensors` are the factors under PEFT's names, where the policy does not hold them whole.
    """
    whole = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in (adapter_factors(policy) if tensors is None else tensors).items()
    }
    module = next(_adapted(policy))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": module.rank,
        "lora_alpha": int(module.alpha) if module.alpha.is_integer() else module.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({adapter.name.rsplit(".", 1)[-1] for adapter in _all_adapters(policy)}),
        "inference_mode": True,
        **UNSUPPORTED_OFF,
    }
    with replaced_files(folder, ADAPTER_FILES, last="adapter_config.json") as staging:
        (staging / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        save_tensors(whole, staging / "adapter_model.safetensors")


@torch.no_grad()
def load_adapters(policy: Decoder, folder: Path) -> None:
    """Fills the policy's adapters from a PEFT folder of the same rank, scale and projections, and merges."""
    for factor, tensor in read_adapters(policy, folder):
        factor.copy_(tensor)
    merge_adapters(policy)


def read_adapters(policy: Decoder, folder: Path) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Returns the policy's factors, each with its tensor from a PEFT folder, shapes checked."""
    if not (folder / "adapter_config.json").is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} is not a PEFT folder: it needs adapter_config.json and adapter_model.safetensors"
        )
    settings = read_json(folder / "adapter_config.json")
    with errors_name(folder / "adapter_config.json"):
        rank, alpha = float(settings["r"]), float(settings["lora_alpha"])
    _check_settings(settings, rank, alpha, policy, folder)
    with errors_name(folder / "adapter_model.safetensors"):
        tensors = load_file(folder / "adapter_model.safetensors")
    wanted = adapter_factors(policy)
    if tensors.keys() != wanted.keys():
        theirs = sorted({name.removesuffix(".weight").split(".")[-2] for name in tensors})
        different = sorted(tensors.keys() ^ wanted.keys())
        raise ConfigError(
            f"{folder} has adapters on {', '.join(theirs)}; policy.lora.targets must name the same "
            f"({len(different)} tensors differ, such as {different[0]})"
        )
    for name, factor in wanted.items():
        if tensors[name].shape != factor.shape:
            raise ConfigError(
                f"{folder}: {name} has shape {tuple(tensors[name].shape)}, "
                f"this policy needs {tuple(factor.shape)}"
            )
        if not tensors[name].is_floating_point() or tensors[name].element_size() < 2:
            raise ConfigError(
                f"{folder}: {name} is {tensors[name].dtype}; it must be a floating-point number"
            )
    return [(factor, tensors[name]) for name, factor in wanted.items()]


def _check_settings(
    settings: dict[str, Any], rank: float, alpha: float, policy: Decoder, folder: Path
) -> None:
    used = [
        key
        for key, value in settings.items()
        if key not in HARMLESS and value and value != UNSUPPORTED_OFF.get(key)
    ]
    kind, start = settings.get("peft_type", "LORA"), settings.get("init_lora_weights")
    used += [f"peft_type = {kind!r}"] if kind != "LORA" else []
    used += [f"init_lora_weights = {start!r}"] if start not in PLAIN_STARTS else []
    if used:
        raise ConfigError(
            f"{folder} uses {', '.join(used)}, which is not supported; "
            "merge it with PEFT and start from the merged folder"
        )
    module = next(_adapted(policy))
    for key, theirs, ours in (("rank", rank, module.rank), ("alpha", alpha, module.alpha)):
        if theirs != ours:
            raise ConfigError(
                f"policy.lora.{key} = {ours:g}: the adapters in {folder} have {theirs:g}; "
                f"set policy.lora.{key}={theirs:g}"
            )


def _projections(policy: Decoder, targets: Sequence[str]) -> list[tuple[str, Slice]]:
    """The Hugging Face module names of the targets and where they lie; experts have no adapters."""
    weights = {
        name.removesuffix(".weight"): piece
        for name, piece in layout(policy.config).items()
        if name.endswith("_proj.weight")
    }
    dense = {name: piece for name, piece in weights.items() if piece.expert is None}
    available = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in dense))
    missing = [target for target in targets if target not in available]
    if missing:
        raise ConfigError(
            f"policy.lora.targets: {', '.join(missing)} cannot have adapters in this policy; "
            f"it has {', '.join(available)}"
        )
    return [(name, piece) for name, piece in dense.items() if name.rsplit(".", 1)[-1] in targets]


def _adapted(policy: Decoder) -> Iterator[AdaptedLinear]:
    return (module for module in policy.modules() if isinstance(module, AdaptedLinear))


def _all_adapters(policy: Decoder) -> Iterator[Adapter]:
    return (module for module in policy.modules() if isinstance(module, Adapter))
