"""An example with turns: products that are hard to do in the head, and a calculator to ask.

    prompt        What is 47 * 86?
    response      <calc>47 * 86</calc>        stops at the closing tag
    observation    = 4042\n                    the tool's tokens, outside the loss
    response      Answer: 4042

`step` is a tool like any other (`task.turns.step: calculator` gives it to every task).
"""

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from paceline.tasks.base import Done, Observation, Problem, Turn
from paceline.tasks.extract import extract
from paceline.types import Score

# The text that ends a turn: the tool answers after it.
STOP = "</calc>"

# Digits of any intermediate number: a long product must not exhaust memory.
MAX_DIGITS = 40

# Characters of an expression.
MAX_EXPRESSION_LENGTH = 200

_CALL = re.compile(r"<calc>([^<]*)</calc>\Z")
_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class CalculatorProblems:
    """Products of two random factors from 12 to 999, drawn without repetition."""

    def __init__(self, seed: int, train_problems: int, held_out_problems: int) -> None:
        rng = random.Random(f"calculator/{seed}")
        problems: dict[str, Problem] = {}
        while len(problems) < train_problems + held_out_problems:
            a = rng.randint(12, 999)
            b = rng.randint(12, 999)
            problems.setdefault(f"{a}*{b}", Problem(f"{a}*{b}", f"What is {a} * {b}?", str(a * b)))
        unique = list(problems.values())
        self.train = unique[:train_problems]
        self.held_out = unique[train_problems:]

    def score(self, problem: Problem, response: str, truncated: bool) -> Score:
        correct = not truncated and extract(response, "answer-line") == problem.answer
        return Score(float(correct), correct, {"correct": float(correct)})


def step(problem: Problem, conversation: Sequence[Turn]) -> Observation | Done:
    """Answers a response that ends in a call; any other response ends the conversation."""
    found = _CALL.search(conversation[-1].text)
    if found is None:
        return Done()
    try:
        return Observation(f" = {calculate(found.group(1))}\n")
    except (ValueError, ZeroDivisionError) as error:
        return Observation(f" error: {error}\n")


def calculate(expression: str) -> str:
    """Evaluates numbers and + - * / // % exactly; raises ValueError for anything else."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError("expression too long")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("not an arithmetic expression") from None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = Fraction(_OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate(node.operand))
    else:
        raise ValueError("only numbers and + - * / // % are allowed")
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError("number too large")
    return value
