"""The decoder's layers over the paged cache, with the kernels: the same parameters that learning trains.

`policy/decoder.py` defines what is computed; this file computes it for generation. Each residual addition is fused into the
norm that follows it, so a layer is nine launches, thirteen with experts.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from paceline.kernels.linear import linear
from paceline.kernels.moe import expert_feed_forward
from paceline.kernels.norm import rms_norm, rms_norm_residual
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.prefill_attention import prefill_attention
from paceline.kernels.rope_kv import rope_and_write_kv
from paceline.kernels.swiglu import silu_multiply
from paceline.paged.cache import KVCache
from paceline.policy.decoder import Decoder, ExpertFeedForward, FeedForward

Captured = dict[int, torch.Tensor]
AttendCache = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PagedForward:
    def __init__(self, policy: Decoder, cache: KVCache, deterministic: bool, captured_layers: Iterable[int] = ()) -> None:
        self.policy = policy
        self.cache = cache
        self.captured_layers = frozenset(captured_layers)
        self.deterministic = deterministic
        self.cos_PC, self.sin_PC = (policy.rope_table[:, i].contiguous() for i in (0, 1))
        self.max_position = policy.config.max_positions - 1

    def decode(
        self, tokens_RQ: torch.Tensor, positions_RQ: torch.Tensor, slots_RQ: torch.Tensor, table_RB: torch.Tensor, context_R: torch.Tensor
    ) -> tuple[torch.Tensor, Captured]:
        """Q queries per row; `context_R` is the first query's position, negative for a row that is not active.

        Returns the final hidden states and those that entered each captured layer, `[R x Q, E]`.
        """
        rows, queries = tokens_RQ.shape

        def attend(q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return paged_attention(q_THD.unflatten(0, (rows, queries)), k_cache, v_cache, table_RB, context_R).flatten(0, 1)

        return self._layers(tokens_RQ.flatten(), positions_RQ.flatten(), slots_RQ.flatten(), attend)

    def prefill(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        table_SB: torch.Tensor,
        boundaries_S1: torch.Tensor,
        context_S: torch.Tensor,
    ) -> Captured:
        """Fills the cache for packed chunks of several sequences; samples nothing."""

        def attend(q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return prefill_attention(q_THD, k_cache, v_cache, table_SB, boundaries_S1, context_S)

        return self._layers(tokens_T, positions_T, slots_T, attend, fill_only=True)[1]

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if hidden_TE.dtype == torch.float64 else torch.float32
        return linear(hidden_TE, self.policy.head.weight, out_dtype=wide, deterministic=self.deterministic)

    def _layers(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor, attend: AttendCache, fill_only: bool = False
    ) -> tuple[torch.Tensor, Captured]:
        """The final hidden states and the captured ones; `fill_only` is done once the last layer's keys and values are in the cache."""
        policy, eps = self.policy, self.policy.config.norm_eps
        captured: Captured = {}
        residual_TE = F.embedding(tokens_T, policy.embedding.weight)
        normed_TE = rms_norm(residual_TE, policy.layers[0].attention_norm.weight, eps)
        following_norms = [layer.attention_norm for layer in policy.layers[1:]] + [policy.norm]
        for index, (layer, following_norm) in enumerate(zip(policy.layers, following_norms, strict=True)):
            if index in self.captured_layers:
                captured[index] = residual_TE
            attention = layer.attention
            k_cache, v_cache = self.cache.layer(index)
            qkv = self._linear(normed_TE, attention.qkv)
            norms = (attention.q_norm.weight, attention.k_norm.weight) if attention.q_norm is not None else (None, None)
            q_THD = rope_and_write_kv(qkv, positions_T, slots_T, self.cos_PC, self.sin_PC, k_cache, v_cache, attention.heads, *norms, eps)
            if fill_only and index == len(policy.layers) - 1:
                break
            out_TE = self._linear(attend(q_THD, k_cache, v_cache).flatten(1), attention.output)
            normed_TE, residual_TE = rms_norm_residual(out_TE, residual_TE, layer.feed_forward_norm.weight, eps)
            out_TE = self._feed_forward(normed_TE, layer.feed_forward)
            normed_TE, residual_TE = rms_norm_residual(out_TE, residual_TE, following_norm.weight, eps)
        return normed_TE, captured

    def _feed_forward(self, x_TE: torch.Tensor, module: FeedForward | ExpertFeedForward) -> torch.Tensor:
        if isinstance(module, ExpertFeedForward):
            return expert_feed_forward(x_TE, module.router.weight, module.gate_up, module.down, module.experts_per_token, module.normalise)
        return self._linear(silu_multiply(self._linear(x_TE, module.gate_up)), module.down)

    def _linear(self, x_TE: torch.Tensor, module: torch.nn.Linear) -> torch.Tensor:
        out = linear(x_TE, module.weight, deterministic=self.deterministic)
        return out if module.bias is None else out + module.bias
