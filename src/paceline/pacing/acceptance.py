"""How many tokens a drafter's proposal gains: acceptance by depth, from what verification saw.

`a_d` is the chance that token d is accepted when the d - 1 before it were. A proposal of k tokens then emits
1 + sum over d <= k of a_1 ... a_d tokens: the policy's own token comes on top. Old counts fade, so that the
estimate follows the policy; a depth that has not been tried lately leans on the depth before it, a situation
on all of them together. Situations are batch and context classes: a rollout's first tokens and its tail are
different texts, for a drafter that remembers above all.
"""

from collections.abc import Sequence

import numpy as np

Situation = tuple[int, int]  # `exploration.situation`

WINDOW_DRAFTS = 128  # what counts, at most; 0.04 of standard error at the worst
WINDOW_STEPS = 16  # of a large batch, where the window above would be one step's luck
LEAN_DEPTH = 4.0  # imaginary drafts at the acceptance of the depth before
LEAN_ALL = 16.0  # imaginary drafts at the acceptance over all situations
DOUBT = 2.0  # imaginary drafts that were rejected: nobody is believed before having shown something


class AcceptanceModel:
    """Of one drafter."""

    def __init__(self, max_count: int) -> None:
        self.max_count = max_count
        self._counts = {
            None: np.zeros((2, max_count))
        }  # by situation, None: all; reached and survived at each depth

    def note(self, where: Situation, drafts: int, accepted_at: Sequence[int], steps: int) -> None:
        """`accepted_at[i]`: drafts, of `drafts`, whose first i + 1 tokens were accepted; over `steps`
        steps.
        """
        if not drafts:
            return
        survived = np.zeros(self.max_count)
        survived[: len(accepted_at)] = accepted_at
        reached = np.zeros(self.max_count)
        reached[: len(accepted_at)] = [drafts, *accepted_at[:-1]]
        window = max(WINDOW_DRAFTS, WINDOW_STEPS * drafts / max(1, steps))
        for key in (None, where):
            counts = self._counts.setdefault(key, np.zeros((2, self.max_count)))
            counts *= max(0.0, 1.0 - drafts / window)
            counts += (reached, survived)

    def restart(self, where: Situation, drafts: int, accepted_at: Sequence[int]) -> None:
        """All that is believed of this situation, and where nothing else is known; what was seen of others
        stands.
        """
        self.fade(where, 0.0)
        self.note(where, drafts, accepted_at, 1)

    def fade(self, where: Situation, factor: float) -> None:
        """What is known of this situation, and of all together, counts for less, because it is old."""
        for key in (None, where):
            if key in self._counts:
                self._counts[key] *= factor

    def drafts_known(self) -> float:
        return float(self._counts[None][0, 0])

    def knows(self, where: Situation) -> bool:
        """Something was seen there."""
        return where in self._counts

    def rates(self, where: Situation) -> np.ndarray:
        """a_1 ... a_max in this situation."""
        overall = _leaning(self._counts[None], [0.0] * self.max_count, [0.0] * self.max_count)
        own = self._counts.get(where)
        if own is None:
            return np.array(overall)
        # Over all situations only what has been seen there can be leant on.
        return np.array(_leaning(own, overall, np.minimum(LEAN_ALL, self._counts[None][0]).tolist()))

    def emitted(self, where: Situation) -> np.ndarray:
        """Tokens per row and step for k = 0 ... max."""
        return emitted_by_count(self.rates(where))

    def state(self) -> dict[str, list[list[float]]]:
        return {
            "all" if key is None else "{},{}".format(*key): counts.tolist()
            for key, counts in self._counts.items()
        }

    def load_state(self, state: dict[str, list[list[float]]]) -> None:
        for key, counts in state.items():
            mine = np.zeros((2, self.max_count))
            depth = min(self.max_count, len(counts[0]))
            mine[:, :depth] = np.asarray(counts)[:, :depth]
            batch, _, context = key.partition(",")
            self._counts[None if key == "all" else (int(batch), int(context))] = mine


def emitted_by_count(rates: np.ndarray) -> np.ndarray:
    return 1.0 + np.concatenate(([0.0], np.cumsum(np.cumprod(rates))))


def _leaning(counts: np.ndarray, others: list[float], weights: list[float]) -> list[float]:
    """Each depth from its own counts, the depth before it, and what others say of it with the weight
    given.
    """
    rates, before, lean = [], 0.0, DOUBT
    for (reached, survived), other, weight in zip(counts.T.tolist(), others, weights, strict=True):
        before = (survived + lean * before + weight * other) / (reached + lean + weight)
        rates.append(before)
        lean = LEAN_DEPTH
    return rates
