"""What tests of heads that learn during a run share: responses, drafters, a clock."""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.config import OnlineDrafterConfig
from paceline.drafting.eagle_folder import load_eagle, save_eagle
from paceline.drafting.online import OnlineDrafter
from paceline.engine.reference import ReferenceBackend
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.policy.states import TextStates
from paceline.types import Completion, Group, Request, Sample, SamplingParams, Score

SMALL = [
    "run.device=cpu",
    "run.threads=1",
    "task.train_problems=8",
    "task.eval_problems=4",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=48",
    "eval.max_tokens=48",
    "eval.every=0",
    "report.closing_pairs=0",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.tokens=3",
]


def groups_of(policy, count: int) -> list[Group]:
    """Responses that the policy itself wrote; it never changes, so they are generated once."""
    return [
        Group("sums", tuple(Sample(completion, Score(0.0, False)) for completion in written(policy, count)))
    ]


@functools.cache
def written(policy, count: int) -> list[Completion]:
    prompts = [(3 + i % 5, 9, 4, 8, 5, 7) for i in range(count)]
    requests = [
        Request(str(i), prompt, 1000 + i, SamplingParams(max_tokens=40, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    backend = ReferenceBackend(policy)
    backend.submit(requests)
    with torch.inference_mode():
        return list(backend.completions())


def online(policy, head, when: str = "always", **settings) -> OnlineDrafter:
    return OnlineDrafter(
        policy, head, OnlineDrafterConfig(when=when, **settings), seed=0, warn=lambda message: None
    )


def follow(
    drafter: OnlineDrafter, step: int, groups: list[Group], seconds: float = 0.0, recorded: bool = False
) -> dict[str, float]:
    drafter.expect(groups)
    states = {text.tokens: states_of(drafter, text) for text in drafter.texts.chosen} if recorded else {}
    return drafter.follow(step, states, seconds)


def states_of(drafter: OnlineDrafter, text) -> TextStates:
    hidden = drafter.policy.config.hidden_size
    layers = len(drafter.head.config.captured_layers)
    return TextStates(
        torch.zeros(len(text.loss_mask), hidden), (torch.zeros(len(text.tokens), hidden),) * layers
    )


def let_slices_take(seconds: float | Callable[[], float], drafter: OnlineDrafter, monkeypatch) -> list[float]:
    """Replaces the clock by one that only slices move on; returns what it shows."""
    clock = [0.0]

    def slow(function):
        def run(*arguments) -> None:
            function(*arguments)
            clock[0] += seconds() if callable(seconds) else seconds

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    drafter.trainer.accumulate_rows = slow(drafter.trainer.accumulate_rows)
    drafter.learning.compute_states = slow(drafter.learning.compute_states)
    return clock


class Recorded:
    """A generator that notes from when on states are wanted."""

    def __init__(self) -> None:
        self.wanted: list[bool] = []

    def record_states(self, max_bytes: int) -> None:
        assert max_bytes > 0

    def want_states(self, wanted: bool) -> None:
        self.wanted.append(wanted)

    def take_states(self) -> dict:
        return {}


def spoiled_head(folder: Path) -> Path:
    """Writes the built-in head with noise in its matrices: one that a few updates make better."""
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle("builtin-eagle", policy, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.6 * parameter.data.std() * noise
    save_eagle(head, folder)
    return folder
