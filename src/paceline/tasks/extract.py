"""Where in a response its answer is."""

import re

ANSWER_LINE = r"(?im)^[ \t*]*answer[ \t*]*:[ \t*]*(.*?)[ \t*]*$"  # also **Answer:** 42
NAMED = ("whole", "answer-line")  # anything else is a regular expression


def extract(response: str, how: str) -> str | None:
    """The last match, because policies write drafts first; None where there is no answer."""
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
