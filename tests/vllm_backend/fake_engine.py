"""Stands in for the adapter: every request writes the tokens that its seed names, some per step."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.types import Request
from paceline.vllm_backend.progress import Progress, RequestRefused, StepStats


@dataclass
class FakeEngine:
    """Writes `per_step` tokens of every request at each step; token i of seed s is 10 * s + i."""

    per_step: int = 2
    accepted: int = 1
    running: dict[str, tuple[Request, int]] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)
    ahead: int = 0  # steps that it has begun and not returned

    def settle(self) -> Iterator[tuple[list[Progress], StepStats | None]]:
        while self.ahead:
            self.ahead -= 1
            yield self.step()

    def add(self, request: Request) -> None:
        if request.sampling.min_p:
            raise RequestRefused("min_p is not for speculators")
        self.running[request.id] = request, 0

    def add_text(self, name: str, tokens: list[int]) -> None:
        self.texts[name] = list(tokens)

    def abort(self, ids: list[str]) -> None:
        for name in ids:
            del self.running[name]

    def load_policy(self, weights: object) -> None:
        self.loads.append("policy")

    def load_drafter(self, weights: object) -> None:
        self.loads.append("drafter")

    def sleep(self) -> None:
        self.loads.append("sleep")

    def wake(self) -> None:
        self.loads.append("wake")

    def close(self) -> None:
        self.running.clear()

    def step(self) -> tuple[list[Progress], StepStats | None]:
        progress = []
        for name, (request, done) in list(self.running.items()):
            count = min(self.per_step, request.sampling.max_tokens - done)
            tokens = [10 * request.seed + i for i in range(done, done + count)]
            ended = done + count == request.sampling.max_tokens
            progress.append(Progress(name, tokens, [-1.0] * count, [], "length" if ended else ""))
            self.running[name] = request, done + count
            if ended:
                del self.running[name]
        for name, tokens in self.texts.items():
            progress.append(Progress(name, [1], [], [], "length", [-float(token) for token in tokens[1:]]))
        self.texts.clear()
        drafts = len(progress)
        return progress, StepStats(0.5, drafts, 3 * drafts, [self.accepted * drafts, 0, 0], prompt_tokens=4)
