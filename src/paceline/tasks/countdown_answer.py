"""Reads and checks a Countdown answer in exact rational arithmetic, in time bounded by its length.

An answer is an expression of + - * / and parentheses that uses each given number exactly once (as in Stream
of Search, arXiv 2404.03683). Values on the way may be negative or fractions. Everything else is refused:
signs before a number, other digits than 0-9, leading zeros, numbers glued together.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

# Longer texts are refused unread. Six numbers of three digits with every pair of parentheses take 48.
MAX_ANSWER_CHARACTERS = 200

_TOKEN = re.compile(r" *([1-9][0-9]{0,5}|[-+*/()])")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def solves(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Returns whether `answer` is an expression over exactly these numbers whose value is `target`."""
    tokens = tokenize(answer)
    if tokens is None or sorted(int(t) for t in tokens if t.isdigit()) != sorted(numbers):
        return False
    try:
        return evaluate(tokens) == target
    except (ValueError, ZeroDivisionError):
        return False


def tokenize(text: str) -> list[str] | None:
    """Returns the numbers, operators and parentheses of an expression; None where there is anything else."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    text = text.rstrip(" ")
    tokens: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            return None
        tokens.append(found.group(1))
        position = found.end()
    return tokens


def evaluate(tokens: Sequence[str]) -> Fraction:
    """Returns an expression's value (Dijkstra's two stacks); ValueError where it is not well formed."""
    values: list[Fraction] = []
    operators: list[str] = []

    def reduce_once() -> None:
        if len(values) < 2:
            raise ValueError("an operator lacks an operand")
        right = values.pop()
        values[-1] = _APPLY[operators.pop()](values[-1], right)

    operand_next = True
    for token in tokens:
        if (token.isdigit() or token == "(") != operand_next:
            raise ValueError(f"{token!r} is out of place")
        if token.isdigit():
            values.append(Fraction(int(token)))
            operand_next = False
        elif token == "(":
            operators.append(token)
        elif token == ")":
            while operators and operators[-1] != "(":
                reduce_once()
            if not operators:
                raise ValueError("a parenthesis was never opened")
            operators.pop()
        else:
            while operators and _PRECEDENCE.get(operators[-1], 0) >= _PRECEDENCE[token]:
                reduce_once()
            operators.append(token)
            operand_next = True
    if operand_next:
        raise ValueError("an expression ends with a number or a closing parenthesis")
    while operators:
        if operators[-1] == "(":
            raise ValueError("a parenthesis was never closed")
        reduce_once()
    return values[0]
