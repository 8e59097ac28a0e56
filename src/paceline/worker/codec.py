"""Requests, completions, statistics and tensors as messages of `wire.py`, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.backend import WeightsNotFinite
from paceline.records import parse, plain
from paceline.types import Completion, Request, Routing
from paceline.worker.process import WorkerFailed
from paceline.worker.readers import TransferInterrupted
from paceline.worker.wire import Message

# Each is some hundred bytes of a message's header, which is bounded (wire.py).
REQUESTS_PER_MESSAGE = 4096

# Fields of a completion that travel as arrays, or not at all.
NOT_PLAIN = ("request", "tokens", "logprobs", "routing")


def submit_message(requests: Sequence[Request]) -> Message:
    records = [plain(request, without=("prompt",)) for request in requests]
    return Message("submit", {"requests": records}, [np.array(r.prompt, dtype=np.int64) for r in requests])


def submit_messages(requests: Sequence[Request]) -> list[Message]:
    """Splits requests into `submit` messages within the connection's size limit."""
    return [
        submit_message(requests[start : start + REQUESTS_PER_MESSAGE])
        for start in range(0, len(requests), REQUESTS_PER_MESSAGE)
    ]


def read_requests(message: Message) -> list[Request]:
    return [
        parse(Request, record, prompt=tuple(prompt.tolist()))
        for record, prompt in zip(message.fields["requests"], message.arrays, strict=True)
    ]


def completion_message(completion: Completion) -> Message:
    """Encodes a completion without its request, which the client has."""
    routing = completion.routing
    fields = {
        "id": completion.request.id,
        "completion": plain(completion, NOT_PLAIN),
        "routing": None if routing is None else plain(routing, ("experts",)),
    }
    arrays: list[np.ndarray] = [
        np.array(completion.tokens, dtype=np.int64),
        np.array(completion.logprobs, dtype=np.float64),
        np.frombuffer(routing.experts if routing is not None else b"", dtype=np.uint8),
    ]
    return Message("completion", fields, arrays)


def read_completion(message: Message, request: Request) -> Completion:
    routing = message.fields["routing"]
    tokens, logprobs, experts = message.arrays
    return parse(
        Completion,
        message.fields["completion"],
        request=request,
        tokens=tuple(tokens.tolist()),
        logprobs=tuple(logprobs.tolist()),
        routing=None if routing is None else parse(Routing, routing, experts=experts.tobytes()),
    )


def read_answer(answer: Message) -> Message:
    """Returns an answer, or raises the error that the worker reports."""
    problems = {
        "not_finite": WeightsNotFinite,
        "interrupted": TransferInterrupted,
        "refused": WorkerFailed,
    }
    if answer.kind in problems:
        raise problems[answer.kind](answer.fields["problem"])
    return answer


def tensors_message(kind: str, tensors: Mapping[str, torch.Tensor], **plain: Any) -> Message:
    """Returns a message with tensors, bfloat16 as its bits, beside plain fields."""
    names, arrays = [], []
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        names.append([name, str(own.dtype).removeprefix("torch.")])
        arrays.append((own.view(torch.uint8) if own.dtype == torch.bfloat16 else own).numpy())
    return Message(kind, {"tensors": names} | plain, arrays)


def tensors_of(message: Message) -> dict[str, torch.Tensor]:
    tensors = {}
    for (name, dtype), array in zip(message.fields["tensors"], message.arrays, strict=True):
        tensor = torch.from_numpy(array)
        tensors[name] = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    return tensors
