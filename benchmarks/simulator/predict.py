"""The seconds that the model predicts for a measured point."""

import numpy as np

from benchmarks.simulator.points import (
    AttentionPoint,
    ExpertPoint,
    GemmPoint,
    KernelPoint,
    RatioPoint,
    RestPoint,
    RolloutPoint,
    StepPoint,
)
from paceline.bench.lengths import LengthDistribution
from paceline.simulate import operators as op
from paceline.simulate.deployment import ENGINES, KERNELS_ALONE, Deployment
from paceline.simulate.hardware import AttentionCurve, ExpertCurve, GemmCurve, Hardware, Kernels, OtherCurve
from paceline.simulate.model_shape import load_model
from paceline.simulate.outcome import TAIL_SHARE
from paceline.simulate.pipeline import Pipeline, Schedule, StageSeconds
from paceline.simulate.replica import Replica
from paceline.simulate.speculation import DrafterShape, Speculation
from paceline.simulate.step_cost import StepCost

# Verifies what costs nothing to propose.
NO_DRAFTER = DrafterShape("none", fixed_seconds=0.0)


def predict_gemm(curve: GemmCurve, point: GemmPoint) -> float:
    """Returns the seconds of all products of a point."""
    weight_bytes = 1.0 if point.precision == "fp8" else 2.0
    products = (
        count * op.gemm(curve, point.rows, width, depth, weight_bytes)
        for width, depth, count in point.weights
    )
    return float(sum(products))


def predict_attention(curve: AttentionCurve, point: AttentionPoint) -> float:
    """Returns the seconds of one layer's attention, prefill or decode."""
    contexts = np.array(point.contexts, dtype=float)
    if point.new:
        pairs = float(np.sum(point.new * contexts + point.new**2 / 2))
        return float(op.prefill_attention(curve, pairs, point.heads, point.head_dim))
    rows = len(contexts)
    per_key = op.decode_attention_per_key(
        curve, point.queries, point.heads, point.kv_heads, point.head_dim, kv_bytes=2.0
    )
    serial = contexts.max() * curve.serial_seconds_per_key
    fixed = op.decode_attention_fixed(curve, rows, point.queries)
    return float(fixed + serial + (contexts.sum() + rows) * per_key)


def predict_experts(curve: ExpertCurve, point: ExpertPoint) -> float:
    """Returns the seconds of one layer's experts."""
    share = point.experts_per_token / point.experts
    seconds = op.expert_products(
        curve, point.rows, point.experts, share, point.hidden, point.width, weight_bytes=2.0
    )
    return float(seconds)


def predict_rest(curve: OtherCurve, point: RestPoint) -> float:
    """Returns the seconds of the sampler, or of what else a layer does."""
    if point.vocab:
        return float(op.sampler(curve, point.tokens, point.vocab))
    return float(op.layer_rest(curve, point.tokens, point.hidden, point.qkv_width, point.feed_forward))


def predict_kernel(kernels: Kernels, point: KernelPoint) -> float:
    """Returns the seconds of a point of any kind, on its kind's curve."""
    match point:
        case GemmPoint():
            curve = kernels.gemm_fp8 if point.precision == "fp8" else kernels.gemm_bf16
            assert curve is not None
            return predict_gemm(curve, point)
        case AttentionPoint():
            return predict_attention(kernels.attention, point)
        case ExpertPoint():
            return predict_experts(kernels.experts, point)
        case RestPoint():
            return predict_rest(kernels.other, point)


def step_cost(hardware: Hardware, model: str, engine: str) -> StepCost:
    """Returns the steps of a model on one device, without drafting; `kernels` has no overhead."""
    shape = load_model(model)
    profile = KERNELS_ALONE if engine == "kernels" else ENGINES[engine]
    return StepCost(Deployment(hardware, shape, profile), NO_DRAFTER)


def predict_step(hardware: Hardware, point: StepPoint) -> float:
    cost = step_cost(hardware, point.model, "kernels" if point.layer == "kernels" else point.engine)
    if point.prefill:
        tokens = point.rows * point.prefill
        filling = cost.prefill(tokens, tokens * (point.context + point.prefill / 2))
        return filling + cost.step(point.rows, 0, point.prefill)
    return cost.step(point.rows, point.queries - 1, point.context)


def predict_ratio(hardware: Hardware, point: RatioPoint) -> float:
    """Returns a verify step's seconds over a plain step's."""
    cost = step_cost(hardware, point.model, "kernels")
    plain = cost.step(point.rows, 0, point.context)
    return cost.step(point.rows, point.queries - 1, point.context) / plain


def simulate_rollout(hardware: Hardware, point: RolloutPoint) -> Replica:
    """Returns the replica after the rollout."""
    cost = step_cost(hardware, point.model, point.engine)
    lengths = np.array(LengthDistribution(*point.lengths).bench_values(point.requests))
    replica = Replica(cost, Speculation(), point.requests, cost.deployment.kv_tokens)
    Pipeline([replica], [lengths], 1, point.prompt, StageSeconds(), Schedule()).run()
    return replica


def tail_seconds(replica: Replica, requests: int) -> float:
    """Returns the seconds of the tail, as `paceline bench rollout` counts it."""
    return sum(s.stop - s.start for s in replica.totals.stretches if s.rows * TAIL_SHARE <= requests)


def step_seconds_by_running(replica: Replica, bound: int) -> float:
    """Returns the mean step with at most `bound` running and more than half of it.

    A step lasts from outcome to outcome: a prefill counts to the step after it.
    """
    stretches = replica.totals.stretches
    before = [0.0, *(s.stop for s in stretches[:-1])]
    chosen = [(s, start) for s, start in zip(stretches, before, strict=True) if bound // 2 < s.rows <= bound]
    return sum(s.stop - start for s, start in chosen) / max(1, sum(s.steps for s, _ in chosen))
