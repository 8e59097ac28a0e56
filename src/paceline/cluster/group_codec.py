"""Groups and examples between the head and learner ranks, as messages of the worker's protocol."""

from collections.abc import Sequence

import numpy as np

from paceline.learning.batch import TrainingSequence
from paceline.learning.supervised import supervised_sequence
from paceline.records import parse, plain
from paceline.types import Completion, Group, Request, Sample, Score
from paceline.worker.codec import completion_message, read_completion, read_requests, submit_message
from paceline.worker.wire import Message

ARRAYS = 3  # of a completion


def groups_message(kind: str, groups: Sequence[Group]) -> Message:
    """Encodes groups: prompts first, then every completion's arrays."""
    samples = [sample for group in groups for sample in group.samples]
    requests = submit_message([sample.completion.request for sample in samples])
    completions = [completion_message(sample.completion) for sample in samples]
    fields = {
        "groups": [[group.prompt_id, len(group.samples)] for group in groups],
        "requests": requests.fields["requests"],
        "completions": [message.fields for message in completions],
        "scores": [plain(sample.score) for sample in samples],
    }
    return Message(kind, fields, [*requests.arrays, *(a for message in completions for a in message.arrays)])


def read_groups(message: Message) -> list[Group]:
    fields = message.fields
    count = len(fields["requests"])
    requests = read_requests(Message("submit", fields, message.arrays[:count]))

    def completion(index: int, request: Request) -> Completion:
        arrays = message.arrays[count + ARRAYS * index : count + ARRAYS * (index + 1)]
        return read_completion(Message("completion", fields["completions"][index], arrays), request)

    samples = iter(
        Sample(completion(index, request), parse(Score, score))
        for index, (request, score) in enumerate(zip(requests, fields["scores"], strict=True))
    )
    return [Group(name, tuple(next(samples) for _ in range(size))) for name, size in fields["groups"]]


def sequences_message(kind: str, sequences: Sequence[TrainingSequence]) -> Message:
    """Encodes examples to imitate, end to end."""
    fields = {
        "lengths": [len(sequence.tokens) for sequence in sequences],
        "prompts": [sequence.prompt_length for sequence in sequences],
    }
    tokens = np.concatenate([np.asarray(sequence.tokens, np.int32) for sequence in sequences])
    masks = np.concatenate([np.asarray(sequence.loss_mask, np.bool_) for sequence in sequences])
    return Message(kind, fields, [tokens, masks])


def read_sequences(message: Message) -> list[TrainingSequence]:
    tokens, masks = message.arrays
    found = []
    token = mask = 0
    for length, prompt in zip(message.fields["lengths"], message.fields["prompts"], strict=True):
        answer = masks[mask : mask + length - prompt]
        learned = np.concatenate([np.zeros(prompt, np.bool_), answer])
        found.append(supervised_sequence(tokens[token : token + length], learned))
        token, mask = token + length, mask + length - prompt
    return found
