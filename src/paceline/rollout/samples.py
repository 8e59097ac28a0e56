"""Groups of samples as JSON lines: the files of `samples/`, `rollout --save` and `train --replay`."""

import base64
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.files import replace_file
from paceline.types import (
    Completion,
    FinishReason,
    Group,
    Purpose,
    Request,
    Routing,
    Sample,
    SamplingParams,
    Score,
    Segment,
)


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
            "reward": sample.score.reward,
            "correct": sample.score.correct,
            "components": sample.score.components,
            "finish_reason": sample.completion.finish_reason,
            "tokens": sample.completion.tokens,
            "logprobs": sample.completion.logprobs,
            "segments": [asdict(segment) for segment in sample.completion.segments],
            "error": sample.completion.error,
            "request": asdict(sample.completion.request),
            "routing": routing_record(sample.completion.routing),
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
        sampling = entry["request"].pop("sampling")
        sampling |= {name: tuple(sampling[name]) for name in ("stop_token_ids", "stop")}
        prompt = tuple(entry["request"].pop("prompt"))
        purpose = Purpose(entry["request"].pop("purpose", Purpose.TRAIN))
        request = Request(
            prompt=prompt, sampling=SamplingParams(**sampling), purpose=purpose, **entry["request"]
        )
        segments = tuple(Segment(**segment) for segment in entry["segments"])
        completion = Completion(
            request,
            tuple(entry["tokens"]),
            tuple(entry["logprobs"]),
            FinishReason(entry["finish_reason"]),
            segments,
            entry["error"],
            routing=parse_routing(entry.get("routing")),
        )
        _check(completion)
        if not math.isfinite(entry["reward"]):
            raise ValueError(f"the reward of {request.id} is {entry['reward']}")
        samples.append(Sample(completion, Score(entry["reward"], entry["correct"], entry["components"])))
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


def routing_record(routing: Routing | None) -> dict[str, Any] | None:
    if routing is None:
        return None
    return asdict(routing) | {"experts": base64.b64encode(routing.experts).decode()}


def parse_routing(record: dict[str, Any] | None) -> Routing | None:
    return None if record is None else Routing(**record | {"experts": base64.b64decode(record["experts"])})
