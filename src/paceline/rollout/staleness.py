"""Which groups a step may learn from, and how many prompts may be in flight: the one place that decides.

A group is born with the version of the weights when its requests were submitted; no token of it is older. A
step that updates version u learns from `prompts` groups, the oldest complete ones first, and none of them
may be older than u - max_lag. With `on_stale: wait` that holds because a step also waits for groups that a
later step could no longer take:

    due       a group born at v must be learned from by the update of version v + max_lag
    feasible  once this step has taken its share, those due by u + i fit into i steps, for every i

This is earliest deadline first: where all of `in_flight` <= (max_lag + 1) x prompts groups are complete, the
oldest `prompts` always qualify, so waiting ends. With `on_stale: drop` groups past their bound are dropped
before a step chooses, and the caller counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StepRules:
    """The rules of one run's steps."""

    prompts: int  # groups that a step learns from
    in_flight: int  # limit of groups under way or waiting to be learned from
    max_lag: int | None  # None: no group outlives a step
    on_stale: Literal["wait", "drop"] = "wait"

    def places(self, version: int, born: Sequence[int], learning: bool = False) -> int:
        """Returns how many prompts may be admitted now; `born` are the versions of the current groups.

        While the learner computes the update of `version`, an admitted prompt can be learned from by the next
        update at the earliest, which leaves it one step fewer.
        """
        limit = self.in_flight
        if self.max_lag is not None and learning:
            limit = min(limit, self.max_lag * self.prompts)
        elif learning:
            limit = 0
        return max(0, limit - len(born))

    def expired(self, version: int, born: int) -> bool:
        return self.max_lag is not None and version - born > self.max_lag

    def choose(self, version: int, complete: Sequence[int], unfinished: Sequence[int]) -> list[int] | None:
        """Returns the indices into `complete` of the groups that this step learns from; None: not yet.

        Both arguments hold the versions that groups were born with, in order of admission.
        """
        if len(complete) < self.prompts:
            return None
        oldest_first = sorted(range(len(complete)), key=lambda i: (complete[i], i))
        taken = sorted(oldest_first[: self.prompts])
        left = [complete[i] for i in oldest_first[self.prompts :]]
        return taken if self._feasible(version, [*left, *unfinished]) else None

    def _feasible(self, version: int, left: Sequence[int]) -> bool:
        lag = self.max_lag
        if lag is None or self.on_stale == "drop":
            return True
        return all(
            sum(born + lag <= version + i for born in left) <= i * self.prompts for i in range(lag + 1)
        )
