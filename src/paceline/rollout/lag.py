"""Metrics of a step's lag, and of the stragglers that a step left out."""

from collections.abc import Iterator, Sequence

from paceline.types import Completion, Group, Segment


def lag_metrics(groups: Sequence[Group], version: int, keeps_cache: bool) -> dict[str, float]:
    """Returns lags under their `rollout/` names; `version` is that of the policy that learns.

    A group's lag is that of its oldest token. Where caches are recomputed at an update, the recomputed tokens
    are counted; where they are kept, the share of tokens that attended to older weights' keys.
    """
    completions = [sample.completion for group in groups for sample in group.samples]
    lags = [_lag(group, version) for group in groups]
    segments = [segment for completion in completions for segment in sampled(completion)]
    tokens = sum(s.stop - s.start for s in segments)
    ages = sum((version - s.weight_version) * (s.stop - s.start) for s in segments)
    crossed = sum(bool(_after_an_update(completion)) for completion in completions)
    metrics = {
        "rollout/lag_mean": sum(lags) / max(1, len(lags)),
        "rollout/lag_max": float(max(lags, default=0)),
        "rollout/staleness": ages / max(1, tokens),
        "rollout/crossed_updates": crossed / max(1, len(completions)),
    }
    if keeps_cache:
        stale = sum(s.stop - s.start for completion in completions for s in _with_older_keys(completion))
        return metrics | {"rollout/stale_cache_tokens": stale / max(1, tokens)}
    recomputed = sum(
        len(completion.request.prompt) + s.start
        for completion in completions
        for s in _after_an_update(completion)
    )
    return metrics | {"rollout/recomputed_tokens": float(recomputed)}


def straggler_metrics(groups: Sequence[Group], stragglers: Sequence[int], count: int) -> dict[str, float]:
    """Returns how much shorter the responses that a step took are than all that it requested.

    Dropped responses count with the tokens that they had, so the true difference is at least this large.
    """
    taken = [len(sample.completion.tokens) for group in groups for sample in group.samples]
    everything = [*taken, *stragglers]
    return {
        "rollout/stragglers": float(count),
        "rollout/straggler_length": sum(stragglers) / max(1, len(stragglers)),
        "rollout/length_bias": sum(taken) / max(1, len(taken)) - sum(everything) / max(1, len(everything)),
    }


def sampled(completion: Completion) -> Iterator[Segment]:
    return (segment for segment in completion.segments if segment.sampled)


def _after_an_update(completion: Completion) -> list[Segment]:
    segments = list(sampled(completion))
    return [
        later
        for earlier, later in zip(segments, segments[1:], strict=False)
        if later.weight_version != earlier.weight_version
    ]


def _with_older_keys(completion: Completion) -> list[Segment]:
    segments = list(sampled(completion))
    return [s for s in segments if s.weight_version != segments[0].weight_version]


def _lag(group: Group, version: int) -> int:
    versions = [s.weight_version for sample in group.samples for s in sampled(sample.completion)]
    return version - min(versions, default=version)
