"""The metrics of a step's rollout, under the names that docs/metrics.md explains.

Keys under `time/` and `memory/` differ from run to run; all others are the same for the same seed.
"""

from collections.abc import Sequence

from paceline.stats import RolloutStats
from paceline.tasks.base import FAILED
from paceline.types import FinishReason, Group

# A decode step belongs to the tail when at most one in so many of the samples still runs.
TAIL_SHARE = 8


def rollout_metrics(groups: Sequence[Group], stats: RolloutStats) -> dict[str, float]:
    """Returns rewards, lengths and accuracy of the groups, and the engine's figures where it has any."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.score.reward for sample in samples]
    lengths = sorted(len(sample.completion.tokens) for sample in samples)
    components = sorted({name for sample in samples for name in sample.score.components})
    values = {
        "reward/mean": _mean(rewards),
        "reward/std": _mean([(r - _mean(rewards)) ** 2 for r in rewards]) ** 0.5,
        **{
            f"reward/{name}": _mean([s.score.components.get(name, 0.0) for s in samples])
            for name in components
        },
        "reward/failures": sum(any(name.startswith(FAILED) for name in s.score.components) for s in samples),
        "rollout/accuracy": _mean([sample.score.correct for sample in samples]),
        "rollout/zero_variance_groups": _mean([len(set(group.rewards)) == 1 for group in groups]),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_p95": lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
        "rollout/length_max": lengths[-1],
        "rollout/truncated": _mean([sample.completion.truncated for sample in samples]),
        "rollout/refused": sum(sample.completion.finish_reason is FinishReason.REFUSED for sample in samples),
        "rollout/samples": len(samples),
        "rollout/tokens": sum(lengths),
    }
    if stats.running:
        replicas = stats.replicas.count if stats.replicas is not None else 1
        tail = [running * TAIL_SHARE * replicas <= len(samples) for running in stats.running]
        values["rollout/decode_steps"] = len(tail)
        values["rollout/tail_steps"] = _mean(tail)
        values |= speculation_metrics(stats)
        values["time/prefill"] = stats.prefill_seconds
        if stats.timing_seconds:
            values["time/timing"] = stats.timing_seconds
        values["time/tail"] = sum(
            seconds for seconds, in_tail in zip(stats.step_seconds, tail, strict=True) if in_tail
        )
        values["time/decode"] = sum(stats.step_seconds) - values["time/tail"]
        values["time/reward_wait"] = stats.reward_wait_seconds
    if stats.replicas is not None:
        values["cluster/replicas"] = stats.replicas.count
        values["cluster/restarts"] = stats.replicas.restarts
        values["cluster/retried_requests"] = stats.replicas.retried_requests
        values["time/idle_share"] = stats.replicas.idle_share
        values["time/unused_share"] = stats.replicas.unused_share
    if stats.precision is not None:
        values["time/quantise"] = stats.precision.quantise_seconds
        values["precision/kv_error"] = stats.precision.kv_error
        values["precision/kv_base_layers"] = stats.precision.kv_base_layers
    if stats.graph_pool_bytes is not None:
        values["time/capture"] = stats.capture_seconds
        values["memory/graph_pool_gb"] = stats.graph_pool_bytes / 1e9
    return values


def speculation_metrics(stats: RolloutStats) -> dict[str, float]:
    """Returns proposals and acceptance of all drafters and of each; nothing where no step speculated."""
    if not stats.drafts:
        return {}
    proposed = sum(d.proposed for d in stats.drafts.values())
    accepted = sum(d.accepted for d in stats.drafts.values())
    count = sum(d.drafts for d in stats.drafts.values())
    values = {
        "speculation/proposed": proposed,
        "speculation/accepted": accepted / max(1, proposed),
        "speculation/accept_length": 1 + accepted / max(1, count),
        "speculation/steps": _mean([strategy != "plain" for strategy in stats.strategies]),
        "time/drafting": stats.draft_seconds,
        "time/verifying": stats.verify_seconds,
    }
    for name, d in sorted(stats.drafts.items()):
        values[f"speculation/{name}/accept_length"] = d.accept_length
        values |= {
            f"speculation/{name}/accepted_{i}": share for i, share in enumerate(d.accepted_shares, start=1)
        }
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
