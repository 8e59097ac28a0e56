"""Answers found in responses, and the built-in verifiers, against cases written by hand."""

from decimal import Decimal

import pytest

from paceline.tasks.extract import extract
from paceline.tasks.rewards.scorers import exact, find_last_number, last_number


@pytest.mark.parametrize(
    "response, how, answer",
    [
        ("  4 \n", "whole", "4"),
        ("I add.\nAnswer: 4", "answer-line", "4"),
        ("I add.\n**Answer:** 4 \n\n", "answer-line", "4"),
        ("answer : x = 2", "answer-line", "x = 2"),
        ("Answer: 4\nor maybe not", "answer-line", None),  # only the last line counts
        ("The answer: 4", "answer-line", None),
        ("", "answer-line", None),
        ("#### 3\n#### 18 ", r"####\s*(.+)", "18"),
        ("none", r"####\s*(.+)", None),
        ("<a>x\ny</a>", r"(?s)<a>(.*?)</a>", "x\ny"),
    ],
)
def test_extract_returns_the_last_answer(response, how, answer):
    assert extract(response, how) == answer


@pytest.mark.parametrize(
    "text, number",
    [
        ("it is 18", "18"),
        ("$1,200.50.", "1200.50"),
        ("7-3", "3"),
        ("7 - 3", "3"),
        ("= -4", "-4"),
        ("(-4)", "-4"),
        ("x=-4", "-4"),
        ("-$5", "-5"),
        ("1,234,567 eggs", "1234567"),
        ("1, 2", "2"),
        ("3 and 4.", "4"),
        ("18%", "18"),
        ("about 2kg", "2"),
        ("\u22125", "-5"),
        ("#### 42", "42"),
        ("0.5", "0.5"),
        ("12,3456", "3456"),
        ("2-$3", "3"),
    ],
)
def test_find_last_number_returns_the_last_number(text, number):
    assert find_last_number(text) == Decimal(number)


def test_find_last_number_returns_none_without_a_number():
    assert find_last_number("none at all") is None and find_last_number("") is None


def test_exact_and_last_number_score_answers():
    assert exact(" 4\n", "4") == 1.0 and exact("4.0", "4") == 0.0 and exact(None, "4") == 0.0
    assert last_number("So $1,200.00", "a 3, then #### 1200") == 1.0
    assert (
        last_number("1200 or 3", "1200") == 0.0
        and last_number(None, "1") == 0.0
        and last_number("x", "1") == 0.0
    )
    assert last_number("9" * 100_000, "1") == 0.0
    with pytest.raises(ValueError, match="holds no number"):
        last_number("1", "blue")


@pytest.mark.parametrize(
    "response, answer, score",
    [
        (r"so $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{x^2+1}", "$1+x^2$", 1.0),
        (r"\frac{2}{4}", r"\frac{1}{2}", 1.0),
        ("$3$", "4", 0.0),
        ("no idea", "4", 0.0),
    ],
)
@pytest.mark.slow
@pytest.mark.ci
def test_math_verify_scores_answers(response, answer, score):
    pytest.importorskip("math_verify", reason="needs math-verify: pip install -e '.[math]'")
    from paceline.tasks.rewards.math_scorer import math_verify

    assert math_verify(response, answer) == score
    assert math_verify(None, answer) == 0.0


@pytest.mark.slow
@pytest.mark.ci
def test_reasoning_gym_verifier_is_guarded():
    gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install -e '.[reasoning]'")
    from paceline.tasks.rewards.gym_verifier import verify

    entry = gym.create_dataset("gcd", seed=1, size=1)[0]
    dataset = gym.create_dataset("gcd")
    padded = f"it is {entry['answer']}, I think, but who knows for sure what it may be"
    paid = dataset.score_answer(padded, entry)
    assert 0 < paid < 0.1, "the oracle: the package itself pays a little for this"
    arguments = dict(extra={"entry": entry}, dataset="gcd", options="{}")
    assert verify(padded, threshold=0.1, **arguments) == 0.0
    assert verify(padded, threshold=0.0, **arguments) == paid
    assert verify(entry["answer"], threshold=0.1, **arguments) == 1.0
    assert verify(None, threshold=0.1, **arguments) == 0.0
