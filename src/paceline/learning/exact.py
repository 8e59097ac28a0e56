"""Exact numerics: a forward pass for learning that computes the rollout's bits, with gradients.

Every operation runs the kernel that the engine runs in its deterministic mode, whose rows do not depend on
what they are batched with: the same weights and tokens give the same logprobs, bit for bit, wherever the
rollout cut a sequence into prompt, steps and drafts. So on-policy means on-policy.

    embedding ─▶ norm ─▶ linear ─▶ QK-norm, RoPE, paged K and V ─▶ attention ─▶ linear ─▶ norm ─▶ ...

Gradients are those of the same formulas at these values: products and attention in the backward pass need not
be the rollout's, since nothing is sampled from them. Experts run twice: once for the value, once for the
gradient. Where the rollout's cache is in E4M3, so is this one, with the same scales.
"""

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from paceline.kernels.fp8_format import E4M3
from paceline.kernels.prefill_attention import prefill_attention
from paceline.kernels.rope_kv import rope_and_write_kv
from paceline.kernels.rope_training import rotate_qk, rotate_qk_backward
from paceline.kernels.training_launch import takes_kernels
from paceline.learning.batch import MicroBatch
from paceline.learning.head import head_logprobs
from paceline.paged.cache import BLOCK_SIZE, blocks_for
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Attention, Decoder, DecoderLayer
from paceline.policy.feed_forward import ExpertFeedForward, FeedForward
from paceline.policy.fused import fused_norm, fused_silu_multiply
from paceline.policy.products import Fp8Product, PlainProduct, Product
from paceline.policy.replay import RouterReplay

EXACT = PlainProduct(deterministic=True)
EXACT_FP8 = Fp8Product(deterministic=True, learns=False)
EXACT_FP8_LEARNING = Fp8Product(deterministic=True)


@dataclass(frozen=True)
class _Paging:
    """Where the tokens of packed sequences lie in blocks of their own."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    table_SB: torch.Tensor
    context_S: torch.Tensor
    num_blocks: int
    attention: PackedAttention  # its sequences, and what the gradient is taken of

    @staticmethod
    def of(attention: PackedAttention) -> "_Paging":
        device = attention.positions_T.device
        lengths = attention.lengths
        table = torch.zeros(len(lengths), blocks_for(max(lengths)), dtype=torch.int32)
        slots: list[torch.Tensor] = []
        first = 0
        for index, length in enumerate(lengths):
            count = blocks_for(length)
            table[index, :count] = torch.arange(first, first + count)
            slots.append(torch.arange(length) + first * BLOCK_SIZE)
            first += count
        return _Paging(
            attention.positions_T,
            torch.cat(slots).to(device),
            table.to(device),
            torch.zeros(len(lengths), dtype=torch.int32, device=device),
            first,
            attention,
        )


def exact_logprobs(policy: Decoder, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `logprobs_R` as the rollout computes them, and `entropies_R`, which have no gradient."""
    hidden_TE = exact_hidden(policy, batch)
    recompute = policy.recompute.logits or not takes_kernels(hidden_TE)
    return head_logprobs(hidden_TE, policy.head.weight, batch, recompute, exact=True)


def exact_hidden(policy: Decoder, batch: MicroBatch) -> torch.Tensor:
    paging = _Paging.of(batch.attention)
    rope_T2R = policy.rope_table[paging.positions_T]
    tables = tuple(policy.rope_table[:, i].contiguous() for i in (0, 1))
    residual_TE = policy.embedding(batch.tokens_T)
    pending_TE = None
    settings = (rope_T2R, tables, paging, batch.replay)
    for index, layer in enumerate(policy.layers):
        if batch.capture is not None and index in batch.capture.layers:
            entering_TE = residual_TE.detach()
            batch.capture.offer(index, entering_TE if pending_TE is None else entering_TE + pending_TE)
        inputs = (_layer, index, pending_TE, residual_TE, *settings)
        if index < policy.recompute.layers and torch.is_grad_enabled():
            pending_TE, residual_TE = checkpoint(layer.run, *inputs, use_reentrant=False)
        else:
            pending_TE, residual_TE = layer.run(*inputs)
    hidden_TE = _norm(pending_TE, residual_TE, policy.norm)[0]
    if batch.capture is not None:
        batch.capture.finish(hidden_TE)
    return hidden_TE


def _layer(
    layer: DecoderLayer,
    index: int,
    pending_TE: torch.Tensor | None,
    residual_TE: torch.Tensor,
    rope_T2R: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    paging: _Paging,
    replay: RouterReplay | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the feed-forward's result and the residual stream before it, which the next norm adds up."""
    normed_TE, residual_TE = _norm(pending_TE, residual_TE, layer.attention_norm)
    attended_TE = _attention(layer.attention, normed_TE, index, rope_T2R, tables, paging)
    normed_TE, residual_TE = _norm(attended_TE, residual_TE, layer.feed_forward_norm)
    return _feed_forward(layer.feed_forward, normed_TE, replay), residual_TE


def _norm(
    x_TE: torch.Tensor | None, residual_TE: torch.Tensor, norm: torch.nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    if x_TE is None:
        return fused_norm(residual_TE, None, norm.weight, norm.eps)
    return fused_norm(x_TE, residual_TE, norm.weight, norm.eps)


def _attention(
    module: Attention,
    x_TE: torch.Tensor,
    layer: int,
    rope_T2R: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    paging: _Paging,
) -> torch.Tensor:
    norms = (None, None) if module.q_norm is None else (module.q_norm.weight, module.k_norm.weight)
    epsilon = 1e-6 if module.q_norm is None else module.q_norm.eps
    qkv_TN = _linear(module.qkv, x_TE)
    heads = (module.heads, module.kv_heads)
    out_THD = _Attend.apply(qkv_TN, *norms, epsilon, heads, layer, rope_T2R, tables, paging)
    return _linear(module.output, out_THD.flatten(1))


def _feed_forward(
    module: FeedForward | ExpertFeedForward, x_TE: torch.Tensor, replay: RouterReplay | None
) -> torch.Tensor:
    if isinstance(module, FeedForward):
        return _linear(module.down, fused_silu_multiply(_linear(module.gate_up, x_TE)))
    return module.multiplied(x_TE, _product(module), replay)


def _linear(module: torch.nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
    return module(x_TI, _product(module))


def _product(module: torch.nn.Module) -> Product:
    """Returns the rollout's product; its backward pass is in FP8 where the recipe learns so."""
    if not module.in_fp8:
        return EXACT
    return EXACT_FP8 if module.product is None else EXACT_FP8_LEARNING


class _Attend(torch.autograd.Function):
    """QK-norm, RoPE and attention over blocks; the gradient is that of packed attention."""

    @staticmethod
    def forward(ctx, qkv_TN, q_norm_D, k_norm_D, epsilon, heads, layer, rope_T2R, tables, paging):
        ctx.save_for_backward(qkv_TN, q_norm_D, k_norm_D, rope_T2R)
        ctx.settings = (epsilon, heads, layer, paging)
        num_heads, num_kv_heads = heads
        head_dim = qkv_TN.shape[1] // (num_heads + 2 * num_kv_heads)
        # Zeros: what is hidden from a query must still be finite.
        scales = paging.attention.kv_scales(layer) or (None, None)
        dtype = qkv_TN.dtype if scales[0] is None else E4M3
        shape = (2, paging.num_blocks, BLOCK_SIZE, num_kv_heads, head_dim * dtype.itemsize)
        caches = torch.zeros(shape, dtype=torch.uint8, device=qkv_TN.device).view(dtype)
        q_THD = rope_and_write_kv(
            qkv_TN.contiguous(),
            paging.positions_T,
            paging.slots_T,
            *tables,
            *caches,
            num_heads,
            q_norm_D,
            k_norm_D,
            epsilon,
            *scales,
        )
        if paging.attention.observe is not None:
            settings = (*heads, q_norm_D, k_norm_D, epsilon)
            paging.attention.observe(layer, *_rotated(qkv_TN, rope_T2R, *settings))
        bounds = paging.attention.boundaries_B1
        return prefill_attention(q_THD, *caches, paging.table_SB, bounds, paging.context_S, *scales)

    @staticmethod
    def backward(ctx, d_out_THD):
        qkv_TN, q_norm_D, k_norm_D, rope_T2R = ctx.saved_tensors
        epsilon, (heads, kv_heads), layer, paging = ctx.settings
        qkv_THD = _rotated(qkv_TN, rope_T2R, heads, kv_heads, q_norm_D, k_norm_D, epsilon)
        leaves = [x.detach().requires_grad_() for x in qkv_THD]
        with torch.enable_grad():
            q, k, v = leaves
            out_THD = paging.attention.attend(q, *paging.attention.as_cached(layer, k, v))
        d_q, d_k, d_v = torch.autograd.grad(out_THD, leaves, d_out_THD)
        d_qkv_TN, d_q_norm_D, d_k_norm_D = rotate_qk_backward(
            *(d.contiguous() for d in (d_q, d_k, d_v)), qkv_TN, rope_T2R, q_norm_D, k_norm_D, epsilon
        )
        return d_qkv_TN, d_q_norm_D, d_k_norm_D, *(None,) * 6


def _rotated(
    qkv_TN: torch.Tensor,
    rope_T2R: torch.Tensor,
    heads: int,
    kv_heads: int,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v, normed and rotated, as learning computes them."""
    q_THD, k_THD = rotate_qk(qkv_TN, rope_T2R, heads, kv_heads, q_norm_D, k_norm_D, epsilon)
    return q_THD, k_THD, qkv_TN.unflatten(1, (heads + 2 * kv_heads, -1))[:, heads + kv_heads :]
