"""What generation takes: resident rows, the drafter, one step's tensors for the graphs, a prefill chunk, the KV pool.

Rows and drafter are the engine's own objects, made on the meta device. The two passes are formulas that follow
`paged/forward.py`: its kernels differ from the torch code that the meta device would run.

Shape letters: T tokens, E hidden size, Q and KV width of all heads, F feed-forward, I expert feed-forward, K experts per token.
"""

from dataclasses import dataclass

import torch

from paceline.backends.base import BASE_PRECISION
from paceline.config import Config
from paceline.engine.graphs import buckets_up_to
from paceline.engine.rows import MAX_QUERY, Rows
from paceline.kernels.fp8_format import E4M3
from paceline.paged.cache import BLOCK_SIZE, blocks_for, token_bytes
from paceline.paged.routing import routing_token_bytes
from paceline.plan.drafters import drafter_bytes
from paceline.plan.learning import META, total_bytes
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.precision.weights import quantised_parameters

PACED_DEPTHS = 2
GRAPH_BYTES = 8 << 20  # what the driver keeps for one captured step of some hundred launches
# The Triton sampler keeps nothing of a logit; truncated sampling sorts: scores, sorted scores, ids, and five of int64 at a time.
LOGIT_BYTES, TRUNCATED_LOGIT_BYTES = 4, 64
REJECTION_LOGIT_BYTES = 28  # verification by rejection is plain torch: both distributions, their difference, noise, and what is between


@dataclass(frozen=True)
class RolloutBytes:
    rows: int  # and with FP8 its copies of the weights
    drafter: int
    graphs: int  # their pool, which nobody else may use, and what the driver keeps for them
    workspace: int  # a prefill chunk, or a step that runs once before its capture
    kv_token: int  # per token of the pool, the drafter's own cache and the recorded routing included


def rollout_bytes(policy: Decoder, config: Config) -> RolloutBytes:
    """`policy` on the meta device."""
    shape, dtype, slots, speculation = policy.config, policy.dtype, config.rollout.max_running, config.rollout.speculation
    rows = Rows(slots, shape.max_positions, torch.float32, META)
    proposals = torch.zeros(slots + 1, MAX_QUERY - 1, dtype=torch.int64, device=META)
    drafter = drafter_bytes(speculation, policy, rows, proposals, bool(config.policy.widen))
    queries, graphs, rejects = slots, len(buckets_up_to(slots)), bool(speculation.drafters) and speculation.verify == "rejection"
    if speculation.drafters:
        widest = min(slots, speculation.max_running or slots)
        fits = int(config.rollout.graph_memory_gb * 1e9) // step_bytes(shape, 1, dtype, truncates=False)  # see `engine/graph_memory.py`
        queries = max(slots, min(fits, widest * (speculation.tokens + 1)))
        # A draft and its verification; pacing goes through a few depths at each batch size.
        graphs += 2 * len(buckets_up_to(widest)) * (1 if speculation.pacing == "fixed" else PACED_DEPTHS)
    step = step_bytes(shape, queries, dtype, truncates=config.eval.top_p < 1, rejects=rejects)
    table = 2 * 4 * shape.max_positions * shape.head_dim // 2  # cos and sin, each in one piece for the kernels
    precision, kv_dtype = config.rollout.precision, E4M3 if config.rollout.precision == "fp8+kv" else dtype
    chosen = [] if precision == BASE_PRECISION else quantised_parameters(policy, config.rollout.base_precision_layers)
    quantised = sum(parameter.numel() for _, parameter in chosen) * E4M3.itemsize
    # Of each token's routing a pass holds every layer's own int32, those in one piece, and that in the record's type.
    routing = routing_token_bytes(shape) if config.rollout.router_replay else 0
    routing_pass = routing + 2 * 4 * len(shape.expert_layers) * shape.num_experts_per_token if routing else 0
    step += queries * routing_pass
    return RolloutBytes(
        rows=total_bytes([*vars(rows.state).values(), proposals]) + table + quantised,
        drafter=drafter.fixed,
        graphs=step + graphs * GRAPH_BYTES,
        workspace=max(step, config.rollout.prefill_tokens * (layer_token_bytes(shape, dtype) + routing_pass)),
        kv_token=token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, kv_dtype) + drafter.per_token + routing,
    )


def kv_pool_bytes(kv_token: int, tokens: int) -> int:
    """As `KVCache` takes it: whole blocks, and the one that belongs to nobody."""
    return (blocks_for(tokens) + 1) * BLOCK_SIZE * kv_token


def step_bytes(shape: DecoderConfig, queries: int, dtype: torch.dtype, truncates: bool, rejects: bool = False) -> int:
    """All logits of a step in float32, beside the last hidden states; the layers before them take less."""
    beside = max(TRUNCATED_LOGIT_BYTES * truncates, REJECTION_LOGIT_BYTES * rejects)
    logits = queries * shape.vocab_size * (LOGIT_BYTES + beside)
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
