"""The algorithms by their recipe names. To add one:

1. Write `algorithms/my_algorithm.py` with a class that has what `base.Algorithm` has: `advantages` for the
   samples of a step and `token_loss` for each response token. Most derive from `grpo.GRPO` and replace one.
2. Register the class in `ALGORITHMS` below, under its recipe name.
3. In config/learning.py, add the name to `LearningConfig.algorithm`, and to `ALGORITHM_DEFAULTS` the settings
   of its paper (clip range, mean, KL) where they differ from the defaults.
4. In tests/learning/test_algorithms.py, add the paper's formula as a loop over samples and tokens.
5. In docs/algorithms.md, add a row to the table.

A loss that clips nothing returns zeros as `clipped_R`; keys such as `clip_low` that it ignores stay at their
defaults, or the recipe gets a note (`config/notes.py`).
"""

from paceline.config import LearningConfig
from paceline.learning.algorithms.base import Algorithm
from paceline.learning.algorithms.cispo import CISPO
from paceline.learning.algorithms.distill import Distill
from paceline.learning.algorithms.dr_grpo import DrGRPO
from paceline.learning.algorithms.grpo import GRPO
from paceline.learning.algorithms.gspo import GSPO
from paceline.learning.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from paceline.learning.algorithms.rloo import RLOO
from paceline.learning.algorithms.sft import SFT

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dapo": GRPO,  # the same loss with other settings; what DAPO does to the rewards is in dapo.py
    "dr_grpo": DrGRPO,
    "gspo": GSPO,
    "reinforce++": ReinforcePlusPlus,
    "rloo": RLOO,
    "cispo": CISPO,
    "distill": Distill,
    "sft": SFT,
}


def make_algorithm(config: LearningConfig) -> Algorithm:
    return ALGORITHMS[config.algorithm](config)
