"""The algorithms by their recipe names. What else a paper sets (clip ranges, the mean, the KL) is
`ALGORITHM_DEFAULTS` in config/learning.py.
"""

from paceline.config import LearningConfig
from paceline.learning.algorithms.base import Algorithm
from paceline.learning.algorithms.dr_grpo import DrGRPO
from paceline.learning.algorithms.grpo import GRPO
from paceline.learning.algorithms.gspo import GSPO
from paceline.learning.algorithms.reinforce_plus_plus import ReinforcePlusPlus

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dapo": GRPO,  # the same loss with other settings; what DAPO adds to the data stands in dapo.py
    "dr_grpo": DrGRPO,
    "gspo": GSPO,
    "reinforce++": ReinforcePlusPlus,
}


def make_algorithm(config: LearningConfig) -> Algorithm:
    return ALGORITHMS[config.algorithm](config)
