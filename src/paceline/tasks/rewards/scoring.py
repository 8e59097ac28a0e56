"""From the recipe's list of rewards to one `Score` per response.

    response ──▶ each reward (worker pool, event loop, own verifier) ──▶ weighted sum, components, failures

A reward that fails gets its `failed_score` and a component `failed/<name>/<reason>`, which metrics count; the
first failure of each kind is also logged.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from paceline.config import ConfigError, RewardConfig
from paceline.tasks.base import FAILED, Problem, Response
from paceline.tasks.rewards.coroutines import CoroutineReward, EventLoop
from paceline.tasks.rewards.functions import Failed, Reply, RewardResult, ScoringInput, Target, check_score
from paceline.tasks.rewards.pool import WorkerPool
from paceline.types import Score

logger = logging.getLogger(__name__)

# Starts one call of a reward.
Run = Callable[[Sequence[ScoringInput]], "Future[Reply]"]


@dataclass(frozen=True)
class Reward:
    """One entry of `task.rewards`, and how it is called."""

    config: RewardConfig
    run: Run
    require_end: bool  # a truncated response gets 0 without a call


class Scoring:
    """All rewards of a task, with the pool and the event loop that they run in."""

    def __init__(
        self, rewards: Sequence[Reward], pool: WorkerPool | None = None, loop: EventLoop | None = None
    ) -> None:
        self.rewards = list(rewards)
        self.pool = pool
        self.loop = loop
        self.reported: set[tuple[str, str]] = set()

    def open_group(self, problem: Problem, samples: int) -> "GroupScoring":
        return GroupScoring(self, problem, samples)

    def log_output(self, path: Path | None) -> None:
        """Sends the output of reward functions and tools to this file; None: to stderr."""
        if self.pool is None:
            return
        if path is None:
            self.pool.state.output.to_stderr()
        else:
            self.pool.state.output.to_log(path)

    def report(self, name: str, failed: Failed) -> None:
        if (name, failed.reason) not in self.reported:
            self.reported.add((name, failed.reason))
            logger.warning(
                "%s failed (%s): %s. Further failures of this kind are only counted: reward/%s%s/%s",
                name,
                failed.reason,
                # It may quote the response, which must not send control characters to the terminal.
                "".join(c if c.isprintable() else "?" for c in failed.message),
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
    """Scores the samples of one problem as they arrive; batched rewards are called once, for all of them."""

    def __init__(self, scoring: Scoring, problem: Problem, samples: int) -> None:
        self.scoring = scoring
        self.problem = problem
        self.responses: list[Response | None] = [None] * samples
        self.outstanding = samples
        self.failures: list[dict[str, float]] = [{} for _ in range(samples)]
        # Per reward and sample: the call that scores it, and the sample's place in that call.
        self.calls: list[dict[int, tuple[Future[Reply], int]]] = [{} for _ in scoring.rewards]

    def add(self, index: int, response: Response | None) -> None:
        """Starts the rewards of a sample; without a response none is called, and the sample scores 0."""
        self.responses[index] = response
        self.outstanding -= 1
        for reward, calls in zip(self.scoring.rewards, self.calls, strict=True):
            if not reward.config.batch:
                self._call(reward, calls, [index])
            elif self.outstanding == 0:
                self._call(reward, calls, range(len(self.responses)))

    def note_failure(self, index: int, name: str, failed: Failed) -> None:
        """Records a failure outside of the rewards, such as of the tool, for this sample."""
        self.failures[index][f"{FAILED}{name}/{failed.reason}"] = 1.0
        self.scoring.report(name, failed)

    @property
    def done(self) -> bool:
        return all(future.done() for calls in self.calls for future, _ in calls.values())

    def scores(self) -> list[Score]:
        """Waits for every reward and returns the scores in sample order."""
        return [self._score(index, response) for index, response in enumerate(self.responses)]

    def _call(
        self, reward: Reward, calls: dict[int, tuple["Future[Reply]", int]], indices: Sequence[int]
    ) -> None:
        scorable: dict[int, Response] = {}
        for index in indices:
            response = self.responses[index]
            if response is not None and not (reward.require_end and response.truncated):
                scorable[index] = response
        if scorable:
            future = reward.run([(self.problem, response) for response in scorable.values()])
            calls.update({index: (future, place) for place, index in enumerate(scorable)})

    def _score(self, index: int, response: Response | None) -> Score:
        components = dict(self.failures[index])
        if response is None:
            return Score(0.0, False, components)
        total = 0.0
        correct = False
        for number, (reward, calls) in enumerate(zip(self.scoring.rewards, self.calls, strict=True)):
            result = RewardResult(0.0, False)
            if index in calls:
                future, place = calls[index]
                reply = future.result()
                if isinstance(reply, Failed):
                    self.note_failure(index, reward.config.label, reply)
                    components |= self.failures[index]
                    result = RewardResult(reward.config.failed_score, False)
                else:
                    result = reply[place]
            total += reward.config.weight * result.score
            components |= result.components or {reward.config.label: result.score}
            if number == 0:  # the first reward decides what is correct; the others shape
                correct = result.correct
        return Score(total, correct, components)


def from_verifier(score: Callable[[Problem, str, bool], Score]) -> Run:
    """Returns a `Run` that calls a problem set's own verifier at once, in the caller's thread."""

    def run(inputs: Sequence[ScoringInput]) -> "Future[Reply]":
        future: Future[Reply] = Future()
        try:
            scores = [score(problem, response.text, response.truncated) for problem, response in inputs]
            future.set_result([RewardResult(check_score(s.reward), s.correct, s.components) for s in scores])
        except Exception as error:
            future.set_result(Failed("error", f"{type(error).__name__}: {error}"))
        return future

    return run


def from_pool(pool: WorkerPool, index: int) -> Run:
    return lambda inputs: pool.submit(index, list(inputs))


def from_event_loop(loop: EventLoop, target: Target, concurrency: int) -> Run:
    try:
        reward = CoroutineReward.load(target, concurrency)
    except ValueError as error:
        raise ConfigError(f"task.rewards: {error}") from None
    return lambda inputs: loop.submit(reward, inputs)
