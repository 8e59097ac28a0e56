"""The memory of generation: resident rows, the drafter, the memory of graphs, a prefill chunk, the KV pool.

Rows and drafter are the engine's own objects, made on the meta device. The two passes are counted by the
engine's formulas (`engine/step_bytes.py`): its kernels differ from the torch code that the meta device would
run.
"""

from dataclasses import dataclass

import torch

from paceline.config import Config
from paceline.engine.graph_memory import GraphMemory
from paceline.engine.graphs import buckets_up_to
from paceline.engine.lengths import Lengths
from paceline.engine.proposals import Proposals
from paceline.engine.rows import MAX_QUERY, Rows
from paceline.engine.step_bytes import StepBytes, prefill_bytes
from paceline.kernels.fp8_format import E4M3
from paceline.paged.cache import BLOCK_SIZE, blocks_for, token_bytes
from paceline.paged.routing import routing_token_bytes
from paceline.plan.drafters import drafter_bytes
from paceline.plan.learning import META, total_bytes
from paceline.policy.decoder import Decoder
from paceline.precision.weights import quantised_parameters

# Depths that an adaptive pacer captures at each batch size: the plan's assumption.
PACED_DEPTHS = 2
# Bytes that the driver keeps for one captured step of some hundred launches.
GRAPH_BYTES = 8 << 20
# Multiprocessors of a B200, the most in `machine.py`: partial results of attention are planned for them.
PROCESSORS = 148


@dataclass(frozen=True)
class RolloutBytes:
    """Bytes that generation takes on the device."""

    rows: int  # and with FP8 its copies of the weights
    drafter: int
    graphs: int  # their pool, which no other tensor may use, and the driver's memory for them
    workspace: int  # a prefill chunk, or a step that runs once before its capture
    kv_token: int  # per token of the pool, the drafter's own cache and the recorded routing included


def rollout_bytes(policy: Decoder, config: Config) -> RolloutBytes:
    """Returns the bytes of generation; `policy` is on the meta device."""
    shape = policy.config
    dtype = policy.dtype
    slots = config.rollout.max_running
    speculation = config.rollout.speculation
    rows = Rows(slots, shape.max_positions, torch.float32, META)
    proposals = torch.zeros(slots + 1, MAX_QUERY - 1, dtype=torch.int64, device=META)
    request_tokens = Lengths.of(config, shape).request
    drafter = drafter_bytes(speculation, policy, rows, proposals, request_tokens)
    graphs, depth = len(buckets_up_to(slots)), 1
    if speculation.drafters:
        depth, widest = speculation.tokens + 1, min(slots, speculation.max_running or slots)
        # A draft and its verification; pacing tries a few depths at each batch size.
        graphs += 2 * len(buckets_up_to(widest)) * (1 if speculation.pacing == "fixed" else PACED_DEPTHS)
    # Cosines and sines of RoPE, each in one piece for the kernels.
    table = 2 * 4 * shape.max_positions * shape.head_dim // 2
    kv_dtype = E4M3 if config.rollout.precision.fp8_kv else dtype
    fp8 = config.rollout.precision.fp8_weights
    chosen = quantised_parameters(policy, config.rollout.base_precision_layers) if fp8 else []
    quantised = sum(parameter.numel() for _, parameter in chosen) * E4M3.itemsize
    # Of each token's routing a pass holds every layer's own int32, those in one piece, and that in the
    # record's type.
    routing = routing_token_bytes(shape) if config.rollout.router_replay else 0
    routing_pass = routing + 2 * 4 * len(shape.expert_layers) * shape.num_experts_per_token if routing else 0
    needs = StepBytes(
        shape,
        dtype,
        rows.state.tokens.shape[1],
        PROCESSORS,
        fp8,
        drafter.captured_layers,
        bool(routing),
        drafter.shapes,
        config.rollout.speculation.eagle_precision == "fp8",
        config.rollout.speculation.shape == "tree",
    )
    memory = GraphMemory(
        needs,
        buckets_up_to(slots),
        depth,
        int(config.rollout.graph_memory_gb * 1e9),
        not config.rollout.deterministic,
    )
    chunk = config.rollout.prefill_tokens
    prefill = prefill_bytes(shape, dtype, fp8, chunk, request_tokens, not config.rollout.deterministic)
    left_by_drafters = Proposals.empty(*proposals.shape, META)
    return RolloutBytes(
        rows=total_bytes([*rows.state, *vars(left_by_drafters).values()]) + table + quantised,
        drafter=drafter.fixed,
        graphs=memory.largest() + memory.beside + graphs * GRAPH_BYTES,
        workspace=max(memory.largest(), prefill + chunk * routing_pass),
        kv_token=token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, kv_dtype)
        + drafter.per_token
        + routing,
    )


def kv_pool_bytes(kv_token: int, tokens: int) -> int:
    """Returns the bytes of a `KVCache`: whole blocks, and the null block."""
    return (blocks_for(tokens) + 1) * BLOCK_SIZE * kv_token
