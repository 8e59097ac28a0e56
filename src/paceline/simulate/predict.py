"""What the model says a measured point should have taken."""

import numpy as np

from paceline.simulate import operators as op
from paceline.simulate.deployment import ENGINES, KERNELS_ALONE, Deployment, Parallelism, Precision
from paceline.simulate.hardware import Hardware, Kernels
from paceline.simulate.model_shape import load_model
from paceline.simulate.pipeline import Pipeline, Schedule, StageSeconds
from paceline.simulate.points import (
    AttentionPoint,
    ExpertPoint,
    GemmPoint,
    RatioPoint,
    RestPoint,
    RolloutPoint,
    StepPoint,
)
from paceline.simulate.replica import Replica
from paceline.simulate.speculation import Speculation, eagle
from paceline.simulate.step_cost import StepCost
from paceline.simulate.workload import Lengths


def predict_gemm(kernels: Kernels, point: GemmPoint) -> float:
    curve, width_bytes = (kernels.gemm_fp8, 1.0) if point.precision == "fp8" else (kernels.gemm_bf16, 2.0)
    assert curve is not None
    return float(
        sum(
            count * op.gemm(curve, point.rows, width, depth, width_bytes)
            for width, depth, count in point.weights
        )
    )


def predict_attention(kernels: Kernels, point: AttentionPoint) -> float:
    contexts = np.array(point.contexts, dtype=float)
    if point.new:
        pairs = float(np.sum(point.new * contexts + point.new**2 / 2))
        return float(op.prefill_attention(kernels.attention, pairs, point.heads, point.head_dim))
    keys, longest = contexts.sum() + len(contexts), contexts.max()
    rows = len(contexts)
    return float(
        op.decode_attention(
            kernels.attention,
            rows,
            point.queries,
            keys,
            longest,
            point.heads,
            point.kv_heads,
            point.head_dim,
            2.0,
        )
    )


def predict_experts(kernels: Kernels, point: ExpertPoint) -> float:
    share = point.experts_per_token / point.experts
    return float(
        op.expert_products(kernels.experts, point.rows, point.experts, share, point.hidden, point.width, 2.0)
    )


def predict_rest(kernels: Kernels, point: RestPoint) -> float:
    if point.vocab:
        return float(op.sampler(kernels.other, point.tokens, point.vocab))
    return float(
        op.layer_rest(kernels.other, point.tokens, point.hidden, point.qkv_width, point.feed_forward)
    )


def step_cost(hardware: Hardware, model: str, engine: str) -> StepCost:
    shape = load_model(model)
    chosen = KERNELS_ALONE if engine == "kernels" else ENGINES[engine]
    return StepCost(Deployment(hardware, shape, chosen, Precision(), Parallelism()), eagle(shape))


def predict_step(hardware: Hardware, point: StepPoint) -> float:
    cost = step_cost(hardware, point.model, "kernels" if point.layer == "kernels" else point.engine)
    if point.prefill:
        new = point.rows * point.prefill
        return cost.prefill(new, new * (point.context + point.prefill / 2)) + cost.step(
            point.rows, 0, point.prefill
        )
    return verify_seconds(cost, point.rows, point.queries, point.context)


def verify_seconds(cost: StepCost, rows: int, queries: int, context: float) -> float:
    """A target step alone, without the drafter's passes."""
    parts = cost.breakdown(np.array([rows]), queries - 1)
    linear = cost.linear(rows, queries - 1)
    drafting = float(parts.draft[0]) + (queries - 1) * cost.draft_per_key * rows * context
    return linear.seconds(rows, rows * context, context) - drafting


def predict_ratio(hardware: Hardware, point: RatioPoint) -> float:
    cost = step_cost(hardware, point.model, "kernels")
    return verify_seconds(cost, point.rows, point.queries, point.context) / verify_seconds(
        cost, point.rows, 1, point.context
    )


def simulate_rollout(hardware: Hardware, point: RolloutPoint) -> Replica:
    """The replica after the rollout."""
    cost = step_cost(hardware, point.model, point.engine)
    mean, sigma, low, high = point.lengths
    lengths = Lengths(mean, sigma, low, high).draw_as_bench(point.requests)
    replica = Replica(cost, Speculation(), point.requests, cost.deployment.kv_tokens)
    Pipeline([replica], [lengths], 1, point.prompt, StageSeconds(), Schedule()).run()
    return replica


def tail_seconds(replica: Replica, requests: int) -> float:
    """With at most an eighth of the requests running, as `paceline bench rollout` counts it."""
    return sum(s.stop - s.start for s in replica.totals.stretches if s.rows * 8 <= requests)


def step_seconds_by_running(replica: Replica, bound: int) -> float:
    """Mean step with at most `bound` running and more than half of it, from outcome to outcome: a prefill
    counts to the step after it.
    """
    stretches = replica.totals.stretches
    before = [0.0, *(s.stop for s in stretches[:-1])]
    chosen = [(s, start) for s, start in zip(stretches, before, strict=True) if bound // 2 < s.rows <= bound]
    return sum(s.stop - start for s, start in chosen) / max(1, sum(s.steps for s, _ in chosen))
