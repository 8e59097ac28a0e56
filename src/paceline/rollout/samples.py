"""Groups of samples as JSON lines: the files of `samples/`, `rollout --save` and `train --replay`."""

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.files import replace_file
from paceline.records import parse, plain
from paceline.types import Completion, Group, Sample, Score

COMPLETION = tuple(f.name for f in fields(Completion) if f.name != "top_logprobs")
SCORE = tuple(f.name for f in fields(Score))


def write_groups(path: Path, groups: Iterable[Group], tokenizer: Tokenizer) -> None:
    """Writes one line per group, with the responses' text for human readers; replaces the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(_group_record(group, tokenizer)) + "\n" for group in groups))


def read_groups(path: Path) -> list[Group]:
    """Reads what `write_groups` wrote; raises ValueError with the line that is not a group."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None
    groups = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            groups.append(_parse_group(json.loads(line)))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number} is not a saved group: {error!r}") from None
    if not groups:
        raise ValueError(f"{path} holds no group")
    return groups


def _group_record(group: Group, tokenizer: Tokenizer) -> dict[str, Any]:
    prompt = group.samples[0].completion.request.prompt
    samples = [
        {
            "text": tokenizer.decode(sample.completion.tokens, skip_special_tokens=False),
            **plain(sample.score),
            **plain(sample.completion, without=("top_logprobs",)),
        }
        for sample in group.samples
    ]
    return {
        "prompt_id": group.prompt_id,
        "prompt": tokenizer.decode(prompt, skip_special_tokens=False),
        "samples": samples,
    }


def _parse_group(record: dict[str, Any]) -> Group:
    samples = []
    for entry in record["samples"]:
        completion = parse(Completion, {name: entry[name] for name in COMPLETION if name in entry})
        _check(completion)
        score = parse(Score, {name: entry[name] for name in SCORE})
        if not math.isfinite(score.reward):
            raise ValueError(f"the reward of {completion.request.id} is {score.reward}")
        samples.append(Sample(completion, score))
    if not samples:
        raise ValueError("it has no samples")
    return Group(record["prompt_id"], tuple(samples))


def _check(completion: Completion) -> None:
    name, tokens, logprobs = completion.request.id, completion.tokens, completion.logprobs
    if not all(type(token) is int and token >= 0 for token in (*completion.request.prompt, *tokens)):
        raise ValueError(f"{name} has a token that is no id")
    if tokens and not completion.request.prompt:
        raise ValueError(f"{name} has no prompt")
    if not all(type(logprob) in (int, float) for logprob in logprobs):
        raise ValueError(f"{name} has a logprob that is no number")
    if len(tokens) != len(logprobs):
        raise ValueError(f"{name} has {len(tokens)} tokens and {len(logprobs)} logprobs")
    for segment in completion.segments:
        if not 0 <= segment.start <= segment.stop <= len(tokens):
            raise ValueError(
                f"{name} has a segment up to {segment.stop}, from {segment.start}, and {len(tokens)} tokens"
            )
