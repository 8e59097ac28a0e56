"""The decoder's layers over the paged cache, with the kernels: the same parameters that learning trains.

`policy/decoder.py` defines what is computed; this file computes it for generation. Each residual addition is
fused into the norm that follows it, so a layer is nine launches, thirteen with experts. Intermediate tensors
get no name that would keep them alive: captured graphs hold the memory of everything alive at once
(`engine/step_bytes.py` counts it).

Projections that have FP8 weights (`precision/weights.py`) multiply by those; the norm, attention or SwiGLU
before them then returns quantised rows instead of plain ones.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from paceline.kernels.attention_reference import attend_reference
from paceline.kernels.attention_shapes import Heads
from paceline.kernels.fp8_format import QuantisedRows
from paceline.kernels.fp8_linear import fp8_linear
from paceline.kernels.fp8_moe import fp8_run_experts
from paceline.kernels.fp8_quantise import quantise_rows
from paceline.kernels.linear import linear
from paceline.kernels.moe import run_experts
from paceline.kernels.moe_routing import route
from paceline.kernels.norm import rms_norm, rms_norm_quantised, rms_norm_residual, rms_norm_residual_quantised
from paceline.kernels.paged_attention import paged_attention, paged_attention_quantised
from paceline.kernels.prefill_attention import prefill_attention
from paceline.kernels.query_tiles import QueryTiles, decode_tiles, prefill_tiles
from paceline.kernels.rope_kv import TokenPlaces, rope_and_write_kv, rotate_and_store
from paceline.kernels.row_step import TreeKeys
from paceline.kernels.swiglu import silu_multiply, silu_multiply_quantised
from paceline.paged.cache import BLOCK_SIZE, KVCache
from paceline.policy.decoder import Attention, Decoder, DecoderLayer, ExpertFeedForward, FeedForward
from paceline.precision.weights import QuantisedWeights

# By layer: the hidden states that entered it, `[T, E]`.
Captured = dict[int, torch.Tensor]
# The input of a projection: plain rows, or rows quantised for an FP8 product.
Activations = torch.Tensor | QuantisedRows
# Positions and cache slots of tokens, `[T]` each; on a CPU what all layers derive from them.
Places = tuple[torch.Tensor, torch.Tensor] | TokenPlaces
# Takes q_THD and the layer; returns the heads side by side.
AttendCache = Callable[[torch.Tensor, int], Activations]


class PagedForward:
    """Runs a policy's layers over a paged cache: prompts by `prefill`, running rows by `decode`."""

    def __init__(
        self,
        policy: Decoder,
        cache: KVCache,
        deterministic: bool,
        captured_layers: Iterable[int] = (),
        quantised: QuantisedWeights | None = None,
    ) -> None:
        """`captured_layers`: the layers whose inputs are returned; `quantised`: FP8 weights to use."""
        self.policy = policy
        self.cache = cache
        self.captured_layers = frozenset(captured_layers)
        self.deterministic = deterministic
        self.quantised = quantised
        self.cos_PC, self.sin_PC = (policy.rope_table[:, i].contiguous() for i in (0, 1))
        self.max_position = policy.config.max_positions - 1
        shape = policy.config
        self._heads = Heads.of(shape.num_heads, shape.num_kv_heads, shape.head_dim, policy.dtype)

    def decode(
        self,
        tokens_RQ: torch.Tensor,
        positions_RQ: torch.Tensor,
        slots_RQ: torch.Tensor,
        table_RB: torch.Tensor,
        context_R: torch.Tensor,
        tree: TreeKeys | None = None,
    ) -> tuple[torch.Tensor, Captured]:
        """Runs Q queries per row, as a chain or, with `tree`, as its nodes.

        `context_R` is the first query's position, negative for a row that is not active. Returns the final
        hidden states and those that entered each captured layer, `[R x Q, E]`.
        """
        rows, queries = tokens_RQ.shape
        tokens_T, *places = (x.flatten() for x in (tokens_RQ, positions_RQ, slots_RQ))
        if not tokens_RQ.is_cuda:
            if tokens_T.shape[0] == 1 and tree is None:
                return self._decode_alone(tokens_T, *places, table_RB, context_R)
            tiles = decode_tiles(self._heads, BLOCK_SIZE, queries, table_RB, context_R, tree)
            return self._layers(tokens_T, *places, self._attend_tiles(tiles))

        def attend(q_THD: torch.Tensor, layer: int) -> Activations:
            cache = *self.cache.layer(layer), table_RB, context_R, *self.cache.scales(layer), tree
            q_RQHD = q_THD.unflatten(0, (rows, queries))
            if self._in_fp8(self.policy.layers[layer].attention.output):
                return paged_attention_quantised(q_RQHD, *cache)
            return paged_attention(q_RQHD, *cache).flatten(0, 1).flatten(1)

        return self._layers(tokens_T, *places, attend)

    def _decode_alone(
        self,
        tokens_1: torch.Tensor,
        positions_1: torch.Tensor,
        slots_1: torch.Tensor,
        table_1B: torch.Tensor,
        context_1: torch.Tensor,
    ) -> tuple[torch.Tensor, Captured]:
        """Decodes one token on a CPU: as two equal rows, because every product would pad a single one."""
        tokens, positions, slots, context = (x.repeat(2) for x in (tokens_1, positions_1, slots_1, context_1))
        tiles = decode_tiles(self._heads, BLOCK_SIZE, 1, table_1B.expand(2, -1), context)
        hidden_TE, captured = self._layers(tokens, positions, slots, self._attend_tiles(tiles))
        return hidden_TE[:1], {layer: states_TE[:1] for layer, states_TE in captured.items()}

    def prefill(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        table_SB: torch.Tensor,
        boundaries_S1: torch.Tensor,
        context_S: torch.Tensor,
    ) -> Captured:
        """Fills the cache for packed chunks of several sequences and returns the captured hidden states."""
        if not tokens_T.is_cuda:
            tiles = prefill_tiles(self._heads, BLOCK_SIZE, len(tokens_T), table_SB, boundaries_S1, context_S)
            return self._layers(tokens_T, positions_T, slots_T, self._attend_tiles(tiles), fill_only=True)[1]

        def attend(q_THD: torch.Tensor, layer: int) -> torch.Tensor:
            cache = *self.cache.layer(layer), table_SB, boundaries_S1, context_S, *self.cache.scales(layer)
            return prefill_attention(q_THD, *cache, deterministic=self.deterministic).flatten(1)

        return self._layers(tokens_T, positions_T, slots_T, attend, fill_only=True)[1]

    def _attend_tiles(self, tiles: QueryTiles) -> AttendCache:
        """Returns a CPU's attention over tiles that all layers share."""

        def attend(q_THD: torch.Tensor, layer: int) -> torch.Tensor:
            cache = *self.cache.layer(layer), *self.cache.scales(layer)
            return attend_reference(q_THD, tiles, *cache).flatten(1)

        return attend

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's scores, float32 (float64 for a float64 policy)."""
        wide = torch.float64 if hidden_TE.dtype == torch.float64 else torch.float32
        return linear(hidden_TE, self.policy.head.weight, out_dtype=wide, deterministic=self.deterministic)

    def _layers(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        attend: AttendCache,
        fill_only: bool = False,
    ) -> tuple[torch.Tensor, Captured]:
        """Returns the final hidden states and the captured ones.

        With `fill_only` it ends once the cache is filled: with the last layer's keys and values, or with its
        routing where that is recorded.
        """
        policy = self.policy
        last = len(policy.layers) - 1
        ends_early = fill_only and (self.cache.routing is None or not policy.config.has_experts(last))
        captured: Captured = {}
        places: Places = positions_T, slots_T
        if not tokens_T.is_cuda:
            places = TokenPlaces.of(positions_T, slots_T, self.cos_PC, self.sin_PC)
        # The chosen experts, of layers with experts.
        chosen_LTK: list[torch.Tensor] = []
        residual_TE = F.embedding(tokens_T, policy.embedding.weight)
        normed_TE = self._norm(
            residual_TE, policy.layers[0].attention_norm.weight, policy.layers[0].attention.qkv
        )
        following = [(layer.attention_norm, layer.attention.qkv) for layer in policy.layers[1:]] + [
            (policy.norm, None)
        ]
        for index, (layer, (following_norm, following_linear)) in enumerate(
            zip(policy.layers, following, strict=True)
        ):
            if index in self.captured_layers:
                captured[index] = residual_TE
            if ends_early and index == last:
                self._rotated(normed_TE, layer.attention, index, places)
                break
            normed_TE, residual_TE = self._norm_residual(
                self._attention(normed_TE, layer.attention, index, places, attend),
                residual_TE,
                layer.feed_forward_norm.weight,
                _dense_input(layer),
            )
            normed_TE, residual_TE = self._norm_residual(
                self._feed_forward(normed_TE, layer.feed_forward, chosen_LTK),
                residual_TE,
                following_norm.weight,
                following_linear,
            )
        if self.cache.routing is not None:
            self.cache.routing.write(slots_T, chosen_LTK)
        return normed_TE, captured

    def _attention(
        self,
        x_TE: Activations,
        module: Attention,
        layer: int,
        places: Places,
        attend: AttendCache,
    ) -> torch.Tensor:
        attended = attend(self._rotated(x_TE, module, layer, places), layer)
        return self._linear(attended, module.output, in_parts=True)

    def _rotated(
        self,
        x_TE: Activations,
        module: Attention,
        layer: int,
        places: Places,
    ) -> torch.Tensor:
        """Returns the rotated queries; keys and values go to the cache."""
        norms = (module.q_norm.weight, module.k_norm.weight) if module.q_norm is not None else (None, None)
        qkv = self._linear(x_TE, module.qkv, in_parts=True)
        cache = self.cache.layer(layer)
        settings = module.heads, *norms, self.policy.config.norm_eps, *self.cache.scales(layer)
        if isinstance(places, TokenPlaces):
            return rotate_and_store(qkv, places, *cache, *settings, dtype=self.policy.dtype)
        tables = self.cos_PC, self.sin_PC
        return rope_and_write_kv(qkv, *places, *tables, *cache, *settings, dtype=self.policy.dtype)

    def _feed_forward(
        self, x_TE: Activations, module: FeedForward | ExpertFeedForward, chosen_LTK: list[torch.Tensor]
    ) -> torch.Tensor:
        if isinstance(module, ExpertFeedForward):
            weights_TK, experts_TK = route(
                x_TE, module.router.weight, module.experts_per_token, module.normalise
            )
            if self.cache.routing is not None:
                chosen_LTK.append(experts_TK)
            if self.quantised is not None and (gate_up := self.quantised.of(module.gate_up)) is not None:
                return fp8_run_experts(x_TE, weights_TK, experts_TK, gate_up, self.quantised.of(module.down))
            return run_experts(x_TE, weights_TK, experts_TK, module.gate_up, module.down)
        activate = silu_multiply_quantised if self._in_fp8(module.down) else silu_multiply
        return self._linear(activate(self._linear(x_TE, module.gate_up)), module.down, in_parts=True)

    # `following` is the projection that the rows are for; it decides whether they are quantised.

    def _norm(
        self, x_TE: torch.Tensor, weight_E: torch.Tensor, following: torch.nn.Linear | None
    ) -> Activations:
        run = rms_norm_quantised if self._in_fp8(following) else rms_norm
        return run(x_TE, weight_E, self.policy.config.norm_eps)

    def _norm_residual(
        self,
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        weight_E: torch.Tensor,
        following: torch.nn.Linear | None,
    ) -> tuple[Activations, torch.Tensor]:
        run = rms_norm_residual_quantised if self._in_fp8(following) else rms_norm_residual
        return run(x_TE, residual_TE, weight_E, self.policy.config.norm_eps)

    def _in_fp8(self, module: torch.nn.Linear | None) -> bool:
        return (
            module is not None and self.quantised is not None and self.quantised.of(module.weight) is not None
        )

    def _linear(self, x_TE: Activations, module: torch.nn.Linear, in_parts: bool = False) -> torch.Tensor:
        """Applies a projection; with `in_parts`, the caller can add up a product in parts."""
        if self._in_fp8(module):
            x = x_TE if isinstance(x_TE, QuantisedRows) else quantise_rows(x_TE)
            out = fp8_linear(
                x,
                self.quantised.of(module.weight),
                self.deterministic,
                keep_parts=in_parts and module.bias is None,
            )
        else:
            out = linear(x_TE, module.weight, deterministic=self.deterministic)
        return out if module.bias is None else out + module.bias


def _dense_input(layer: DecoderLayer) -> torch.nn.Linear | None:
    """Returns the projection of a feed-forward's input; None for experts: a router needs it unquantised."""
    return None if isinstance(layer.feed_forward, ExpertFeedForward) else layer.feed_forward.gate_up
