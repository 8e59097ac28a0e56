"""The built-in task: labelled running sums, small enough for a laptop, with long-tailed response lengths.

    prompt     a9b8c8=
    careful    a9:9;b8:17;c8:24/c8:25;#25      a running sum per term; a slip is struck out by `/` and redone
    careless   #24                             a guess

The number of terms is log-normal, so a few responses are many times longer than the median. The starting
policy has been shown both ways of answering (`benchmarks/make_builtin.py`) and mostly guesses; RL finds out
that care pays. That is a choice between two modes the policy already has, not a new skill.
"""

import random
import re
import string

from paceline.tasks.base import Problem
from paceline.types import Score

# One label per term, in this order.
LABELS = string.ascii_lowercase + "ABCDEF"

# Terms of the shortest problem.
MIN_TERMS = 2

# Terms of the longest problem.
MAX_TERMS = len(LABELS)

# Mean and standard deviation of the logarithm of the number of terms.
LOG_TERMS_MEAN = 1.6
LOG_TERMS_STD = 0.6

# Every character of prompts and responses: the built-in tokenizer's vocabulary.
ALPHABET = string.digits + LABELS + "=:;/#"

_ANSWER = re.compile(r"#(\d+)$")


class RunningSums:
    """Different sums, drawn by seed and split into training and held-out problems."""

    def __init__(self, seed: int, train_problems: int, held_out_problems: int) -> None:
        rng = random.Random(f"running-sums/{seed}")
        problems: dict[str, Problem] = {}
        while len(problems) < train_problems + held_out_problems:
            problem = draw_problem(rng)
            problems.setdefault(problem.id, problem)
        unique = list(problems.values())
        self.train = unique[:train_problems]
        self.held_out = unique[train_problems:]

    def score(self, problem: Problem, response: str, truncated: bool) -> Score:
        """Compares the number after the response's last `#` with the sum."""
        found = _ANSWER.search(response)
        correct = not truncated and found is not None and found.group(1) == problem.answer
        return Score(reward=float(correct), correct=correct, components={"correct": float(correct)})


def draw_problem(rng: random.Random) -> Problem:
    count = min(MAX_TERMS, max(MIN_TERMS, round(rng.lognormvariate(LOG_TERMS_MEAN, LOG_TERMS_STD))))
    digits = [rng.randint(1, 9) for _ in range(count)]
    prompt = "".join(f"{label}{digit}" for label, digit in zip(LABELS, digits, strict=False)) + "="
    return Problem(id=prompt, prompt=prompt, answer=str(sum(digits)))
