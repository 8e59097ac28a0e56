"""Countdown: make a target from some numbers with + - * /, each number exactly once.

A task whose responses have a long tail: the policy writes its search out (`countdown_search.py`), and its
length differs by orders of magnitude between problems and between attempts. Problems are a pure
function of `task.seed` and `task.options`, every one has a solution, and training and held-out problems are
different. An answer counts if it is at the very end of a response that was not truncated
(`countdown_answer.py`).
"""

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from paceline.config import ConfigError
from paceline.config.section import Section
from paceline.tasks.base import Demonstration, Problem
from paceline.tasks.countdown_answer import MAX_ANSWER_CHARACTERS, solves
from paceline.tasks.countdown_search import RENDERINGS, given, moves, write_search
from paceline.types import Score

# Draws per wanted problem before the settings count as exhausted.
TRIES = 200

# Demonstrations that are made where nobody says how many.
MADE = 20_000
# From so many on, processes write them, which start in about a second; and how many one is given at a time.
WORTH_PROCESSES = 3000
SEARCHES_A_CALL = 100


class CountdownOptions(Section):
    """`task.options` of Countdown: how hard the problems are, and what searches look like."""

    min_numbers: int = Field(4, ge=2, le=6, description="given in a problem, at least")
    max_numbers: int = Field(4, ge=2, le=6, description="given in a problem, at most")
    max_number: int = Field(20, ge=2, le=999, description="the largest number given")
    min_target: int = Field(10, ge=1, description="the smallest target")
    max_target: int = Field(100, ge=1, le=9999, description="the largest target")
    max_value: int = Field(
        999, ge=2, le=99999, description="the largest number that searches and solutions go through"
    )
    patience: int = Field(
        100, ge=0, description="lines after which half of the demonstrations give up; 0: none does"
    )
    rendering: Literal["words", "compact"] = Field(
        "words", description="compact: a few symbols and numbers, for a small policy with a token for each"
    )

    @model_validator(mode="after")
    def _ranges_are_in_order(self) -> "CountdownOptions":
        for low, high in (
            ("min_numbers", "max_numbers"),
            ("min_target", "max_target"),
            ("max_target", "max_value"),
            ("max_number", "max_value"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"task.options.{low} = {getattr(self, low)} is above task.options.{high} = "
                    f"{getattr(self, high)}; lower the one or raise the other"
                )
        return self


def parse_options(options: dict[str, Any]) -> CountdownOptions:
    """Validates the recipe's `task.options`; raises ConfigError."""
    try:
        return CountdownOptions.model_validate(options)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(dict(problem)) for problem in error.errors())) from None


def _explain(problem: dict[str, Any]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    key = f"task.options.{'.'.join(str(part) for part in problem['loc'])}"
    if problem["type"] == "extra_forbidden":
        return f"{key}: countdown has no such option; it knows {', '.join(CountdownOptions.model_fields)}"
    return f"{key} = {problem['input']!r}: {message}"


class Countdown:
    """Countdown's problems, their verdicts and written-out searches for supervised fine-tuning."""

    def __init__(
        self, options: dict[str, Any], seed: int, train_problems: int, held_out_problems: int
    ) -> None:
        self.options = parse_options(options)
        self.rendering = RENDERINGS[self.options.rendering]
        wanted = train_problems + held_out_problems
        rng = random.Random(f"countdown/{seed}")
        problems: dict[str, Problem] = {}
        for _ in range(TRIES * wanted):
            problem = draw_problem(rng, self.options)
            problems.setdefault(problem.id, problem)
            if len(problems) == wanted:
                break
        else:
            raise ConfigError(
                f"task.options of countdown gave {len(problems)} different problems in {TRIES * wanted} "
                f"draws, but task.train_problems + task.eval_problems = {train_problems} + "
                f"{held_out_problems}; lower them or widen task.options"
            )
        unique = list(problems.values())
        self.train = unique[:train_problems]
        self.held_out = unique[train_problems:]

    def score(self, problem: Problem, response: str, truncated: bool) -> Score:
        answer = None if truncated else self.final_answer(response)
        correct = answer is not None and solves(answer, problem.extra["numbers"], problem.extra["target"])
        return Score(float(correct), correct, {"correct": float(correct)})

    def final_answer(self, response: str) -> str | None:
        """Returns the expression that a response ends in; None where it ends in anything else."""
        marker = self.rendering.answer_marker
        # One character beyond the limit: an answer that is too long cuts its marker off or is refused.
        end = ("\n" + response.rstrip())[-(len(marker) + MAX_ANSWER_CHARACTERS + 1) :]
        _, found, answer = end.rpartition(marker)
        return answer if found else None

    def demonstrations(self, count: int, seed: int) -> Iterator[Demonstration]:
        """Yields `count` searches for problems that are not held out; a pure function of its arguments.

        A search takes milliseconds, so many are written by all cores.
        """
        count = count or MADE
        held_out = {problem.id for problem in self.held_out}
        rng = random.Random(f"countdown/demonstrations/{seed}")
        problems: list[Problem] = []
        while len(problems) < count:
            problem = draw_problem(rng, self.options)
            if problem.id not in held_out:
                problems.append(problem)
        seeds = [f"{seed}/{i}" for i in range(count)]
        write = partial(demonstrate, self.options)
        if count < WORTH_PROCESSES:
            yield from map(Demonstration, problems, map(write, problems, seeds))
            return
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
            responses = processes.map(write, problems, seeds, chunksize=SEARCHES_A_CALL)
            yield from map(Demonstration, problems, responses)


def demonstrate(options: CountdownOptions, problem: Problem, seed: str) -> str:
    """Returns one solver's search for this problem, a pure function of its arguments."""
    numbers, target = problem.extra["numbers"], problem.extra["target"]
    rendering = RENDERINGS[options.rendering]
    seed = f"countdown/{problem.id}/{seed}"
    return write_search(numbers, target, options.max_value, options.patience, rendering, seed)


def draw_problem(rng: random.Random, options: CountdownOptions) -> Problem:
    """Returns a problem that has a solution: numbers are drawn and combined at random until one is left.

    Combinations that miss the range of targets are drawn again. A problem's id is independent of the order of
    its numbers.
    """
    while True:
        count = rng.randint(options.min_numbers, options.max_numbers)
        numbers = [rng.randint(1, options.max_number) for _ in range(count)]
        table = given(numbers)
        while len(table) > 1 and (steps := moves(table, options.max_value)):
            table = rng.choice(steps).table
        target = table[0].value
        if len(table) == 1 and options.min_target <= target <= options.max_target:
            prompt = RENDERINGS[options.rendering].ask(numbers, target)
            problem_id = f"{','.join(str(n) for n in sorted(numbers))}>{target}"
            return Problem(
                problem_id, prompt, table[0].expression, {"numbers": tuple(numbers), "target": target}
            )
