"""From problems to scored groups: a backend generates, the task's rewards score, its tool answers turns."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition
from typing import Any

from tokenizers import Tokenizer

from paceline.backend import Backend
from paceline.rollout.progress import RolloutProgress
from paceline.stats import RolloutStats
from paceline.tasks.base import Done, Observation, Problem, Response
from paceline.tasks.dialogue import Dialogue
from paceline.tasks.rewards.functions import Failed
from paceline.tasks.rewards.scoring import GroupScoring
from paceline.tasks.task import Task, Turns
from paceline.types import (
    Completion,
    FinishReason,
    Group,
    Purpose,
    Request,
    Sample,
    SamplingParams,
    request_seed,
)

logger = logging.getLogger(__name__)


class NothingSampled(ValueError):
    """Raised when the backend refused every request; the message quotes the first refusal."""


class SamplingStopped(Exception):
    """Raised when the caller stopped sampling; no request is outstanding."""


class GroupSampler:
    """Samples groups for problems on a backend and scores each sample as soon as it is complete.

    Where the task has turns, a response goes to the task's tool while the backend generates the others; when
    the tool has replied, the backend is paused briefly to submit the continuation.
    """

    def __init__(self, backend: Backend, task: Task, tokenizer: Tokenizer, run_seed: int) -> None:
        self.backend = backend
        self.task = task
        self.tokenizer = tokenizer
        self.run_seed = run_seed
        self.warned_of_refusals = False
        self.reward_wait_seconds = 0.0
        self.progress = RolloutProgress()

    def sample(
        self,
        problems: Sequence[Problem],
        purpose: Purpose,
        step: int,
        samples: int,
        sampling: SamplingParams,
        stopped: Callable[[], bool] | None = None,
    ) -> list[Group]:
        """Returns one scored group per problem, in their order, with `samples` samples each.

        To stop early, pause the backend and let `stopped` return True: this raises `SamplingStopped`. A task
        with turns always runs to the end.
        """
        requests = self._requests(problems, purpose, step, samples, sampling)
        groups = [self.task.scoring.open_group(problem, samples) for problem in problems]
        underway = {
            request.id: SampleUnderway(group, index, Dialogue(request))
            for group, siblings in zip(groups, requests, strict=True)
            for index, request in enumerate(siblings)
        }
        self.progress = RolloutProgress(total=len(underway))
        self.backend.submit([sample.dialogue.request for sample in underway.values()])
        if self.task.turns is None:
            for completion in self.backend.completions():
                self._add_response(underway, completion).finish()
            if stopped is not None and stopped():
                self._give_up(underway)
                raise SamplingStopped
        else:
            self._take_turns(self.task.turns, underway)
        self.report_refusals([sample.dialogue for sample in underway.values()])
        with self.waiting_for_rewards():
            scores = [group.scores() for group in groups]
        return [
            Group(
                group.problem.id,
                tuple(
                    Sample(underway[r.id].dialogue.completion(), s)
                    for r, s in zip(siblings, group_scores, strict=True)
                ),
            )
            for group, siblings, group_scores in zip(groups, requests, scores, strict=True)
        ]

    def _give_up(self, request_ids: Iterable[str]) -> None:
        self.backend.resume()
        self.backend.abort(request_ids)
        for _ in self.backend.completions():
            pass
        self.take_stats()

    def take_stats(self) -> RolloutStats:
        """Returns the backend's statistics since the last call, with the reward wait."""
        stats = self.backend.take_stats()
        stats.reward_wait_seconds = self.reward_wait_seconds
        self.reward_wait_seconds = 0.0
        return stats

    @contextmanager
    def waiting_for_rewards(self) -> Iterator[None]:
        """Records the time within as reward wait."""
        start = time.perf_counter()
        yield
        self.reward_wait_seconds += time.perf_counter() - start

    def report_refusals(self, dialogues: Sequence[Dialogue]) -> None:
        """Warns of the first refused requests and raises where all are refused.

        A refused request scores 0, which looks like a wrong answer.
        """
        refused = [dialogue for dialogue in dialogues if dialogue.finish_reason is FinishReason.REFUSED]
        if refused and len(refused) == len(dialogues):
            raise NothingSampled(
                f"all {len(refused)} requests of this step were refused, "
                f"the first because: {refused[0].error}; drop long prompts with task.max_prompt_tokens, "
                "lower rollout.max_tokens and eval.max_tokens, or raise rollout.kv_tokens"
            )
        if refused and not self.warned_of_refusals:
            self.warned_of_refusals = True
            logger.warning(
                "%d of %d requests were refused and score 0, the first because: %s. "
                "Further ones are only counted: rollout/refused",
                len(refused),
                len(dialogues),
                refused[0].error,
            )

    def _take_turns(self, turns: Turns, underway: dict[str, "SampleUnderway"]) -> None:
        replies = ToolReplies(self.backend)
        generating = len(underway)
        in_tool = 0
        while generating or in_tool:
            for completion in self.backend.completions():
                generating -= 1
                sample = self._add_response(underway, completion)
                if sample.dialogue.finish_reason is FinishReason.STOP:
                    in_tool += 1
                    turns.step(sample.group.problem, sample.dialogue.conversation).add_done_callback(
                        partial(replies.put, sample)
                    )
                else:
                    sample.finish()
            continuations = []
            if not generating and in_tool > 0:
                with self.waiting_for_rewards():
                    replies.wait()
            for sample, reply in replies.take():
                in_tool -= 1
                request = self._continuation(sample, reply)
                if request is None:
                    sample.finish()
                else:
                    continuations.append(request)
            if continuations:
                generating += len(continuations)
                self.backend.submit(continuations)
        # No request is running: this releases the caches held for turns that never came.
        self.backend.abort(underway)

    def _add_response(
        self, underway: dict[str, "SampleUnderway"], completion: Completion
    ) -> "SampleUnderway":
        self.progress.add(len(completion.tokens))
        sample = underway[completion.request.id]
        sample.dialogue.add_response(completion, self.tokenizer.decode(completion.tokens))
        return sample

    def _continuation(self, sample: "SampleUnderway", reply: Observation | Done | Failed) -> Request | None:
        if isinstance(reply, Failed):
            sample.group.note_failure(sample.index, "step", reply)
        if not isinstance(reply, Observation):
            return None
        tokens = self.task.prompts.encode_observation(reply, sample.dialogue.tokens[-1])
        return sample.dialogue.continue_with(tokens, self.tokenizer.decode(tokens))

    def _requests(
        self, problems: Sequence[Problem], purpose: Purpose, step: int, samples: int, sampling: SamplingParams
    ) -> list[list[Request]]:
        seen: Counter[str] = Counter()
        groups = []
        for number, problem in enumerate(problems):
            identity = GroupIdentity(purpose, step, number, seen[problem.id])
            seen[problem.id] += 1
            groups.append(self.requests_of(problem, identity, samples, sampling))
        return groups

    def requests_of(
        self, problem: Problem, identity: "GroupIdentity", samples: int, sampling: SamplingParams
    ) -> list[Request]:
        """Returns the requests of one group, a function of its identity and the run's seed."""
        turns = self.task.turns
        if turns is not None:
            sampling = replace(sampling, stop=(*sampling.stop, *turns.stop))
        prompt = self.task.prompts.encode(problem)
        purpose, step, occurrence = identity.purpose, identity.step, identity.occurrence
        return [
            Request(
                f"{identity.name}/{i}",
                prompt,
                request_seed(purpose, self.run_seed, step, problem.id, occurrence, i),
                sampling,
                identity.name,
                hold=turns is not None,
                purpose=purpose,
            )
            for i in range(samples)
        ]

    def close(self) -> None:
        self.task.close()


@dataclass(frozen=True)
class GroupIdentity:
    """What determines a group's seeds and name."""

    purpose: Purpose
    step: int  # in which it was submitted
    number: int  # among the groups of that step
    occurrence: int  # of its problem, among the groups of that step

    @property
    def name(self) -> str:
        """The group's name, a prefix of its requests' ids."""
        return f"{self.purpose}/{self.step}/{self.number}"


@dataclass(frozen=True)
class SampleUnderway:
    """A sample that is being generated, and the group that scores it."""

    group: GroupScoring
    index: int  # within the group
    dialogue: Dialogue

    def finish(self) -> None:
        dialogue = self.dialogue
        if dialogue.finish_reason in (FinishReason.REFUSED, FinishReason.ABORTED):
            self.group.add(self.index, None)
        else:
            last = dialogue.conversation[-1].text if dialogue.conversation else ""
            self.group.add(
                self.index,
                Response(last, dialogue.finish_reason is FinishReason.LENGTH, dialogue.conversation),
            )


class ToolReplies:
    """A queue of the tool's replies, from the threads that await them to the one that generates.

    A new reply pauses the backend, so that `completions` returns; taking the replies resumes it. Both happen
    under one lock: a late pause would stop the next use of the backend. While not `listening`, replies are
    only queued.
    """

    def __init__(self, backend: Backend, listening: bool = True) -> None:
        self.backend = backend
        self.listening = listening
        self.changed = Condition()
        self.replies: list[tuple[object, Observation | Done | Failed]] = []

    def put(self, sample: object, future: "Future[Observation | Done | Failed]") -> None:
        """Queues a finished call's reply and, while listening, pauses the backend."""
        with self.changed:
            self.replies.append((sample, future.result()))
            if self.listening:
                self.backend.pause()
            self.changed.notify()

    def listen(self, listening: bool) -> None:
        """Sets whether replies pause the backend from now on; resumes it."""
        with self.changed:
            self.listening = listening
            self.backend.resume()

    def wait(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.replies)

    def take(self) -> list[tuple[Any, Observation | Done | Failed]]:
        """Returns and removes the replies so far; resumes the backend."""
        with self.changed:
            self.backend.resume()
            replies, self.replies = self.replies, []
            return replies
