"""DAPO (arXiv 2503.14476) is four changes to GRPO; this file holds the third.

1. Clip-higher (eq. 10): clip_low 0.2, clip_high 0.28, so that unlikely tokens can become likely.
2. Token-level loss (eq. 8): `loss_mean: token`, so that long responses do not count less per token. No KL.
3. Soft overlong punishment (eq. 13), below: a response that nears the length limit loses up to 1 of its
   reward. The paper's cache is 4,096 of 20,480 tokens: `overlong_share: 0.2` of `rollout.max_tokens`.

       R_length(y) = 0                                    |y| <= max - cache
                     ((max - cache) - |y|) / cache        up to |y| = max, where it is -1

4. Dynamic sampling (eq. 11): `rollout/dynamic_sampling.py`. It looks at the task's own rewards, before the
   punishment.
"""

from collections.abc import Sequence
from dataclasses import replace

from paceline.types import Group, Sample


def overlong_punishment(length: int, max_tokens: int, share: float) -> float:
    cache = share * max_tokens
    return min(0.0, max(-1.0, (max_tokens - cache - length) / cache))


def punish_overlong(groups: Sequence[Group], max_tokens: int, share: float) -> list[Group]:
    """Returns the groups with R_length added to each reward and shown as the reward component `overlong`.

    Saved samples of a run that punished have it in their rewards already and are left as they are.
    """
    if share == 0:
        return list(groups)
    return [
        replace(group, samples=tuple(_punished(sample, max_tokens, share) for sample in group.samples))
        for group in groups
    ]


def _punished(sample: Sample, max_tokens: int, share: float) -> Sample:
    if "overlong" in sample.score.components:
        return sample
    punishment = overlong_punishment(len(sample.completion.tokens), max_tokens, share)
    components = sample.score.components | {"overlong": punishment}
    return replace(
        sample, score=replace(sample.score, reward=sample.score.reward + punishment, components=components)
    )
