"""The slow generator with a drafter that "learns": it counts what it has trained."""

import json
import time
from pathlib import Path

import torch

from tests.worker.slow_backend import SlowBackend


class TrainingBackend(SlowBackend):
    """Its slices ask every millisecond whether to stop, and never run out of something to learn."""

    def __init__(self, seconds: float, notes: str) -> None:
        super().__init__(seconds, "")
        self.notes = Path(notes)
        self.count = 0
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
        self.count = 0

    def slice(self, should_stop):
        while not should_stop():
            time.sleep(0.001)
            self.count += 1
        return True

    def result(self):
        return {"head": self.head + 1}, float(self.count)

    def submit(self, requests):
        super().submit(requests)

    def publish_drafter(self, version, weights=None):
        self.head = weights["head"]
        with self.notes.open("a") as file:
            file.write(json.dumps({"version": version, "head": self.head.tolist()}) + "\n")


def make(settings: str) -> TrainingBackend:
    torch.set_num_threads(1)
    return TrainingBackend(**json.loads(settings))
