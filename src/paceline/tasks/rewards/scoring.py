"""From the recipe's list of rewards to one `Score` per response.

    response ──▶ each reward: worker pool, event loop, or the task's own verdict ──▶ weighted sum, components, failures

A reward that fails gets its `failed_score` and a component `failed/<name>/<reason>`, from which metrics
count; the first failure of a kind is also said aloud.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from paceline.config import ConfigError, RewardConfig
from paceline.tasks.base import FAILED, Problem, Response
from paceline.tasks.rewards.coroutines import CoroutineReward, EventLoop
from paceline.tasks.rewards.functions import Asked, Failed, Paid, Reply, Target
from paceline.tasks.rewards.pool import WorkerPool
from paceline.types import Score

logger = logging.getLogger(__name__)
Run = Callable[[Sequence[Asked]], "Future[Reply]"]


@dataclass(frozen=True)
class Reward:
    config: RewardConfig
    run: Run
    require_end: bool  # a truncated response gets 0 without a call


class Scoring:
    """All rewards of a task."""

    def __init__(
        self, rewards: Sequence[Reward], pool: WorkerPool | None = None, loop: EventLoop | None = None
    ) -> None:
        self.rewards = list(rewards)
        self.pool = pool
        self.loop = loop
        self.reported: set[tuple[str, str]] = set()

    def open_group(self, problem: Problem, samples: int) -> "GroupScoring":
        return GroupScoring(self, problem, samples)

    def report(self, name: str, failed: Failed) -> None:
        if (name, failed.reason) not in self.reported:
            self.reported.add((name, failed.reason))
            logger.warning(
                "%s failed (%s): %s. Further failures of this kind are only counted: reward/%s%s/%s",
                name,
                failed.reason,
                failed.message,
                FAILED,
                name,
                failed.reason,
            )

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        if self.loop is not None:
            self.loop.close()


class GroupScoring:
    """Scores the samples of one problem as they arrive; batched rewards are called once, when the group is
    complete.
    """

    def __init__(self, scoring: Scoring, problem: Problem, samples: int) -> None:
        self.scoring = scoring
        self.problem = problem
        self.responses: list[Response | None] = [None] * samples
        self.outstanding = samples
        self.failures: list[dict[str, float]] = [{} for _ in range(samples)]
        # Per reward and sample: the call that will tell, and the sample's place in it.
        self.calls: list[dict[int, tuple[Future[Reply], int]]] = [{} for _ in scoring.rewards]

    def add(self, index: int, response: Response | None) -> None:
        """None: there is no response to score, and the sample gets 0."""
        self.responses[index] = response
        self.outstanding -= 1
        for reward, calls in zip(self.scoring.rewards, self.calls, strict=True):
            if not reward.config.batch:
                self._call(reward, calls, [index])
            elif self.outstanding == 0:
                self._call(reward, calls, range(len(self.responses)))

    def note_failure(self, index: int, name: str, failed: Failed) -> None:
        """Something other than a reward failed on the way to this sample."""
        self.failures[index][f"{FAILED}{name}/{failed.reason}"] = 1.0
        self.scoring.report(name, failed)

    def scores(self) -> list[Score]:
        """Waits for every reward."""
        return [self._score(index, response) for index, response in enumerate(self.responses)]

    def _call(
        self, reward: Reward, calls: dict[int, tuple["Future[Reply]", int]], indices: Sequence[int]
    ) -> None:
        asked = {
            i: self.responses[i]
            for i in indices
            if self.responses[i] is not None and not (reward.require_end and self.responses[i].truncated)
        }
        if asked:
            future = reward.run([(self.problem, response) for response in asked.values()])
            calls.update({index: (future, place) for place, index in enumerate(asked)})

    def _score(self, index: int, response: Response | None) -> Score:
        total, correct, components = 0.0, False, dict(self.failures[index])
        if response is None:
            return Score(0.0, False, components)
        for number, (reward, calls) in enumerate(zip(self.scoring.rewards, self.calls, strict=True)):
            paid = Paid(0.0, False)
            if index in calls:
                future, place = calls[index]
                reply = future.result()
                if isinstance(reply, Failed):
                    self.note_failure(index, reward.config.label, reply)
                    components |= self.failures[index]
                    paid = Paid(reward.config.failed_score, False)
                else:
                    paid = reply[place]
            total += reward.config.weight * paid.score
            components |= paid.components or {reward.config.label: paid.score}
            if number == 0:  # the first reward says what is correct; the others shape
                correct = paid.correct
        return Score(total, correct, components)


def own_verdict(score: Callable[[Problem, str, bool], Score]) -> Run:
    """A problem set's own `score`, called on the spot."""

    def run(asked: Sequence[Asked]) -> "Future[Reply]":
        future: Future[Reply] = Future()
        try:
            scores = [score(problem, response.text, response.truncated) for problem, response in asked]
            future.set_result([Paid(s.reward, s.correct, s.components) for s in scores])
        except Exception as error:
            future.set_result(Failed("error", f"{type(error).__name__}: {error}"))
        return future

    return run


def from_pool(pool: WorkerPool, index: int) -> Run:
    return lambda asked: pool.submit(index, list(asked))


def from_event_loop(loop: EventLoop, target: Target, concurrency: int) -> Run:
    try:
        reward = CoroutineReward.load(target, concurrency)
    except ValueError as error:
        raise ConfigError(f"task.rewards: {error}") from None
    return lambda asked: loop.submit(reward, asked)
