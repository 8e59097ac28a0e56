"""Whose proposals weigh more where rows share a step's tokens: those of rows that have longest to go.

While requests wait, every token is worth the same, since slots become free earlier or later by as much. When
nobody waits, a rollout ends with its longest row, and time that others gain is lost in waiting for it. What
is known of lengths is little (`expected_lengths.py`), so the weights stay near one.
"""

import numpy as np

# The most and least that a row's proposals weigh, as a factor of how likely they are to be reached.
MOST = 2.0


def priorities(tokens_left: np.ndarray, anybody_waits: bool) -> np.ndarray:
    """Returns the logs of the rows' weights, from the tokens that each is expected to sample yet."""
    if anybody_waits or not len(tokens_left):
        return np.zeros(len(tokens_left), dtype=np.float32)
    share = tokens_left / max(1.0, float(tokens_left.mean()))
    return np.log(np.clip(share, 1 / MOST, MOST)).astype(np.float32)
