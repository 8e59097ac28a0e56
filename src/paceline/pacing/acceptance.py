"""The tokens that a drafter's proposal gains: acceptance by depth, estimated from verification.

`a_d` is the chance that token d is accepted when the d - 1 before it were. A proposal of k tokens then emits
1 + sum over d <= k of a_1 ... a_d tokens: the policy's own token comes on top. Old counts fade, so that the
estimate follows the policy. A depth with few counts leans on the depth before it, and a situation with few
counts on all situations together, both through pseudo-counts as in a Beta prior.
"""

from collections.abc import Sequence

import numpy as np

from paceline.pacing.settings import DEFAULT_TUNING, PacingTuning
from paceline.pacing.situation import Situation


class AcceptanceModel:
    """One drafter's acceptance by depth, in each situation and over all of them."""

    def __init__(self, max_count: int, tuning: PacingTuning = DEFAULT_TUNING) -> None:
        self.max_count = max_count
        self._tuning = tuning
        # By situation, with None for all together: drafts that reached each depth, and that survived it.
        self._counts: dict[Situation | None, np.ndarray] = {None: self._no_counts()}

    # -- Commands --------------------------------------------------------------------------------------------

    def update(self, where: Situation, drafts: int, accepted_at: Sequence[int], steps: int) -> None:
        """Adds the drafts of `steps` steps, of which `accepted_at[i]` had i + 1 or more tokens accepted."""
        if not drafts:
            return
        survived = np.zeros(self.max_count)
        survived[: len(accepted_at)] = accepted_at
        reached = np.zeros(self.max_count)
        reached[: len(accepted_at)] = [drafts, *accepted_at[:-1]]
        window = max(self._tuning.window_drafts, self._tuning.window_steps * drafts / max(1, steps))
        for key in (None, where):
            counts = self._counts.setdefault(key, self._no_counts())
            counts *= max(0.0, 1.0 - drafts / window)
            counts += (reached, survived)

    def fade(self, where: Situation, factor: float) -> None:
        """Scales down the counts of this situation, and of all together, because they are stale."""
        for key in (None, where):
            if key in self._counts:
                self._counts[key] *= factor

    def restart(self, where: Situation, drafts: int, accepted_at: Sequence[int]) -> None:
        """Replaces the counts of this situation, and of all together; those of other situations stay."""
        self.fade(where, 0.0)
        self.update(where, drafts, accepted_at, 1)

    # -- Queries ---------------------------------------------------------------------------------------------

    def drafts_known(self) -> float:
        """Returns the number of drafts behind the estimate over all situations."""
        return float(self._counts[None][0, 0])

    def has_seen(self, where: Situation) -> bool:
        return where in self._counts

    def rates(self, where: Situation) -> np.ndarray:
        """Returns a_1 ... a_max in this situation."""
        nothing = [0.0] * self.max_count
        pooled = self._smoothed(self._counts[None], nothing, nothing)
        own = self._counts.get(where)
        if own is None:
            return np.array(pooled)
        # The pooled estimate weighs no more than the drafts behind it.
        weights = np.minimum(self._tuning.pooled_pseudo_drafts, self._counts[None][0]).tolist()
        return np.array(self._smoothed(own, pooled, weights))

    def emitted(self, where: Situation) -> np.ndarray:
        """Returns the tokens that a row emits in a step, for proposals of 0 ... max tokens."""
        return emitted_by_count(self.rates(where))

    def _smoothed(self, counts: np.ndarray, pooled: list[float], weights: list[float]) -> list[float]:
        """Estimates each depth from its counts, the depth before it, and `pooled` with these weights."""
        rates = []
        before = 0.0
        pseudo_drafts = self._tuning.rejected_pseudo_drafts
        for (reached, survived), other, weight in zip(counts.T.tolist(), pooled, weights, strict=True):
            before = (survived + pseudo_drafts * before + weight * other) / (reached + pseudo_drafts + weight)
            rates.append(before)
            pseudo_drafts = self._tuning.depth_pseudo_drafts
        return rates

    def _no_counts(self) -> np.ndarray:
        return np.zeros((2, self.max_count))

    # -- State -----------------------------------------------------------------------------------------------

    def state(self) -> list[dict]:
        """Returns the counts as one named record for each situation; `situation` is null for all together."""
        return [
            {
                "situation": None if where is None else where._asdict(),
                "reached": counts[0].tolist(),
                "survived": counts[1].tolist(),
            }
            for where, counts in self._counts.items()
        ]

    def load_state(self, state: list[dict]) -> None:
        """Restores what `state` returned, for as many depths as there are now."""
        for entry in state:
            where = None if entry["situation"] is None else Situation(**entry["situation"])
            depths = min(self.max_count, len(entry["reached"]))
            counts = self._no_counts()
            counts[0, :depths] = entry["reached"][:depths]
            counts[1, :depths] = entry["survived"][:depths]
            self._counts[where] = counts


def emitted_by_count(rates: np.ndarray) -> np.ndarray:
    """Returns the tokens that a row emits in a step for proposals of 0 ... len(rates) tokens."""
    return 1.0 + np.concatenate(([0.0], np.cumsum(np.cumprod(rates))))
