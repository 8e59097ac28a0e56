"""Countdown once more, written apart from the task: Python's own parser and every expression there is."""

import ast
import itertools
from collections.abc import Sequence
from fractions import Fraction

OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def value_and_numbers(expression: str) -> tuple[Fraction, list[int]]:
    """Returns an expression's value and the numbers in it; raises for anything but + - * / on numbers."""

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError(ast.dump(node))

    numbers: list[int] = []
    return walk(ast.parse(expression, mode="eval").body), numbers


def reachable(numbers: Sequence[int]) -> set[Fraction]:
    """Returns every value of an expression over all of these numbers, fractions and negatives on the way."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    values: set[Fraction] = set()
    rest = range(1, len(numbers))
    for size in range(len(numbers) - 1):
        for chosen in itertools.combinations(rest, size):
            left = [numbers[0], *(numbers[i] for i in chosen)]
            right = [numbers[i] for i in rest if i not in chosen]
            for a, b in itertools.product(reachable(left), reachable(right)):
                values |= {a + b, a - b, b - a, a * b}
                values |= {a / b} if b else set()
                values |= {b / a} if a else set()
    return values
