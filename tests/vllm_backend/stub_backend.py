"""A generator without a model, hosted in place of vLLM: texts are read from the weights it was given."""

import json

from paceline.backend import Backend
from paceline.stats import DraftStats, RolloutStats
from paceline.types import Precision
from paceline.vllm_backend.backend import VllmSpeculation


class StubEngine:
    def load_drafter(self, weights):
        dict(weights)


class StubBackend(Backend):
    precision = Precision.BASE
    asleep = False

    def __init__(self, accepted: int, lost: bool) -> None:
        self.accepted = accepted
        self.lost = lost
        self.weight = 0.0
        self.engine = StubEngine()
        self._speculation = VllmSpeculation(self)

    @property
    def speculation(self):
        return self._speculation

    def submit(self, requests):
        raise NotImplementedError

    def completions(self):
        return iter(())

    def abort(self, request_ids):
        raise NotImplementedError

    def update_weights(self, version, weights=None):
        tensors = dict(weights)
        if not self.lost:
            self.weight = float(tensors["weight"])

    def pause(self):
        pass

    resume = close = settle = pause

    def take_stats(self):
        drafts = DraftStats(100, 300, self.accepted, [self.accepted, 0, 0], 100)
        return RolloutStats(drafts={"eagle": drafts})

    def text_logprobs(self, tokens):
        return [-self.weight * token for token in tokens[1:]]


def make(settings: str) -> StubBackend:
    return StubBackend(**json.loads(settings))
