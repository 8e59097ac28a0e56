"""Extracts the answer from a response, by `task.extract`."""

import re

# A line such as `Answer: 42` or `**Answer:** 42`.
ANSWER_LINE = r"(?im)^[ \t*]*answer[ \t*]*:[ \t*]*(.*?)[ \t*]*$"

# The named ways of `task.extract`; anything else is a regular expression.
NAMED = ("whole", "answer-line")


def extract(response: str, how: str) -> str | None:
    """Returns the last match, because policies write drafts first; None where there is no answer."""
    if how == "whole":
        return response.strip()
    if how == "answer-line":
        lines = response.strip().splitlines()
        found = re.match(ANSWER_LINE, lines[-1]) if lines else None
        return found.group(1) if found else None
    last = None
    for last in re.finditer(how, response):  # noqa: B007 - the last one is wanted
        pass
    return None if last is None or last.group(1) is None else last.group(1).strip()
