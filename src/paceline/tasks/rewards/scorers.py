"""The built-in scorers that compare texts and numbers; they run in workers, like user functions."""

import re
from decimal import Decimal, InvalidOperation

# A sign belongs to a number unless it directly follows something: in "7-3" the last number is 3.
NUMBER = re.compile(r"(?:(?<![\w.)])[-+\u2212])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def exact(extracted: str | None, answer: str) -> float:
    """Scores 1 where the texts are equal, apart from white space around them."""
    return float(extracted is not None and extracted.strip() == answer.strip())


def last_number(extracted: str | None, answer: str) -> float:
    """Scores 1 where the last numbers are equal: `$1,200.00` is `1200`, `#### 18` is `18`."""
    expected = find_last_number(answer)
    if expected is None:
        raise ValueError(f"the answer {answer!r} holds no number; use another scorer for such problems")
    return float(extracted is not None and find_last_number(extracted) == expected)


def find_last_number(text: str) -> Decimal | None:
    """Returns the last number in a text, without its thousands separators; None where there is none."""
    found = NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(re.sub(r"[,$+]", "", found[-1]).replace("\u2212", "-"))
    except InvalidOperation:
        return None
