"""The statistics of several replicas as one."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.stats import DraftStats, ReplicaStats, RolloutStats

SUMMED = (
    "generated_tokens",
    "prefill_tokens",
    "capture_seconds",
    "prefill_seconds",
    "timing_seconds",
    "draft_seconds",
    "verify_seconds",
    "requests_left_out",
)
JOINED = ("running", "step_seconds", "strategies", "trace")


def merge_stats(parts: Sequence[tuple[int, RolloutStats]], replicas: ReplicaStats) -> RolloutStats:
    """Sums the statistics of numbered replicas; decode steps are concatenated."""
    merged = RolloutStats(replicas=replicas)
    for number, stats in parts:
        for name in SUMMED:
            setattr(merged, name, getattr(merged, name) + getattr(stats, name))
        for name in JOINED:
            getattr(merged, name).extend(getattr(stats, name))
        merged.requests += [replace(trace, replica=number) for trace in stats.requests]
        for name, drafts in stats.drafts.items():
            _add(merged.drafts.setdefault(name, DraftStats()), drafts)
        merged.precision = stats.precision or merged.precision
        if stats.graph_pool_bytes is not None:
            merged.graph_pool_bytes = max(stats.graph_pool_bytes, merged.graph_pool_bytes or 0)
    versions = [stats.drafter_version for _, stats in parts if stats.drafter_version is not None]
    merged.drafter_version = min(versions, default=None)  # a replica may have missed the newest
    return merged


def _add(total: DraftStats, drafts: DraftStats) -> None:
    total.drafts += drafts.drafts
    total.proposed += drafts.proposed
    total.accepted += drafts.accepted
    total.begun += drafts.begun
    total.accepted_at += [0] * (len(drafts.accepted_at) - len(total.accepted_at))
    for depth, accepted in enumerate(drafts.accepted_at):
        total.accepted_at[depth] += accepted
