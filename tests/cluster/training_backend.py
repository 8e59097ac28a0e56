"""The slow generator with a drafter that "learns": it counts what it has trained."""

import json
import time

import torch

from tests.worker.slow_backend import SlowBackend


class TrainingBackend(SlowBackend):
    """Its slices ask every millisecond whether to stop, and never run out of something to learn."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, "")
        self.tokens = 0.0
        self.updates = 0
        self.overlap = 0.0
        self.term = 0
        self.head = torch.zeros(2)
        self.pacer = None
        self.keeps_tokens = True
        self.trainable_head = None

    @property
    def slice_trainer(self):
        return self

    @property
    def speculation(self):
        return self

    def begin(self, term):
        if term != self.term:
            self.term, self.tokens, self.updates, self.overlap = term, 0.0, 0, 0.0

    def slice(self, should_stop):
        while not should_stop():
            time.sleep(0.001)
            self.tokens += 1.0
            self.updates += 1
        return True

    def weights(self):
        return {"head": self.head + 1}

    def take_head(self, weights):
        assert torch.equal(self.head, weights["head"])

    def note_weights(self, version):
        pass

    def publish_drafter(self, version, weights=None):
        self.head = weights["head"]


def make(settings: str) -> TrainingBackend:
    torch.set_num_threads(1)
    return TrainingBackend(**json.loads(settings))
