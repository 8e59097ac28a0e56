"""The built-in verifiers. Each pays between 0 and 1; what they share with a user's function is the way they are called.

They run in worker processes, so they may be slow or fall over on odd answers.
"""

import functools
import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from paceline.tasks.reasoning_gym import open_dataset

# A sign belongs to a number unless something stands right before it: in "7-3" the last number is 3.
NUMBER = re.compile(r"(?:(?<![\w.)])[-+\u2212])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def exact(extracted: str | None, answer: str) -> float:
    """The same text, apart from white space around it."""
    return float(extracted is not None and extracted.strip() == answer.strip())


def last_number(extracted: str | None, answer: str) -> float:
    """The last number of the response equals the last number of the answer: `$1,200.00` is `1200`, `#### 18` is `18`."""
    expected = find_last_number(answer)
    if expected is None:
        raise ValueError(f"the answer {answer!r} holds no number; use another scorer for such problems")
    return float(extracted is not None and find_last_number(extracted) == expected)


def find_last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(re.sub(r"[,$+]", "", found[-1]).replace("\u2212", "-"))
    except InvalidOperation:
        return None


def math_verify(extracted: str | None, answer: str) -> float:
    """Mathematical equality (Hugging Face's math-verify): `\\frac{1}{2}` is `0.5`, `\\boxed{}` is understood."""
    from math_verify import parse, verify

    if extracted is None:
        return 0.0
    # Its own time limits use signals and only slow things down here: the worker is killed at the reward's limit. An
    # answer may be bare LaTeX, which it reads only between dollar signs.
    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    given = parse(extracted, parsing_timeout=None) or parse(f"${extracted}$", parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def reasoning_gym(extracted: str | None, extra: dict[str, Any], dataset: str, options: str, threshold: float) -> float:
    """The dataset's own verifier. Some pay 0.01 to 0.05 for anything at all: below `threshold` counts nothing."""
    if extracted is None:
        return 0.0
    score = float(_verifier(dataset, options).score_answer(extracted, extra["entry"]))
    return score if score >= threshold else 0.0


@functools.cache
def _verifier(dataset: str, options: str) -> Any:
    return open_dataset(dataset, json.loads(options))
