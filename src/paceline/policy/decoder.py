"""The decoder: one definition of the layers for learning and for generation.

Tokens run packed, `[T]` with their positions, without a batch dimension. What differs between learning (attend within
each packed sequence) and generation (attend to a cache) is one callable, `attend(layer, q_THD, k_THD, v_THD)`, given
to `forward`. Projections that share their input are one fused parameter; `huggingface.py` splits them for export.

Shape letters: T tokens, H heads, D head dimension, E hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.policy.config import DecoderConfig
from paceline.policy.rope import rope_table, rotate

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.qkv_bias)
        self.output = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_TE: torch.Tensor, rope_T2R: torch.Tensor, layer: int, attend: Attend) -> torch.Tensor:
        qkv = self.qkv(x_TE).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out_THD = attend(layer, rotate(q, rope_T2R), rotate(k, rope_T2R), v)
        return self.output(out_THD.flatten(1))


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_TE: torch.Tensor, rope_T2R: torch.Tensor, layer: int, attend: Attend) -> torch.Tensor:
        x_TE = x_TE + self.attention(self.attention_norm(x_TE), rope_T2R, layer, attend)
        return x_TE + self.feed_forward(self.feed_forward_norm(x_TE))


class Decoder(nn.Module):
    """Made with empty parameters: fill them from a folder (`huggingface.py`) or with `initialise`."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(dtype).to_empty(device=device)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.rope_table = rope_table(config.rope, config.head_dim, config.max_positions).to(device)
        self.activation_checkpointing = False

    def initialise(self, seed: int) -> "Decoder":
        generator = torch.Generator(self.device).manual_seed(seed)
        depth_scale = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()
            elif parameter.ndim == 1:
                parameter.data.fill_(1.0)
            else:
                residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
                parameter.data.normal_(0.0, 0.02 * (depth_scale if residual else 1.0), generator=generator)
        return self

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def forward(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states after the last norm, `[T, E]`; `logits` turns them into scores."""
        x_TE = self.embedding(tokens_T)
        rope_T2R = self.rope_table[positions_T]
        for index, layer in enumerate(self.layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TE = checkpoint(layer, x_TE, rope_T2R, index, attend, use_reentrant=False)
            else:
                x_TE = layer(x_TE, rope_T2R, index, attend)
        return self.norm(x_TE)

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """float32 (float64 for a float64 model), in the learner and in every engine."""
        weight = self.head.weight
        if weight.dtype in (torch.float32, torch.float64):
            return F.linear(hidden_TE, weight)
        return _WideLinear.apply(hidden_TE, weight)


class _WideLinear(torch.autograd.Function):
    """bf16 x bf16 -> float32 without rounding the result to bf16, and without a float32 copy of the weight on a GPU."""

    @staticmethod
    def forward(ctx, x_TE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TE, weight_VE)
        if x_TE.is_cuda:
            return torch.mm(x_TE, weight_VE.t(), out_dtype=torch.float32)
        return x_TE.float() @ weight_VE.float().t()

    @staticmethod
    def backward(ctx, grad_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TE, weight_VE = ctx.saved_tensors
        grad_TV = grad_TV.to(x_TE.dtype)
        return grad_TV @ weight_VE, grad_TV.t() @ x_TE
