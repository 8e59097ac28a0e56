"""What generation takes: resident rows, the drafter's bank, one step's tensors for the graphs, a prefill chunk, the KV pool.

Rows, bank and pool are the engine's own objects, made on the meta device. The two passes are formulas that follow
`paged/forward.py`: its kernels differ from the torch code that the meta device would run.

Shape letters: T tokens, E hidden size, Q and KV width of all heads, F feed-forward, I expert feed-forward, K experts per token.
"""

from dataclasses import dataclass

import torch

from paceline.config import Config
from paceline.drafting.history import HistoryDrafter
from paceline.engine.graphs import buckets_up_to
from paceline.engine.rows import MAX_QUERY, Rows
from paceline.paged.cache import BLOCK_SIZE, blocks_for, token_bytes
from paceline.plan.learning import META, total_bytes
from paceline.policy.config import DecoderConfig

GRAPH_BYTES = 8 << 20  # what the driver keeps for one captured step of some hundred launches
# The Triton sampler keeps nothing of a logit; truncated sampling sorts: scores, sorted scores, ids, and five of int64 at a time.
LOGIT_BYTES, TRUNCATED_LOGIT_BYTES = 4, 64


@dataclass(frozen=True)
class RolloutBytes:
    rows: int
    drafter: int
    graphs: int  # their pool, which nobody else may use, and what the driver keeps for them
    workspace: int  # a prefill chunk, or a step that runs once before its capture


def rollout_bytes(shape: DecoderConfig, config: Config, dtype: torch.dtype) -> RolloutBytes:
    slots, speculation = config.rollout.max_running, config.rollout.speculation
    rows = Rows(slots, shape.max_positions, torch.float32, META)
    row_tensors = [*vars(rows.state).values(), rows.top_k, rows.top_p, rows.min_p]
    proposals = torch.zeros(slots + 1, MAX_QUERY - 1, dtype=torch.int64, device=META)
    drafter, queries = 0, slots
    graphs = len(buckets_up_to(slots))
    if speculation.drafter != "none":
        history = HistoryDrafter()
        history.bind(rows.state, proposals)
        drafter = total_bytes([history.bank_NW, history.bank_length_N, history.sources_SC])
        widest = min(slots, speculation.max_running)
        queries = max(slots, widest * (speculation.tokens + 1))
        graphs += 2 * len(buckets_up_to(widest))  # a draft and its verification
    step = step_bytes(shape, queries, dtype, truncates=config.eval.top_p < 1)
    table = 2 * 4 * shape.max_positions * shape.head_dim // 2  # cos and sin, each in one piece for the kernels
    prefill = config.rollout.prefill_tokens * layer_token_bytes(shape, dtype)
    return RolloutBytes(total_bytes([*row_tensors, proposals]) + table, drafter, step + graphs * GRAPH_BYTES, max(step, prefill))


def kv_token_bytes(shape: DecoderConfig, dtype: torch.dtype) -> int:
    return token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)


def kv_pool_bytes(shape: DecoderConfig, dtype: torch.dtype, tokens: int) -> int:
    """As `KVCache` takes it: whole blocks, and the one that belongs to nobody."""
    return (blocks_for(tokens) + 1) * BLOCK_SIZE * kv_token_bytes(shape, dtype)


def step_bytes(shape: DecoderConfig, queries: int, dtype: torch.dtype, truncates: bool) -> int:
    """All logits of a step in float32, beside the last hidden states; the layers before them take less."""
    logits = queries * shape.vocab_size * (LOGIT_BYTES + (TRUNCATED_LOGIT_BYTES if truncates else 0))
    return max(logits + 2 * queries * shape.hidden_size * dtype.itemsize, queries * layer_token_bytes(shape, dtype))


def layer_token_bytes(shape: DecoderConfig, dtype: torch.dtype) -> int:
    """The most that is alive per token within a layer.

    attention      residual E, normed E, qkv Q + 2 KV, rotated queries Q, output Q
    feed-forward   residual E, normed E, gate and up 2 F, their product F
    experts        residual E, normed E, and for each of K: gate and up 2 I with their product I, or that product with its output E
    """
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inner, expert = shape.intermediate_size, shape.expert_intermediate_size
    widths = [3 * q + 2 * kv, 3 * inner]
    if shape.num_experts:
        widths.append(shape.num_experts_per_token * max(3 * expert, expert + shape.hidden_size))
    return dtype.itemsize * (2 * shape.hidden_size + max(widths))
