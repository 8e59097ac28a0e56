"""What is certified: a backend that can be opened plain and with speculation, and what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.backends.base import Backend
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Request


@dataclass
class Opened:
    """A backend that runs one way. `step_starts` fills where the backend says where its steps began: by request, absolute positions."""

    backend: Backend
    step_starts: dict[str, list[int]] = field(default_factory=dict)

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the requests' order; one that was refused is an error."""
        self.backend.submit(requests)
        with torch.inference_mode():
            done = {completion.request.id: completion for completion in self.backend.completions()}
        completions = [done[request.id] for request in requests]
        for completion in completions:
            if completion.error:
                raise ValueError(f"the backend refused a request: {completion.error}")
        return completions


class Subject(Protocol):
    name: str
    policy: Decoder  # in the backend's own precision: what a learner would run
    exact_policy: Decoder  # the same weights in the widest type that is worth running
    same_in_any_batch: bool  # bit for bit, promised of plain decoding
    same_with_any_drafter: bool  # bit for bit, promised of speculation
    tokens: int  # proposed per step

    def open(self, tokens: int, max_running: int) -> Opened:
        """`tokens` proposed per step; 0: without speculation."""
