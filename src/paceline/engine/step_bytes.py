"""The GPU memory that one step, or one draft, holds at once, by formulas.

They follow `step.py`, `sampling.py`, `paged/forward.py` and the kernels that those launch:

    kept        queries, block tables, the hidden states that drafters asked for, the routing that is recorded
    layers      residual, normed rows, and the widest moment of attention or feed-forward; T tokens
    sampling    final hidden states of T tokens, logits of one piece, and the tensors of truncation or
                rejection over a few rows' logits
    following   the tensors of a drafter that follows the policy, over T hidden states

A step needs what is kept and the largest of the others. `tests/engine/test_step_bytes.py` counts the tensors
that the GPU's code makes. Shape letters: T tokens, E hidden size, V vocabulary; Q and KV are the widths of
all heads, F and I those of feed-forwards, K experts a token.
"""

from dataclasses import dataclass

import torch

from paceline.drafting.growth import TreeShape
from paceline.engine.sampling import SAMPLE_TOKENS
from paceline.kernels.fp8_format import GROUP, ROW_MULTIPLE
from paceline.kernels.fp8_linear import choose_parts
from paceline.kernels.paged_launch import partial_bytes
from paceline.kernels.prefill_flat import most_gathered_bytes
from paceline.kernels.sampler import CHUNK, WIDE_ROWS
from paceline.paged.cache import BLOCK_SIZE, blocks_for
from paceline.policy.config import DecoderConfig

# Bytes per logit of truncation, beside the logits: scores, sorted scores, ids and four of int64 make 53;
# while torch sorts, 32 of its own and 16 of ours. Rejection holds no more at once: p, q, the residual of p
# and noise.
WIDE_LOGIT_BYTES = 60
# Bytes per token that a step gathers (`kernels/row_step.py`), samples and logprobs.
QUERY_BYTES = 64
# The same per row for a draft's columns (`kernels/draft_step.py`).
DRAFT_QUERY_BYTES = 1024
# Bytes per row of a tree's candidates: a few numbers each, sorted, and the keys of the nodes run.
TREE_DRAFT_BYTES = 8192


@dataclass(frozen=True)
class StepBytes:
    """The bytes of steps and drafts of one engine."""

    config: DecoderConfig
    dtype: torch.dtype
    # Tokens that a row can hold.
    row_tokens: int
    # Multiprocessors of the GPU.
    processors: int
    fp8: bool = False
    captured_layers: int = 0
    records_routing: bool = False
    # The shapes of the drafters that have layers.
    drafters: tuple[DecoderConfig, ...] = ()
    # Whether any of them proposes in FP8.
    drafts_fp8: bool = False
    # Whether proposals may be trees.
    trees: bool = False

    def step(self, rows: int, num_queries: int) -> int:
        """Returns the bytes of a step: what is kept, and the largest of layers, sampling and following."""
        shape = self.config
        tokens = rows * num_queries
        hidden = shape.hidden_size * self.dtype.itemsize
        routing = len(shape.expert_layers) * shape.num_experts_per_token if self.records_routing else 0
        kept = tokens * (QUERY_BYTES + self.captured_layers * hidden + 4 * routing) + self._tables(rows)
        padded = -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        layers = padded * (layer_token_bytes(shape, self.dtype, self.fp8) + 6 * routing) + self._partials(
            shape, rows, num_queries
        )
        sampling = tokens * hidden + self._sampling(min(tokens, SAMPLE_TOKENS), tokens)
        if self.trees and num_queries > 1:
            # A node's depth and its ancestors' slots, and the way through the tree.
            kept += tokens * (8 * num_queries + 2 * QUERY_BYTES)
        return kept + max(layers, sampling, tokens * hidden + self._following(tokens))

    def draft(self, rows: int) -> int:
        """Returns the bytes of a draft by the drafter that needs most.

        A drafter computes logits for one token per row, all rows at once, and a head with a vocabulary of its
        own expands them to the policy's where they are truncated.
        """
        return max((self._draft(shape, rows) for shape in self.drafters), default=0)

    def _draft(self, shape: DecoderConfig, rows: int) -> int:
        hidden = shape.hidden_size * self.dtype.itemsize
        # A draft model's first pass takes two tokens a row; an eagle head's layer takes two hidden states a
        # token. Of a tree several nodes are run at once.
        nodes = TreeShape.WIDEST if self.trees else 1
        width = max(2, nodes)
        layers = width * rows * (
            layer_token_bytes(shape, self.dtype, self.drafts_fp8) + 2 * hidden
        ) + self._partials(shape, rows, width)
        sampling = nodes * (
            4 * rows * hidden + rows * self.config.vocab_size * self._score_bytes
        ) + self._sampling(nodes * rows, nodes * rows)
        queries = DRAFT_QUERY_BYTES + (TREE_DRAFT_BYTES if self.trees else 0)
        return rows * queries + self._tables(rows) + max(layers, sampling)

    def _tables(self, rows: int) -> int:
        return rows * blocks_for(self.row_tokens) * 4

    def _partials(self, shape: DecoderConfig, rows: int, num_queries: int) -> int:
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        return partial_bytes(
            rows, num_queries, *heads, blocks_for(self.row_tokens) * BLOCK_SIZE, self.processors, self.trees
        )

    def _sampling(self, piece: int, tokens: int) -> int:
        """Logits of a piece, the sampler's five numbers per chunk, a few rows in plain torch."""
        vocabulary = self.config.vocab_size
        # The 8 are those of the ranks.
        wide = (min(tokens, WIDE_ROWS) * WIDE_LOGIT_BYTES + 8) * vocabulary * self._score_bytes // 4
        return piece * (vocabulary * self._score_bytes + 20 * -(-vocabulary // CHUNK)) + wide

    def _following(self, tokens: int) -> int:
        """The bytes of an eagle head that follows the policy.

        These are the captured states side by side and their features, or those with the layer's input and its
        keys and values.
        """
        if not self.captured_layers:
            return 0
        kv = self.config.num_kv_heads * self.config.head_dim
        hidden = self.config.hidden_size
        return tokens * self.dtype.itemsize * max((self.captured_layers + 1) * hidden, 3 * hidden + 2 * kv)

    @property
    def _score_bytes(self) -> int:
        return 8 if self.dtype == torch.float64 else 4


def layer_token_bytes(shape: DecoderConfig, dtype: torch.dtype, fp8: bool = False) -> int:
    """Returns the most bytes alive per token within a layer, partial results of attention aside.

    Residual E and normed E are always alive, and besides:

        attention      in turn: qkv; it and rotated queries Q; those and their result Q; that and projection E
        feed-forward   in turn: gate and up 2 F; those and their product F; that and its projection E
        experts        scores, and for each of K: gate and up 2 I, their product I and its projection E
        norms          the projection before it, and the next residual and normed E

    Layers in the policy's type, and products of many rows, take less than FP8 with its float32 parts: the
    larger counts.
    """
    size = dtype.itemsize
    hidden = shape.hidden_size * size
    normed = max(hidden, quantised_bytes(shape.hidden_size) if fp8 else 0)
    moments = _attention_moments(shape, dtype, fp8, normed)
    if len(shape.expert_layers) < shape.num_layers:
        moments += _feed_forward_moments(shape, dtype, fp8, normed)
    if shape.expert_layers:
        inner = shape.expert_intermediate_size * size
        choices = shape.num_experts_per_token
        # Scores, weights, experts, slots by expert, tiles.
        routed = 4 * shape.num_experts + choices * (size + 20)
        moments += [routed + choices * (3 * inner + hidden) + hidden, 3 * hidden]
    return hidden + normed + max(moments)


def prefill_bytes(
    shape: DecoderConfig, dtype: torch.dtype, fp8: bool, tokens: int, longest: int, fast: bool
) -> int:
    """Returns the most bytes alive within a layer of a prefill chunk, of prompts up to `longest` tokens.

    In addition to the bytes per token, the fast mode's attention gathers keys and values, while residual,
    normed rows, queries and their result are alive.
    """
    everywhere = tokens * layer_token_bytes(shape, dtype, fp8)
    if not fast:
        return everywhere
    hidden = shape.hidden_size * dtype.itemsize
    normed = max(hidden, quantised_bytes(shape.hidden_size) if fp8 else 0)
    attending = hidden + normed + 2 * shape.num_heads * shape.head_dim * dtype.itemsize
    gathered = most_gathered_bytes(tokens, longest, shape.num_kv_heads, shape.head_dim, dtype.itemsize)
    return max(everywhere, tokens * attending + gathered)


def _attention_moments(shape: DecoderConfig, dtype: torch.dtype, fp8: bool, normed: int) -> list[int]:
    size = dtype.itemsize
    hidden = shape.hidden_size * size
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    qkv = Product.of(q + 2 * kv, shape.hidden_size, dtype, fp8, shape.qkv_bias)
    output = Product.of(shape.hidden_size, q, dtype, fp8, shape.output_bias)
    attended = q * size + (quantised_bytes(q) if fp8 else 0)
    return [
        qkv.peak,
        qkv.held + q * size,
        2 * q * size,
        attended + output.peak,
        output.held + hidden + normed,
    ]


def _feed_forward_moments(shape: DecoderConfig, dtype: torch.dtype, fp8: bool, normed: int) -> list[int]:
    hidden = shape.hidden_size * dtype.itemsize
    width = shape.intermediate_size
    inner = max(width * dtype.itemsize, quantised_bytes(width) if fp8 else 0)
    gate_up = Product.of(2 * width, shape.hidden_size, dtype, fp8, shape.mlp_bias, keeps_parts=False)
    down = Product.of(shape.hidden_size, width, dtype, fp8, shape.mlp_bias)
    return [gate_up.peak, gate_up.held + inner, inner + down.peak, down.held + hidden + normed]


def quantised_bytes(width: int) -> int:
    """Returns the bytes of a row in FP8: whole groups, and a scale for each."""
    groups = -(-width // GROUP)
    return groups * (GROUP + 4)


@dataclass(frozen=True)
class Product:
    """Bytes per token of a projection's result: during the product, and after."""

    peak: int
    held: int

    @staticmethod
    def of(
        width: int, depth: int, dtype: torch.dtype, fp8: bool, bias: bool, keeps_parts: bool = True
    ) -> "Product":
        plain = width * dtype.itemsize
        parts = choose_parts(width, depth) if fp8 else 1
        whole = plain * 2 if bias else plain
        if parts == 1:
            return Product(whole, plain)
        in_parts = 4 * parts * width
        if keeps_parts and not bias:
            # The consumer adds up the parts.
            return Product(in_parts, in_parts)
        return Product(in_parts + 8 * width, plain)
