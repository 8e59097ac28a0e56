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

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from paceline.kernels.norm_training import fork_norm
from paceline.kernels.rope_training import rotate_qk
from paceline.kernels.swiglu_training import silu_multiply_forward
from paceline.kernels.training_launch import takes_kernels
from paceline.policy.config import DecoderConfig
from paceline.policy.fused import (
    RECOMPUTE_LABEL,
    Recompute,
    fused_norm,
    fused_rotation,
    fused_silu_multiply,
    made_again,
)
from paceline.policy.replay import RouterReplay
from paceline.policy.rope import rope_table, rotate

# Takes the layer, q_THD, k_THD and v_THD, normed and rotated; returns the attended heads `[T, H, D]`.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Standard deviation of fresh weights; those that write to the residual stream are scaled down with depth.
INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in float32 (float64 for a float64 model)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension."""
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
        self.qkv = nn.Linear(
            config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.qkv_bias
        )
        self.output = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)
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


class FeedForward(nn.Module):
    """SwiGLU with one fused gate and up projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TE: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        """Returns down(silu(gate) * up)."""
        return _swiglu(self.gate_up(x_TE), self.down, recompute)


def _swiglu(
    gate_up_T2F: torch.Tensor, down: Callable[[torch.Tensor], torch.Tensor], recompute: bool
) -> torch.Tensor:
    if takes_kernels(gate_up_T2F):
        inner_TF = fused_silu_multiply(gate_up_T2F)
        kept_T2F = gate_up_T2F.detach()
        with made_again((inner_TF,), lambda: (silu_multiply_forward(kept_T2F),), recompute):
            return down(inner_TF)
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return down(F.silu(gate) * up)


class ExpertFeedForward(nn.Module):
    """A mixture of experts: a router sends each token to K of X feed-forwards and adds up what they return.

        tokens            a     b     c            rows sorted by expert   [ b0 | a1 c0 | a0 b1 c1 ]
        chosen experts    3 1   0 3   1 3          experts                   0    1       3

    Each expert multiplies its run of rows. Scores stay in float32: rounded to bf16 they would tie, and a tie
    decides which expert runs. The chosen weights are rounded to the model's type, as transformers does.
    """

    def __init__(self, config: DecoderConfig, place: int) -> None:
        super().__init__()
        # The index among the layers with experts.
        self.place = place
        experts = config.num_experts
        size = config.hidden_size
        inner = config.expert_intermediate_size
        self.experts_per_token = config.num_experts_per_token
        self.normalise = config.normalise_expert_weights
        self.router = nn.Linear(size, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, size))
        self.down = nn.Parameter(torch.empty(experts, size, inner))

    def forward(
        self, x_TE: torch.Tensor, replay: RouterReplay | None = None, recompute: bool = False
    ) -> torch.Tensor:
        """Returns the weighted sum of the chosen experts' results."""
        weights_TK, experts_TK = self.route(x_TE, replay)
        sorted_S, order_S = experts_TK.flatten().sort(stable=True)
        every_expert_X = torch.arange(self.router.out_features, device=x_TE.device)
        ends_X = torch.searchsorted(sorted_S, every_expert_X, right=True, out_int32=True)
        gate_up_S2F = _multiply_runs(x_TE[order_S // self.experts_per_token], self.gate_up, ends_X)
        out_SE = _swiglu(gate_up_S2F, lambda inner_SF: _multiply_runs(inner_SF, self.down, ends_X), recompute)
        out_TKE = out_SE[order_S.argsort()].unflatten(0, weights_TK.shape)
        return torch.bmm(weights_TK.unsqueeze(1), out_TKE).squeeze(1)

    def route(
        self, x_TE: torch.Tensor, replay: RouterReplay | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights and numbers of each token's experts, `[T, K]`.

        With `replay` the experts are the recorded ones; their weights are this router's own scores either
        way, and gradients flow through them.
        """
        scores_TX = wide_linear(x_TE, self.router.weight)
        experts_TK = scores_TX.topk(self.experts_per_token).indices
        if replay is not None:
            experts_TK = replay.choose(self.place, experts_TK)
        weights_TK = scores_TX.softmax(-1).gather(-1, experts_TK)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK.to(x_TE.dtype), experts_TK


def _multiply_runs(rows_SK: torch.Tensor, weight_XNK: torch.Tensor, ends_X: torch.Tensor) -> torch.Tensor:
    """Rows up to `ends_X[0]` times expert 0's matrix, up to `ends_X[1]` times expert 1's, and so on."""
    if (rows_SK.is_cuda or rows_SK.is_meta) and rows_SK.dtype == torch.bfloat16:
        return F.grouped_mm(rows_SK, weight_XNK.transpose(1, 2), offs=ends_X)
    if rows_SK.is_meta:
        lengths = _even_runs(len(rows_SK), len(ends_X))
    else:
        lengths = ends_X.diff(prepend=ends_X.new_zeros(1)).tolist()
    runs = zip(rows_SK.split(lengths), weight_XNK.unbind(), strict=True)
    return torch.cat([F.linear(run, weight_NK) for run, weight_NK in runs])


def _even_runs(rows: int, experts: int) -> list[int]:
    """The lengths of runs where there is no data to say which expert gets how many rows."""
    return [rows // experts + (i < rows % experts) for i in range(experts)]


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

        With `recompute` the backward pass makes again what lies between products, where that has kernels.
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


def _remaker(total_TE: torch.Tensor, norm: RMSNorm) -> Callable[[], tuple[torch.Tensor]]:
    """Returns what computes norm(total) again; it holds on to `total` alone."""
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
        """Keeps the states if this layer is one of those to collect."""
        if layer in self.layers:
            self.states_TE.append(x_TE.detach())


def not_finite(policy: nn.Module) -> list[str]:
    """Returns the names of the parameters that hold infinities or NaN."""
    # The extremes need no copy of an embedding.
    extremes = {
        name: torch.stack(torch.aminmax(parameter.detach())) for name, parameter in policy.named_parameters()
    }
    return [name for name, ends in extremes.items() if not ends.isfinite().all()]


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
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(dtype).to_empty(device=device)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.rope_table = rope_table(config.rope, config.head_dim, config.max_positions).to(device)
        self.recompute = Recompute()

    def initialise(self, seed: int) -> "Decoder":
        """Fills all parameters with fresh ones and returns the decoder."""
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
        """The device of all parameters."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of all parameters."""
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
        return self.norm(x_TE)

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores (float64 for a float64 model), in the learner and in every engine."""
        return wide_linear(hidden_TE, self.head.weight)


def wide_linear(x_TE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
    """Returns x times weight transposed in float32 (float64 for a float64 model)."""
    if weight_VE.dtype in (torch.float32, torch.float64):
        return F.linear(x_TE, weight_VE)
    return _WideLinear.apply(x_TE, weight_VE)


class _WideLinear(torch.autograd.Function):
    """bf16 x bf16 -> float32 without rounding to bf16; on a GPU without a float32 copy of the weight."""

    @staticmethod
    def forward(ctx, x_TE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TE, weight_VE)
        if x_TE.is_cuda or x_TE.is_meta:
            return torch.mm(x_TE, weight_VE.t(), out_dtype=torch.float32)
        return x_TE.float() @ weight_VE.float().t()

    @staticmethod
    def backward(ctx, grad_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TE, weight_VE = ctx.saved_tensors
        grad_TV = grad_TV.to(x_TE.dtype)
        needs_x, needs_weight = ctx.needs_input_grad
        return grad_TV @ weight_VE if needs_x else None, grad_TV.t() @ x_TE if needs_weight else None
