"""Seconds of one operator on one device: rooflines with measured efficiency.

Every function takes numpy arrays and broadcasts. All are non-increasing in every rate and non-decreasing in
every size (tests/simulate/test_properties.py).
"""

import numpy as np

from paceline.simulate.hardware import AttentionCurve, ExpertCurve, GemmCurve, Links, OtherCurve

Array = np.ndarray | float


def gemm(curve: GemmCurve, rows: Array, width: float, depth: float, weight_bytes: float) -> np.ndarray:
    """Returns the seconds of rows x depth times a depth x width weight matrix.

    launch + ||(bytes / bandwidth, operations / rate)||_p. The norm is a roofline whose knee is as round as
    measured: near the knee loads and arithmetic overlap only in part. The rate grows with the rows as rows /
    (rows + half_rows): tiles fill up.
    """
    rows = _padded(np.asarray(rows, dtype=float), curve.row_tile)
    moved = width * depth * weight_bytes + rows * (width + depth) * 2.0
    arithmetic = 2 * (rows + curve.half_rows) * width * depth / curve.flops
    return curve.launch_seconds + _norm(moved / curve.bandwidth, arithmetic, curve.sharpness)


def decode_attention_fixed(curve: AttentionCurve, rows: Array, queries: int) -> np.ndarray:
    """Returns the seconds of one layer that do not grow with the context."""
    return curve.launch_seconds + np.asarray(rows) * queries * curve.row_seconds


def decode_attention_per_key(
    curve: AttentionCurve, queries: int, heads: float, kv_heads: float, head_dim: int, kv_bytes: float
) -> float:
    """Returns what one more cached key of one row adds: reading it, or multiplying by it."""
    read = 2 * kv_heads * head_dim * kv_bytes / curve.bandwidth
    pairs = kv_heads * _padded(queries * heads / kv_heads, curve.query_tile)
    return float(_norm(read, 4 * pairs * head_dim / curve.flops, 3.0))


def prefill_attention(curve: AttentionCurve, pairs: Array, heads: float, head_dim: int) -> np.ndarray:
    """Returns the seconds of one layer; `pairs` counts (query, key) pairs below the diagonal."""
    return curve.launch_seconds + 4 * np.asarray(pairs) * heads * head_dim / curve.prefill_flops


def expert_products(
    curve: ExpertCurve,
    rows: Array,
    experts_here: float,
    share: float,
    hidden: int,
    width: float,
    weight_bytes: float,
) -> np.ndarray:
    """Returns the seconds of the three products of all experts on one device.

    Each of `rows` tokens goes to a given expert with probability `share`, so n (1 - (1 - share)^rows)
    distinct experts are expected; each reads its weights once, and pads its tokens to a tile.
    `busiest_share` scales the work to the busiest device's.
    """
    rows = np.asarray(rows, dtype=float)
    active = experts_here * (1 - (1 - share) ** rows)
    tokens = rows * share * experts_here  # (token, expert) pairs on this device
    padded = np.maximum(tokens, active * curve.row_tile / 2)  # a last tile is half full on average
    moved = active * 3 * hidden * width * weight_bytes + tokens * (2 * hidden + 3 * width) * 2.0
    arithmetic = 2 * padded * 3 * hidden * width / curve.flops
    return 4 * curve.launch_seconds + curve.busiest_share * _norm(moved / curve.bandwidth, arithmetic, 3.0)


def layer_rest(
    curve: OtherCurve, tokens: Array, hidden: int, qkv_width: float, feed_forward: float
) -> np.ndarray:
    """Returns the seconds of two residual norms, RoPE with the cache write, and the activation at 16 bits."""
    values = 2 * 4 * hidden + 2 * qkv_width + 3 * feed_forward
    return curve.layer_seconds + np.asarray(tokens) * values * 2 / curve.bandwidth


def sampler(curve: OtherCurve, tokens: Array, vocab: float) -> np.ndarray:
    return curve.sampler_seconds + np.asarray(tokens) * vocab / curve.sampler_elements_per_second


def all_reduce(links: Links, group: int, message_bytes: Array) -> np.ndarray:
    """Returns the seconds of a sum: 2 (n - 1) / n of the message crosses each device's link."""
    return _collective(links, group, 2 * np.asarray(message_bytes))


def all_to_all(links: Links, group: int, message_bytes: Array) -> np.ndarray:
    """Returns the seconds of an exchange: every device sends (n - 1) / n of its message."""
    return _collective(links, group, np.asarray(message_bytes))


def _collective(links: Links, group: int, sent: np.ndarray) -> np.ndarray:
    if group <= 1:
        return np.zeros_like(sent, dtype=float)
    inside = group <= links.domain
    bandwidth = links.link_bandwidth if inside else links.network_bandwidth
    return (links.link_seconds if inside else links.network_seconds) + sent * (group - 1) / group / bandwidth


def _norm(a: Array, b: Array, p: float) -> np.ndarray:
    """Returns (a^p + b^p)^(1/p), scaled by the larger so that small numbers do not underflow."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = np.divide(low, high, out=np.zeros_like(np.asarray(high, dtype=float)), where=np.asarray(high) > 0)
    return high * (1 + ratio**p) ** (1 / p)


def _padded(rows: Array, tile: int) -> np.ndarray:
    return np.ceil(np.asarray(rows, dtype=float) / tile) * tile
