"""Requests, completions, statistics and tensors as messages of `wire.py`, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch

from paceline.backend import WeightsNotFinite
from paceline.pacing.strategy import Decision, Strategy
from paceline.pacing.trace import TraceRow
from paceline.stats import DraftStats, PrecisionStats, RequestTrace, RolloutStats
from paceline.types import (
    Completion,
    FinishReason,
    Precision,
    Purpose,
    Request,
    Routing,
    SamplingParams,
    Segment,
)
from paceline.worker.process import WorkerFailed
from paceline.worker.readers import TransferInterrupted
from paceline.worker.wire import Message

# What statistics hold beside numbers and lists of them.
NESTED = ("drafts", "precision", "trace", "requests", "replicas")

# Each is some hundred bytes of a message's header, which is bounded (wire.py).
REQUESTS_PER_MESSAGE = 4096


def submit_message(requests: Sequence[Request]) -> Message:
    # Not `asdict`, which copies a prompt token by token.
    records = [
        {f.name: getattr(request, f.name) for f in fields(request) if f.name not in ("prompt", "sampling")}
        | {"sampling": asdict(request.sampling)}
        for request in requests
    ]
    return Message("submit", {"requests": records}, [np.array(r.prompt, dtype=np.int64) for r in requests])


def submit_messages(requests: Sequence[Request]) -> list[Message]:
    """Splits requests into `submit` messages within the connection's size limit."""
    return [
        submit_message(requests[start : start + REQUESTS_PER_MESSAGE])
        for start in range(0, len(requests), REQUESTS_PER_MESSAGE)
    ]


def read_requests(message: Message) -> list[Request]:
    requests = []
    for record, prompt in zip(message.fields["requests"], message.arrays, strict=True):
        sampling = record.pop("sampling")
        sampling |= {name: tuple(sampling[name]) for name in ("stop_token_ids", "stop")}
        purpose = Purpose(record.pop("purpose"))
        requests.append(
            Request(
                prompt=tuple(prompt.tolist()), sampling=SamplingParams(**sampling), purpose=purpose, **record
            )
        )
    return requests


def completion_message(completion: Completion) -> Message:
    """Encodes a completion without its request, which the client has."""
    routing = completion.routing
    record = {
        "id": completion.request.id,
        "finish_reason": completion.finish_reason,
        "segments": [asdict(segment) for segment in completion.segments],
        "error": completion.error,
        "top_logprobs": [list(top.items()) for top in completion.top_logprobs],
        "routing": None if routing is None else [routing.layers, routing.choices, routing.item_bytes],
    }
    arrays: list[np.ndarray] = [
        np.array(completion.tokens, dtype=np.int64),
        np.array(completion.logprobs, dtype=np.float64),
        np.frombuffer(routing.experts if routing is not None else b"", dtype=np.uint8),
    ]
    return Message("completion", record, arrays)


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


def read_completion(message: Message, request: Request) -> Completion:
    record = message.fields
    tokens, logprobs, experts = message.arrays
    return Completion(
        request,
        tuple(tokens.tolist()),
        tuple(logprobs.tolist()),
        FinishReason(record["finish_reason"]),
        tuple(Segment(**segment) for segment in record["segments"]),
        record["error"],
        tuple({int(token): value for token, value in top} for top in record["top_logprobs"]),
        None if record["routing"] is None else Routing(experts.tobytes(), *record["routing"]),
    )


def stats_record(stats: RolloutStats) -> dict[str, Any]:
    plain = {f.name: getattr(stats, f.name) for f in fields(stats) if f.name not in NESTED}
    rows = [
        asdict(row) | {"decision": asdict(row.decision) | {"strategy": str(row.decision.strategy)}}
        for row in stats.trace
    ]
    return plain | {
        "drafts": {name: asdict(drafts) for name, drafts in stats.drafts.items()},
        "precision": None if stats.precision is None else asdict(stats.precision),
        "trace": rows,
        "requests": [asdict(trace) for trace in stats.requests],
    }


def read_stats(record: dict[str, Any]) -> RolloutStats:
    nested = {name: record[name] for name in NESTED if name in record}
    stats = RolloutStats(**{name: value for name, value in record.items() if name not in nested})
    stats.drafts = {name: DraftStats(**drafts) for name, drafts in nested["drafts"].items()}
    if nested["precision"] is not None:
        precision = Precision(nested["precision"].pop("precision"))
        stats.precision = PrecisionStats(precision, **nested["precision"])
    for row in nested["trace"]:
        decision = row.pop("decision")
        strategy = Strategy.parse(decision.pop("strategy"))
        stats.trace.append(TraceRow(Decision(strategy, **decision), **row))
    for request in nested["requests"]:
        moments = tuple((stage, begin, slot) for stage, begin, slot in request.pop("moments"))
        reason = FinishReason(request.pop("reason"))
        stats.requests.append(RequestTrace(moments=moments, reason=reason, **request))
    return stats


def tensor_arrays(tensors: Mapping[str, torch.Tensor]) -> tuple[list[list[str]], list[np.ndarray]]:
    """Returns names and types of tensors, and their values as arrays; bfloat16 as its bits."""
    names, arrays = [], []
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        names.append([name, str(plain.dtype).removeprefix("torch.")])
        arrays.append((plain.view(torch.uint8) if plain.dtype == torch.bfloat16 else plain).numpy())
    return names, arrays


def read_tensors(names: Sequence[Sequence[str]], arrays: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Inverse of `tensor_arrays`."""
    tensors = {}
    for (name, dtype), array in zip(names, arrays, strict=True):
        tensor = torch.from_numpy(array)
        tensors[name] = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    return tensors


def publish_message(version: int, weights: Mapping[str, torch.Tensor]) -> Message:
    names, arrays = tensor_arrays(weights)
    return Message("publish_drafter", {"version": version, "tensors": names}, arrays)
