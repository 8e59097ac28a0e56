"""Sample responses, read from files that may hold anything, and bounded."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.report.run_directory import RunDirectory

# Characters of a prompt or response that a page shows.
MOST_CHARACTERS = 3000

# Bytes of a line of samples that are still read: a longer one is not ours.
LONGEST_LINE = 32_000_000

# Responses of one prompt, and prompts of one step, that a page shows.
MOST_RESPONSES = 8
MOST_GROUPS = 4

# Characters of samples that one report carries, over all its steps.
REPORT_CHARACTERS = 2_500_000


def sample_steps(directory: RunDirectory) -> list[int]:
    found = directory.samples_path.glob("step_[0-9]*.jsonl")
    return sorted(int(file.stem.removeprefix("step_")) for file in found if file.stem[5:].isdigit())


def read_samples(directory: RunDirectory, step: int) -> list[dict[str, Any]]:
    """Returns the groups of one step, with texts cut; lines that are no groups are left out."""
    path = directory.samples_path / f"step_{step:06d}.jsonl"
    groups = (_group(step, record) for record in _records(path))
    return [group for group, _ in zip((g for g in groups if g is not None), range(MOST_GROUPS), strict=False)]


def report_samples(directory: RunDirectory, most_steps: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns steps, evenly spaced with the last one, and their groups, as many as a report can carry."""
    groups: list[dict[str, Any]] = []
    steps: list[int] = []
    left = REPORT_CHARACTERS
    for step in reversed(spread(sample_steps(directory), most_steps)):
        of_step = read_samples(directory, step)
        left -= sum(len(g["prompt"]) + sum(len(r["text"]) for r in g["responses"]) for g in of_step)
        if left < 0 and steps:
            break
        steps.append(step)
        groups += of_step
    return sorted(steps), sorted(groups, key=lambda group: group["step"])


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` of the steps, evenly spaced, first and last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def cut(text: object, most: int = MOST_CHARACTERS) -> tuple[str, int]:
    """Returns a text, cut at `most` characters, and its whole length where it was cut, else 0."""
    text = str(text)
    return (text, 0) if len(text) <= most else (text[:most], len(text))


def _records(path: Path) -> Iterator[Any]:
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                continue


def _group(step: int, record: Any) -> dict[str, Any] | None:
    try:
        prompt, _ = cut(record["prompt"])
        responses = [_response(sample) for sample in record["samples"][:MOST_RESPONSES]]
        return {
            "step": step,
            "id": cut(record["prompt_id"], 200)[0],
            "prompt": prompt,
            "responses": responses,
        }
    except (KeyError, TypeError, ValueError):
        return None


def _response(sample: dict[str, Any]) -> dict[str, Any]:
    text, whole = cut(sample["text"])
    components = {cut(k, 100)[0]: _number(v) for k, v in list(dict(sample["components"]).items())[:20]}
    return {
        "text": text,
        "cut": whole,
        "reward": _number(sample["reward"]),
        "correct": bool(sample["correct"]),
        "tokens": len(sample["tokens"]),
        "finish": cut(sample["finish_reason"], 40)[0],
        "components": components,
    }


def _number(value: Any) -> float | None:
    number = float(value)
    return round(number, 6) if number - number == 0 else None  # neither infinite nor NaN
