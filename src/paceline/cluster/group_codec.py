"""Groups and mismatches between the head and learner ranks, as messages of the worker's protocol."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from paceline.learning.mismatch import Mismatch, VersionMismatch
from paceline.types import Completion, Group, Request, Sample, Score
from paceline.worker.codec import completion_message, read_completion, read_requests, submit_message
from paceline.worker.wire import Message

ARRAYS = 3  # of a completion


def groups_message(kind: str, groups: Sequence[Group]) -> Message:
    """Encodes groups: prompts first, then every completion's arrays."""
    samples = [sample for group in groups for sample in group.samples]
    requests = submit_message([sample.completion.request for sample in samples])
    completions = [completion_message(sample.completion) for sample in samples]
    scores = [[s.score.reward, s.score.correct, s.score.components] for s in samples]
    fields = {
        "groups": [[group.prompt_id, len(group.samples)] for group in groups],
        "requests": requests.fields["requests"],
        "completions": [message.fields for message in completions],
        "scores": scores,
    }
    return Message(kind, fields, [*requests.arrays, *(a for message in completions for a in message.arrays)])


def read_groups(message: Message) -> list[Group]:
    fields = message.fields
    count = len(fields["requests"])
    prompts, arrays = message.arrays[:count], message.arrays[count:]
    requests = read_requests(Message("submit", {"requests": fields["requests"]}, prompts))
    samples = iter(
        Sample(_completion(record, arrays[ARRAYS * i : ARRAYS * (i + 1)], request), Score(*score))
        for i, (record, request, score) in enumerate(
            zip(fields["completions"], requests, fields["scores"], strict=True)
        )
    )
    return [Group(name, tuple(next(samples) for _ in range(size))) for name, size in fields["groups"]]


def _completion(record: dict[str, Any], arrays: Sequence[np.ndarray], request: Request) -> Completion:
    return read_completion(Message("completion", record, arrays), request)


def mismatch_message(mismatch: Mismatch) -> Message:
    by_version = [[version, asdict(sums)] for version, sums in mismatch.by_version.items()]
    return Message("mismatch", asdict(mismatch) | {"by_version": by_version})


def read_mismatch(message: Message) -> Mismatch:
    fields = dict(message.fields)
    by_version = {version: VersionMismatch(**sums) for version, sums in fields.pop("by_version")}
    return Mismatch(**fields, by_version=by_version)
