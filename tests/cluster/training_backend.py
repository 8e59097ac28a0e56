"""The slow generator with a drafter that "learns": it counts what it has trained."""

import json
import os
import time
from pathlib import Path

import torch

from tests.worker.slow_backend import SlowBackend


class TrainingBackend(SlowBackend):
    """Its slices ask every millisecond whether to stop, and never run out of something to learn.

    With `die_training`, the file of that name makes who trains next end its process, once. The first of those
    with `no_room`, which makes that file, cannot train. Who begins to train leaves a file `trained` beside
    its notes.
    """

    def __init__(self, seconds: float, notes: str, die_training: str = "", no_room: str = "") -> None:
        super().__init__(seconds, "")
        self.trains = not no_room or Path(no_room).exists()
        if no_room:
            Path(no_room).touch()
        self.notes = Path(notes)
        self.die_training = Path(die_training) if die_training else None
        self.tokens = 0.0
        self.updates = 0
        self.term = 0
        self.head = torch.zeros(2)
        self.pacer = None
        self.keeps_tokens = True
        self.trainable_head = None

    @property
    def slice_trainer(self):
        return self if self.trains else None

    @property
    def speculation(self):
        return self

    def begin(self, term, start=None):
        if term != self.term:
            self.term, self.tokens, self.updates = term, 0.0, 0

    def slice(self, should_stop):
        while not should_stop():
            time.sleep(0.001)
            self.tokens += 1.0
            self.updates += 1
            if self.updates == 1:
                self.notes.with_name("trained").touch()
            if self.die_training is not None and self.die_training.exists():
                self.die_training.unlink()
                os._exit(5)
        return True

    def weights(self):
        return {"head": self.head + 1}

    def take_head(self, weights):
        assert torch.equal(self.head, weights["head"])

    def note_weights(self, version):
        pass

    def quality(self, weights):
        return None if self.term == 0 else float(weights["head"].sum())

    def publish_drafter(self, version, weights=None):
        self.head = weights["head"]
        with self.notes.open("a") as file:
            file.write(json.dumps({"version": version, "head": self.head.tolist()}) + "\n")


def make(settings: str) -> TrainingBackend:
    torch.set_num_threads(1)
    return TrainingBackend(**json.loads(settings))
