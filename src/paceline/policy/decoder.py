"""The decoder: one definition of the layers for learning and for generation.

Tokens run packed, `[T]` with their positions, without a batch dimension. What differs between learning
(attend within each packed sequence) and generation (attend to a cache) is one callable, `attend(layer, q_THD,
k_THD, v_THD)`, given to `forward`. Projections that share their input are one fused parameter;
`huggingface.py` splits them for export. On the meta device everything takes the GPU's path: that is how
memory is planned (`plan/`).

A family that computes something else here (`config.py` says how to add one) gets a field of `DecoderConfig`
and a branch in the module concerned; `paged/forward.py` runs the same modules' parameters with kernels and
needs the same branch. Parameters keep their names and their fused layout: LoRA, FP8 weights and export find
them by name.

Shape letters: T tokens, H heads, D head dimension, E hidden size, V vocabulary; X experts, K experts per
token, S = T x K.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from paceline.kernels.norm_training import fork_norm
from paceline.kernels.rope_training import rotate_qk
from paceline.kernels.training_launch import takes_kernels
from paceline.policy.config import DecoderConfig
from paceline.policy.feed_forward import ExpertFeedForward, FeedForward
from paceline.policy.fused import (
    RECOMPUTE_LABEL,
    Recompute,
    fused_norm,
    fused_rotation,
    made_again,
)
from paceline.policy.products import Projection
from paceline.policy.replay import RouterReplay
from paceline.policy.rope import rope_table, rotate
from paceline.policy.wide_linear import wide_linear

# Takes the layer, q_THD, k_THD and v_THD, normed and rotated; returns the attended heads `[T, H, D]`.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
T = TypeVar("T")
# Standard deviation of fresh weights; those that write to the residual stream are scaled down with depth.
INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in float32 (float64 for a float64 model)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if takes_kernels(x) and x.ndim == 2:
            return fused_norm(x, None, self.weight, self.eps)[0]
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with one fused QKV projection and optional QK-norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.qkv = Projection(
            config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.qkv_bias
        )
        self.output = Projection(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_TE: torch.Tensor,
        rope_T2R: torch.Tensor,
        layer: int,
        attend: Attend,
        recompute: bool = False,
    ) -> torch.Tensor:
        """Returns the projected result of `attend`; `rope_T2R` is cos and sin of the tokens' positions."""
        qkv = self.qkv(x_TE)
        if takes_kernels(qkv):
            return self.output(self._fused(qkv, rope_T2R, layer, attend, recompute).flatten(1))
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out_THD = attend(layer, rotate(q, rope_T2R), rotate(k, rope_T2R), v)
        return self.output(out_THD.flatten(1))

    def _fused(
        self, qkv_TN: torch.Tensor, rope_T2R: torch.Tensor, layer: int, attend: Attend, recompute: bool
    ) -> torch.Tensor:
        norms = (None, None) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
        epsilon = 0.0 if self.q_norm is None else self.q_norm.eps
        settings = (rope_T2R, self.heads, self.kv_heads, *norms, epsilon)
        q, k, v = fused_rotation(qkv_TN, *settings)
        kept_TN = qkv_TN.detach()
        with made_again((q, k), lambda: rotate_qk(kept_TN, *settings), recompute):
            return attend(layer, q, k, v)


class DecoderLayer(nn.Module):
    """Attention and feed-forward (with experts where the configuration says so), each after a norm."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = (
            ExpertFeedForward(config, config.expert_layers.index(index))
            if config.has_experts(index)
            else FeedForward(config)
        )

    def forward(
        self,
        x_TE: torch.Tensor,
        rope_T2R: torch.Tensor,
        layer: int,
        attend: Attend,
        replay: RouterReplay | None = None,
        recompute: bool = False,
    ) -> torch.Tensor:
        """Returns the residual stream after this layer.

        With `recompute` the backward pass recomputes what lies between products, where that has kernels.
        """
        replayed = (replay,) if isinstance(self.feed_forward, ExpertFeedForward) else ()
        if not takes_kernels(x_TE):
            x_TE = x_TE + self.attention(self.attention_norm(x_TE), rope_T2R, layer, attend)
            return x_TE + self.feed_forward(self.feed_forward_norm(x_TE), *replayed)
        normed_TE, x_TE = fused_norm(x_TE, None, self.attention_norm.weight, self.attention_norm.eps)
        with made_again((normed_TE,), _remaker(x_TE, self.attention_norm), recompute):
            attended_TE = self.attention(normed_TE, rope_T2R, layer, attend, recompute)
        norm = self.feed_forward_norm
        normed_TE, x_TE = fused_norm(attended_TE, x_TE, norm.weight, norm.eps)
        with made_again((normed_TE,), _remaker(x_TE, norm), recompute):
            return x_TE + self.feed_forward(normed_TE, *replayed, recompute=recompute)

    def run(self, compute: Callable[..., T], *inputs: Any) -> T:
        """Returns `compute(layer, *inputs)`, for another forward pass than the layer's own.

        Where parameters are sharded, this and `forward` are what they are gathered for.
        """
        return compute(self, *inputs)


def _remaker(total_TE: torch.Tensor, norm: RMSNorm) -> Callable[[], tuple[torch.Tensor]]:
    """Returns a function that recomputes norm(total); it keeps `total` alone."""
    kept_TE = total_TE.detach()
    return lambda: (fork_norm(kept_TE, None, norm.weight, norm.eps)[0],)


class Capture:
    """Collects the hidden states that enter some layers, for a drafter to learn from.

    They are detached, so nothing flows back. Layer i is counted as transformers counts `hidden_states[i]`.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        # In the order of the layers' indices.
        self.states_TE: list[torch.Tensor] = []

    def offer(self, layer: int, x_TE: torch.Tensor) -> None:
        """Called before every layer; keeps the states of the layers to collect."""
        if layer in self.layers:
            self.states_TE.append(x_TE.detach())

    def finish(self, hidden_TE: torch.Tensor) -> None:
        """Called with the hidden states after the last norm, when all layers have been offered."""


def not_finite(policy: nn.Module) -> list[str]:
    # The extremes need no copy of an embedding.
    extremes = {
        name: torch.stack(torch.aminmax(parameter.detach())) for name, parameter in policy.named_parameters()
    }
    return [name for name, ends in extremes.items() if not ends.isfinite().all()]


def allocate(module: nn.Module, dtype: torch.dtype, device: str | torch.device) -> None:
    """Allocates the parameters of a module that was made on the meta device, unfilled.

    `Module.to_empty` does so, too, and imports sympy on its way: half a second.
    """
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            part.register_parameter(name, nn.Parameter(memory, parameter.requires_grad))


class Decoder(nn.Module):
    """A decoder of any supported family.

    It is made with empty parameters: fill them from a folder (`huggingface.py`) or with `initialise`.
    """

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            # `nn.Embedding` fills its weight, which on the meta device imports torch._dynamo: seconds.
            self.embedding = nn.Embedding.from_pretrained(
                torch.empty(config.vocab_size, config.hidden_size), freeze=False
            )
            self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        allocate(self, dtype, device)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.rope_table = rope_table(config.rope, config.head_dim, config.max_positions).to(device)
        self.recompute = Recompute()

    def initialise(self, seed: int) -> "Decoder":
        generator = torch.Generator(self.device).manual_seed(seed)
        depth_scale = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()
            elif parameter.ndim == 1:
                parameter.data.fill_(1.0)
            else:
                residual = name.endswith(
                    ("attention.output.weight", "feed_forward.down.weight", "feed_forward.down")
                )
                std = INITIAL_STD * (depth_scale if residual else 1.0)
                parameter.data.normal_(0.0, std, generator=generator)
        return self

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        capture: Capture | None = None,
        replay: RouterReplay | None = None,
    ) -> torch.Tensor:
        """Returns hidden states after the last norm, `[T, E]`; `logits` turns them into scores."""
        if replay is not None:
            replay.check(len(self.config.expert_layers), self.config.num_experts_per_token)
        x_TE = self.embedding(tokens_T)
        rope_T2R = self.rope_table[positions_T]
        for index, layer in enumerate(self.layers):
            if capture is not None:
                capture.offer(index, x_TE)
            if index < self.recompute.layers and torch.is_grad_enabled():
                x_TE = checkpoint(
                    layer,
                    x_TE,
                    rope_T2R,
                    index,
                    attend,
                    replay,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), record_function(RECOMPUTE_LABEL)),
                )
            else:
                x_TE = layer(x_TE, rope_T2R, index, attend, replay, self.recompute.between)
        hidden_TE = self.norm(x_TE)
        if capture is not None:
            capture.finish(hidden_TE)
        return hidden_TE

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores (float64 for a float64 model), in the learner and in every engine."""
        return wide_linear(hidden_TE, self.head.weight)
