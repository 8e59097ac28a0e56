"""Mathematical equality by Hugging Face's math-verify (optional extra `math`).

A module of its own, so that a worker imports the package when it starts and not within the first call's time
limit.
"""

from math_verify import parse, verify


def math_verify(extracted: str | None, answer: str) -> float:
    r"""Scores 1 where both are mathematically equal: `\frac{1}{2}` is `0.5`, and `\boxed{}` is understood.

    Bare LaTeX is tried as if it stood between dollar signs.
    """
    if extracted is None:
        return 0.0
    # The package's own time limits only slow things down: the worker is killed at the reward's limit.
    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    given = parse(extracted, parsing_timeout=None) or parse(f"${extracted}$", parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))
