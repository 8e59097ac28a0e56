"""Dr. GRPO, "GRPO done right" (arXiv 2503.20783, section 3.2): GRPO without the two divisions that bias it.

    A_i = R_i - mean(R)                                   no std, which weights questions by their difficulty
    L   = 1 / (responses x max_tokens) sum over tokens    no 1 / |y_i|, which makes long wrong answers cheap

The constant max_tokens is `rollout.max_tokens` (`loss_mean: constant`). No KL.
"""

from collections.abc import Sequence

from paceline.learning.algorithms.base import Advantage, LogRatios, centre
from paceline.learning.algorithms.grpo import GRPO
from paceline.types import Group


class DrGRPO(GRPO):
    """GRPO with advantages that are centred but not divided by their standard deviation."""

    def advantages(
        self, groups: Sequence[Group], log_ratios: LogRatios | None = None
    ) -> list[list[Advantage]]:
        return [[Advantage(value) for value in centre(group.rewards)] for group in groups]
