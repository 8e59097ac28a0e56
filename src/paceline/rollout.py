"""From problems to scored groups: where a step's samples come from.

`LiveRollouts` asks a backend and scores completions as they arrive; `SavedRollouts` reads what an earlier run wrote. The
loop cannot tell them apart.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from paceline.backends.base import Backend, RolloutStats
from paceline.report.samples import read_groups
from paceline.tasks.base import Problem, Task
from paceline.tasks.order import ProblemOrder
from paceline.types import Completion, FinishReason, Group, Purpose, Request, Sample, SamplingParams, Score, request_seed


class RolloutSource(Protocol):
    def collect(self, step: int) -> list[Group]:
        """The groups that step `step` learns from, in prompt order."""

    def take_stats(self) -> RolloutStats: ...


class LiveRollouts:
    def __init__(self, sampler: "GroupSampler", order: ProblemOrder, prompts: int, samples: int, sampling: SamplingParams) -> None:
        self.sampler = sampler
        self.order = order
        self.prompts = prompts
        self.samples = samples
        self.sampling = sampling

    def collect(self, step: int) -> list[Group]:
        problems = self.order.take(self.prompts)
        return self.sampler.sample(problems, Purpose.TRAIN, step, self.samples, self.sampling)

    def take_stats(self) -> RolloutStats:
        return self.sampler.backend.take_stats()


class SavedRollouts:
    """Replays `paceline rollout --save`: step n learns from the n-th saved file, over and over if there are fewer."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("step_*.jsonl"))
        if not self.files:
            raise FileNotFoundError(f"{folder} holds no step_*.jsonl; make some with `paceline rollout --save {folder}`")

    def collect(self, step: int) -> list[Group]:
        return read_groups(self.files[(step - 1) % len(self.files)])

    def take_stats(self) -> RolloutStats:
        return RolloutStats()


class GroupSampler:
    """Samples groups for problems on a backend and scores them with a task, each completion as soon as it is there."""

    def __init__(self, backend: Backend, task: Task, tokenizer: Tokenizer, run_seed: int) -> None:
        self.backend = backend
        self.task = task
        self.tokenizer = tokenizer
        self.run_seed = run_seed
        self.scoring = ThreadPoolExecutor(max_workers=4, thread_name_prefix="reward")

    def sample(self, problems: Sequence[Problem], purpose: Purpose, step: int, samples: int, sampling: SamplingParams) -> list[Group]:
        requests = self._requests(problems, purpose, step, samples, sampling)
        problem_of = {request.id: problem for problem, group in zip(problems, requests, strict=True) for request in group}
        completed: dict[str, tuple[Completion, Future[Score]]] = {}
        self.backend.submit([request for group in requests for request in group])
        for completion in self.backend.completions():
            future = self.scoring.submit(self._score, problem_of[completion.request.id], completion)
            completed[completion.request.id] = completion, future
        return [
            Group(problem.id, tuple(Sample(completed[r.id][0], completed[r.id][1].result()) for r in group))
            for problem, group in zip(problems, requests, strict=True)
        ]

    def _requests(
        self, problems: Sequence[Problem], purpose: Purpose, step: int, samples: int, sampling: SamplingParams
    ) -> list[list[Request]]:
        seen: Counter[str] = Counter()
        groups = []
        for number, problem in enumerate(problems):
            prompt = tuple(self.tokenizer.encode(problem.prompt).ids)
            occurrence = seen[problem.id]
            seen[problem.id] += 1
            name = f"{purpose}/{step}/{number}"
            seeds = [request_seed(purpose, self.run_seed, step, problem.id, occurrence, i) for i in range(samples)]
            groups.append([Request(f"{name}/{i}", prompt, seed, sampling, group=name) for i, seed in enumerate(seeds)])
        return groups

    def _score(self, problem: Problem, completion: Completion) -> Score:
        if completion.finish_reason in (FinishReason.REFUSED, FinishReason.ABORTED):
            return Score(reward=0.0, correct=False)
        return self.task.score(problem, self.tokenizer.decode(completion.tokens), completion.truncated)

    def close(self) -> None:
        self.scoring.shutdown(wait=False, cancel_futures=True)
