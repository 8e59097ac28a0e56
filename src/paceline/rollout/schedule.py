"""`schedule.jsonl`: which groups each step learned from and where each response crossed a weight update.

In the modes that do not wait, a step's groups depend on what finished first, and where a response crosses an
update on its length at that moment. Both are recorded, one line per step. `ScheduledRollouts` repeats them:
it generates every response under each version up to the recorded token, so the samples are the recorded ones,
bit for bit where a completion does not depend on its batch, in one process and independent of timing.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import ConfigError, RolloutConfig
from paceline.records import plain
from paceline.rollout.lag import lag_metrics, sampled
from paceline.rollout.sampler import GroupSampler
from paceline.rollout.sources import RolloutSource, training_params
from paceline.rollout.underway import (
    GroupUnderway,
    OpenSample,
    Stage,
    group_record,
    read_identity,
    restore_group,
)
from paceline.stats import RolloutStats
from paceline.tasks.order import ProblemOrder
from paceline.types import Completion, Group, Request

# The versions that sampled a response, and the token at which each one's part ends.
Course = list[tuple[int, int]]


class ScheduleMismatch(RuntimeError):
    """Raised when a response is not the recorded one: recipe, weights or kernels differ."""


def schedule_line(
    step: int, taken: Sequence[GroupUnderway], handed_out: int, metrics: dict[str, float]
) -> dict[str, Any]:
    """Returns what a repetition of a step needs; `handed_out` problems were submitted before it ended."""
    groups = [
        {
            **plain(group.identity),
            "position": group.position,
            "born": group.born,
            "samples": [_course(sample.dialogue.completion()) for sample in group.samples],
        }
        for group in taken
    ]
    return {"step": step, "handed_out": handed_out, "groups": groups, "metrics": metrics}


def append_schedule(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def cut_schedule(path: Path, step: int) -> None:
    """Drops the lines of later steps, and an incomplete last line."""
    if not path.is_file():
        return
    beside = path.with_suffix(".tmp")
    kept = [line for line in _lines(path) if line["step"] <= step]
    beside.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(beside, path)


def read_schedule(path: Path) -> dict[int, dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(
            f"--schedule {path}: there is no such file; runs in other modes than sync write one"
        )
    lines = {line["step"]: line for line in _lines(path)}
    if not lines:
        raise ConfigError(f"--schedule {path}: it holds no step")
    return lines


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and type(line.get("step")) is int:
            yield line


def _listed(counts: set[int]) -> str:
    return " or ".join(map(str, sorted(counts))) or "no"


def _course(completion: Completion) -> Course:
    return [(segment.weight_version, segment.stop) for segment in sampled(completion)]


class ScheduledRollouts(RolloutSource):
    """Repeats a recorded schedule, step by step."""

    def __init__(
        self, sampler: GroupSampler, order: ProblemOrder, rollout: RolloutConfig, path: Path
    ) -> None:
        super().__init__()
        self.sampler = sampler
        self.order = order
        self.samples = rollout.samples_per_prompt
        self.sampling = training_params(rollout)
        self.path = path
        self.lines = read_schedule(path)
        if sampler.task.turns is not None:
            raise ConfigError(
                f"--schedule {path}: tasks with turns are not repeated; their tools have a clock"
            )
        self.courses: dict[str, Course] = {}  # by request
        self.records: dict[str, dict[str, Any]] = {}  # by group
        for line in self.lines.values():
            self._read(line, rollout.prompts_per_step)
        self.groups: dict[str, GroupUnderway] = {}  # begun and not learned from

    def _read(self, line: dict[str, Any], prompts: int) -> None:
        """Parses a step's line; raises ConfigError where it is malformed, or of another recipe."""
        named = f"--schedule {self.path}: the line of step {line['step']}"
        try:
            line["metrics"].keys()
            for record in line["groups"]:
                name = read_identity(record).name
                self.records[name] = record | {"position": int(record["position"]), "born": record["born"]}
                for index, course in enumerate(record["samples"]):
                    self.courses[f"{name}/{index}"] = [(int(version), int(stop)) for version, stop in course]
            counts = {len(record["samples"]) for record in line["groups"]}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{named} is none of a schedule ({error!r}); use the schedule.jsonl of an earlier run"
            ) from None
        if len(line["groups"]) != prompts or counts != {self.samples}:
            raise ConfigError(
                f"{named} has {len(line['groups'])} groups of {_listed(counts)} samples, the recipe "
                f"rollout.prompts_per_step = {prompts} and rollout.samples_per_prompt = {self.samples}; "
                "repeat it with the recipe of its run"
            )

    def collect(self, step: int) -> list[Group]:
        version = step - 1
        line = self.lines.get(step)
        if line is None:
            raise ConfigError(f"--schedule {self.path}: it ends before step {step}; use run.steps={step - 1}")
        taken = [read_identity(record).name for record in line["groups"]]
        self._run_version(version, set(taken))
        groups = []
        for name in taken:
            own = self.groups.pop(name)
            for sample in own.samples:
                self._check(sample)
            with self.sampler.waiting_for_rewards():
                groups.append(own.group())
        # Groups that no step learned from are not repeated, but their problems count as handed out.
        self.order.position = max(self.order.position, line.get("handed_out", 0))
        keeps_cache = "rollout/stale_cache_tokens" in line["metrics"]
        self.metrics = line["metrics"] | lag_metrics(groups, version, keeps_cache)
        return groups

    def take_stats(self) -> RolloutStats:
        return self.sampler.take_stats()

    def state(self) -> str:
        return json.dumps([group_record(group) for group in self.groups.values()])

    def restore(self, state: str) -> None:
        saved = json.loads(state or "[]")
        if not isinstance(saved, list):  # of `StreamingRollouts`
            raise ConfigError(
                f"--schedule {self.path}: this run was not begun with a schedule and cannot continue with "
                "one; leave it out, or start another run"
            )
        for record in saved:
            group = self._open(record)
            self.groups[group.identity.name] = group

    def _run_version(self, version: int, due: set[str]) -> None:
        """Generates the part that these weights sampled, of every response that has one."""
        running: dict[str, tuple[GroupUnderway, OpenSample]] = {}
        requests = []
        for name, record in self.records.items():
            if name not in self.groups and (name in due or self._written_by(name, version)):
                fresh = record | {"samples": None, "scores": None}
                self.groups[name] = self._open(fresh)
        for name, group in self.groups.items():
            for sample in group.samples:
                request = self._part(sample, version, name in due)
                if request is not None:
                    running[request.id] = (group, sample)
                    requests.append(request)
        self.sampler.backend.submit(requests)
        for completion in self.sampler.backend.completions():
            self._receive(*running[completion.request.id], completion)

    def _part(self, sample: OpenSample, version: int, due: bool) -> Request | None:
        """Returns the request for the part of a sample that this version sampled; None if there is none."""
        course = self.courses[sample.id]
        stop = next((stop for written, stop in course if written == version), None)
        if sample.stage is Stage.DONE or (stop is None and not (due and not course)):
            return None
        request = sample.request()
        if stop is None or stop == course[-1][1]:
            return request
        limited = replace(request.sampling, max_tokens=stop - len(sample.tokens))
        return replace(request, sampling=limited)

    def _receive(self, group: GroupUnderway, sample: OpenSample, completion: Completion) -> None:
        course = self.courses[sample.id]
        length = len(sample.tokens) + len(completion.tokens)
        if course and length < course[-1][1]:
            sample.park(completion)
            return
        whole = sample.join(completion)
        sample.add_turn(whole, self.sampler.tokenizer.decode(whole.tokens))
        group.finish(sample)

    def _check(self, sample: OpenSample) -> None:
        course = _course(sample.dialogue.completion())
        if sample.stage is not Stage.DONE or course != self.courses[sample.id]:
            raise ScheduleMismatch(
                f"{sample.id} met new weights at {course}, the schedule says {self.courses[sample.id]}: "
                "repeat it with the same recipe and seed, on a machine that computes the same bits "
                "(on a GPU rollout.deterministic=true)"
            )

    def _written_by(self, name: str, version: int) -> bool:
        courses = [self.courses[f"{name}/{index}"] for index in range(self.samples)]
        return any(written == version for course in courses for written, _ in course)

    def _open(self, record: dict[str, Any]) -> GroupUnderway:
        identity = read_identity(record)
        position = record["position"]
        self.order.position = max(self.order.position, position + 1)
        problem = self.order.problem_at(position)
        requests = self.sampler.requests_of(problem, identity, self.samples, self.sampling)
        scoring = self.sampler.task.scoring.open_group(problem, self.samples)
        if record["samples"] is None:
            samples = [OpenSample.of(index, request) for index, request in enumerate(requests)]
            return GroupUnderway(identity, position, problem, record["born"], scoring, samples)
        return restore_group(record, problem, requests, scoring)
