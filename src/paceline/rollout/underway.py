"""Groups that are being generated, sample by sample, and how they are saved and restored.

    NEW ──submitted──▶ RUNNING ──completion──▶ IN_TOOL ──reply──▶ NEW ... ──▶ DONE
     ▲                    │
     └── taken off ◀──────┘   with its tokens: noise depends on position, so a new request continues it

A sample that was taken off a backend (`park`) is continued by a request with the same seed whose prompt is
everything so far, on the same backend, after a restart or in another process. Its consumers see only the
joined parts.
"""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from paceline.records import parse, plain
from paceline.rollout.sampler import GroupIdentity
from paceline.tasks.base import Problem, Response
from paceline.tasks.dialogue import Dialogue
from paceline.tasks.rewards.scoring import GroupScoring
from paceline.types import (
    Completion,
    FinishReason,
    Group,
    Request,
    Sample,
    Score,
    Segment,
)


class Stage(StrEnum):
    """The stage of a sample."""

    NEW = "new"  # its next request has not been submitted
    RUNNING = "running"
    IN_TOOL = "in tool"
    DONE = "done"


@dataclass
class OpenSample:
    """One sample: its finished turns, and the tokens of the current turn so far."""

    index: int  # within the group
    dialogue: Dialogue
    turn: Request  # the current turn's original request
    stage: Stage = Stage.NEW
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    segments: tuple[Segment, ...] = ()

    @classmethod
    def of(cls, index: int, request: Request) -> "OpenSample":
        return cls(index, Dialogue(request), request)

    @property
    def id(self) -> str:
        return self.turn.id

    @property
    def length(self) -> int:
        """Response tokens so far, without those of a running request."""
        return len(self.dialogue.tokens) + len(self.tokens)

    def request(self) -> Request:
        if not self.tokens:
            return self.turn
        sampling = self.turn.sampling
        return replace(
            self.turn,
            prompt=self.turn.prompt + self.tokens,
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(self.tokens)),
            continues="",
        )

    def park(self, completion: Completion) -> None:
        """Keeps the tokens of an aborted request, to continue from them later.

        Stop strings are searched within one request's tokens, so tokens in which one may have begun are
        sampled again.
        """
        joined = self.join(completion)
        kept = len(joined.tokens)
        if self.turn.sampling.stop:
            kept = max(0, kept - 4 * max(len(stop.encode()) for stop in self.turn.sampling.stop) - 16)
        self.tokens = joined.tokens[:kept]
        self.logprobs = joined.logprobs[:kept]
        self.segments = tuple(replace(s, stop=min(s.stop, kept)) for s in joined.segments if s.start < kept)
        self.stage = Stage.NEW

    def join(self, completion: Completion) -> Completion:
        """Returns the current turn as one completion that ends with this one."""
        start = len(self.tokens)
        segments = [*self.segments]
        for segment in completion.segments:
            moved = replace(segment, start=segment.start + start, stop=segment.stop + start)
            last = segments[-1] if segments else None
            if last is not None and (last.weight_version, last.sampled) == (
                moved.weight_version,
                moved.sampled,
            ):
                moved = replace(moved, start=segments.pop().start)
            segments.append(moved)
        return replace(
            completion,
            request=self.turn,
            tokens=self.tokens + completion.tokens,
            logprobs=self.logprobs + completion.logprobs,
            segments=tuple(segments),
        )

    def add_turn(self, completion: Completion, text: str) -> None:
        self.dialogue.add_response(completion, text)
        self.tokens, self.logprobs, self.segments = (), (), ()

    def begin_turn(self, request: Request) -> None:
        self.turn = request
        self.stage = Stage.NEW

    def response(self) -> Response | None:
        """Returns what the rewards see of a finished sample; None where there is nothing to score."""
        dialogue = self.dialogue
        if dialogue.finish_reason in (FinishReason.REFUSED, FinishReason.ABORTED):
            return None
        last = dialogue.conversation[-1].text if dialogue.conversation else ""
        return Response(last, dialogue.finish_reason is FinishReason.LENGTH, dialogue.conversation)


@dataclass
class GroupUnderway:
    """The samples of one prompt from when their requests are made until a step learns from them."""

    identity: GroupIdentity
    position: int  # of its problem in the order
    problem: Problem
    born: int  # weight version at admission: none of its tokens is older
    scoring: GroupScoring
    samples: list[OpenSample]
    scores: list[Score] | None = field(default=None)

    @property
    def complete(self) -> bool:
        return all(sample.stage is Stage.DONE for sample in self.samples)

    def finish(self, sample: OpenSample) -> None:
        sample.stage = Stage.DONE
        self.scoring.add(sample.index, sample.response())

    def group(self) -> Group:
        """Waits for the rewards and returns the group that the learner takes."""
        if self.scores is None:
            self.scores = self.scoring.scores()
        return Group(
            self.problem.id,
            tuple(
                Sample(sample.dialogue.completion(), score)
                for sample, score in zip(self.samples, self.scores, strict=True)
            ),
        )


# What is kept of a sample beside its dialogue and the current turn.
SAMPLE = ("stage", "tokens", "logprobs", "segments")


def group_record(group: GroupUnderway) -> dict[str, Any]:
    """Returns a group as JSON; none of its samples may be running."""
    if group.complete:
        group.group()
    return {
        **plain(group.identity),
        "position": group.position,
        "born": group.born,
        "samples": [_sample_record(sample) for sample in group.samples],
        "scores": plain(group.scores),
    }


def read_identity(record: dict[str, Any]) -> GroupIdentity:
    return parse(GroupIdentity, {f.name: record[f.name] for f in fields(GroupIdentity)})


def restore_group(
    record: dict[str, Any],
    problem: Problem,
    requests: list[Request],
    scoring: GroupScoring,
) -> GroupUnderway:
    """Returns the group of a record; `requests` are those of its identity."""
    samples = [
        _restore_sample(index, entry, request)
        for index, (entry, request) in enumerate(zip(record["samples"], requests, strict=True))
    ]
    scores = None if record["scores"] is None else [parse(Score, score) for score in record["scores"]]
    group = GroupUnderway(
        read_identity(record), record["position"], problem, record["born"], scoring, samples, scores
    )
    for sample in samples:
        if sample.stage is Stage.DONE and scores is None:
            group.finish(sample)
    return group


def _sample_record(sample: OpenSample) -> dict[str, Any]:
    assert sample.stage is not Stage.RUNNING, "take it off the backend first"
    return {
        "prompt": sample.turn.prompt,
        "max_tokens": sample.turn.sampling.max_tokens,
        "continues": sample.turn.continues,
        "dialogue": plain(sample.dialogue, without=("request", "top_logprobs")),
        **{name: plain(getattr(sample, name)) for name in SAMPLE},
    }


def _restore_sample(index: int, record: dict[str, Any], request: Request) -> OpenSample:
    turn = replace(
        request,
        prompt=tuple(record["prompt"]),
        sampling=replace(request.sampling, max_tokens=record["max_tokens"]),
        continues=record["continues"],
    )
    dialogue = parse(Dialogue, record["dialogue"], request=request)
    own = {name: record[name] for name in SAMPLE}
    return parse(OpenSample, own, index=index, dialogue=dialogue, turn=turn)
