"""Countdown searched by a fallible solver and written out as text, dead ends and backtracking included.

    Make 22 from 3,5,7.            prompt
    7+5=12 leaves 3,12             a step: two numbers become one
    12+3=15 for 22                 two numbers are left, so every operator is tried
    12-3=9 for 22
    12*3=36 for 22
    12/3=4 for 22
    back to 3,5,7                  a dead end
    5*3=15 leaves 7,15
    15+7=22 for 22
    Answer: (5*3)+7

The idea is Stream of Search (arXiv 2404.03683): a policy that is trained on searches, not on optimal paths,
learns to search, and RL can make it search better. Solvers differ in skill and in patience, so lengths vary
over orders of magnitude: how noisily a solver ranks its steps, how many of them it tries before it
backtracks, and after how many lines it gives up are drawn for each trace.

Steps stay within positive whole numbers, larger operand first. The value reached is written next to the
target: a small policy learns to compare neighbours long before it compares with a distant prompt. A trace is
a pure function of the problem, the solver's settings and the seed.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# A solver's ranking noise, on the scale of the natural logarithm of a heuristic's score: median and sigma.
NOISE_MEDIAN = 1.0
NOISE_SIGMA = 0.8
# How many steps a solver tries from a state of three numbers or more before it backtracks: median and sigma.
WIDTH_MEDIAN = 4.0
WIDTH_SIGMA = 0.5
# Spread of the number of lines after which a solver gives up; the median is a setting of the task.
PATIENCE_SIGMA = 0.9


@dataclass(frozen=True)
class Term:
    """A number on the table, and the expression over the given numbers that made it."""

    value: int
    expression: str
    is_given: bool = False

    @property
    def operand(self) -> str:
        return self.expression if self.is_given else f"({self.expression})"


@dataclass(frozen=True)
class Move:
    """One step: two terms become one, which goes to the end of the table."""

    equation: str
    result: Term
    table: tuple[Term, ...]

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(term.value for term in self.table)


@dataclass(frozen=True)
class Rendering:
    """How problems and searches read; `symbols` has every character but digits (empty: any may occur)."""

    prompt: str
    step: str
    miss: str
    hit: str
    back: str
    answer_marker: str  # precedes the final expression; responses are parsed as if they began with a new line
    gave_up: str
    symbols: str = ""

    def ask(self, numbers: Sequence[int], target: int) -> str:
        return self.prompt.format(numbers=_listed(numbers), target=target)


RENDERINGS = {
    "words": Rendering(
        prompt="Make {target} from {numbers}.\n",
        step="{equation} leaves {numbers}\n",
        miss="{equation} for {target}\n",
        hit="{equation} for {target}\n",
        back="back to {numbers}\n",
        answer_marker="\nAnswer: ",
        gave_up="none",
    ),
    "compact": Rendering(
        prompt="{numbers}>{target}:",
        step="{equation}[{numbers}]",
        miss="{equation}>{target};",
        hit="{equation}>{target}",
        back="<{numbers};",
        answer_marker="#",
        gave_up="?",
        symbols="+-*/()=,>:;[]<#?",
    ),
}


def given(numbers: Sequence[int]) -> tuple[Term, ...]:
    return tuple(Term(number, str(number), is_given=True) for number in numbers)


def moves(table: Sequence[Term], max_value: int) -> list[Move]:
    """Returns every step from this table that stays within positive whole numbers up to `max_value`.

    The order is fixed: pairs in table order, and + - * / for each. Steps with the same text (from equal
    numbers) are listed once.
    """
    found: dict[str, Move] = {}
    for i, left in enumerate(table):
        for j in range(i + 1, len(table)):
            a, b = sorted((left, table[j]), key=lambda term: term.value, reverse=True)
            rest = (*table[:i], *table[i + 1 : j], *table[j + 1 :])
            for operator, value in _results(a.value, b.value):
                equation = f"{a.value}{operator}{b.value}={value}"
                if value <= max_value and equation not in found:
                    result = Term(value, f"{a.operand}{operator}{b.operand}")
                    found[equation] = Move(equation, result, (*rest, result))
    return list(found.values())


def _results(a: int, b: int) -> list[tuple[str, int]]:
    """Returns the results of a >= b. No zeros, and no division by one: the product is the same."""
    results = [("+", a + b)]
    if a > b:
        results.append(("-", a - b))
    results.append(("*", a * b))
    if b > 1 and a % b == 0:
        results.append(("/", a // b))
    return results


def write_search(
    numbers: Sequence[int], target: int, max_value: int, patience: int, rendering: Rendering, seed: str
) -> str:
    """Returns a search for `target` as text; it ends in an answer or gives up after about `patience` lines.

    `patience` is the median over seeds of the lines that a solver writes; 0: it never gives up.
    """
    search = _Search(target, max_value, patience, rendering, random.Random(seed))
    table = given(numbers)
    try:
        found = search.visit(table)
    except _GaveUp:
        found = None
    answer = rendering.gave_up if found is None else found.expression
    return "".join(search.lines) + rendering.answer_marker.lstrip("\n") + answer


class _GaveUp(Exception):
    """Raised when the solver's patience runs out."""


class _Search:
    """A depth-first search by one solver, whose skill and patience are drawn in `__init__`."""

    def __init__(
        self, target: int, max_value: int, patience: int, rendering: Rendering, rng: random.Random
    ) -> None:
        self.target = target
        self.max_value = max_value
        self.rendering = rendering
        self.rng = rng
        self.lines: list[str] = []
        self.score = rng.choice((distance_to_target, distance_to_factor))
        self.noise = NOISE_MEDIAN * math.exp(rng.gauss(0.0, NOISE_SIGMA))
        self.width = max(1, round(WIDTH_MEDIAN * math.exp(rng.gauss(0.0, WIDTH_SIGMA))))
        self.patience = patience * math.exp(rng.gauss(0.0, PATIENCE_SIGMA)) if patience else math.inf

    def visit(self, table: tuple[Term, ...]) -> Term | None:
        """Writes the search below a table of two or more numbers; returns the term that hits the target."""
        if len(table) == 2:
            return self._try_every_operator(table)
        is_root = not self.lines
        ranked = self._ranked(moves(table, self.max_value))
        for number, move in enumerate(
            ranked if is_root or self.patience == math.inf else ranked[: self.width]
        ):
            if number:
                self._write(self.rendering.back.format(numbers=_listed([term.value for term in table])))
            self._write(self.rendering.step.format(equation=move.equation, numbers=_listed(move.values)))
            found = self.visit(move.table)
            if found is not None:
                return found
        return None

    def _try_every_operator(self, table: tuple[Term, ...]) -> Term | None:
        for move in moves(table, self.max_value):
            is_hit = move.result.value == self.target
            line = self.rendering.hit if is_hit else self.rendering.miss
            self._write(line.format(equation=move.equation, target=self.target))
            if is_hit:
                return move.result
        return None

    def _ranked(self, options: list[Move]) -> list[Move]:
        """Best first by the solver's heuristic, as far as its noise lets it see that."""
        scores = [math.log1p(self.score(move.values, self.target)) for move in options]
        noisy = [score + self.noise * self.rng.gauss(0.0, 1.0) for score in scores]
        return [options[i] for i in sorted(range(len(options)), key=noisy.__getitem__)]

    def _write(self, line: str) -> None:
        if len(self.lines) >= self.patience:
            raise _GaveUp
        self.lines.append(line)


def distance_to_target(values: Sequence[int], target: int) -> int:
    return min(abs(target - value) for value in values)


def distance_to_factor(values: Sequence[int], target: int) -> int:
    """A heuristic: how far the nearest number on the table is from a factor of the target other than one."""
    factors = [f for f in range(2, target + 1) if target % f == 0] or [target]
    return min(abs(factor - value) for value in values for factor in factors)


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)
