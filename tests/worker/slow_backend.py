"""A generator without a model, to host in a worker: tokens are a function of seed, position and weights."""

import json
import os
import time
from collections import deque
from pathlib import Path

import torch

from paceline.backend import Backend
from paceline.stats import RolloutStats
from paceline.types import Completion, FinishReason, Precision, Segment


class SlowBackend(Backend):
    """Writes one token of every request per `seconds`; one whose prompt begins with 666 ends the process.

    It writes none while there is a file `hold`.
    """

    def __init__(self, seconds: float, die_once: str, hold: str = "") -> None:
        self.seconds = seconds
        self.die_once = die_once
        self.hold = Path(hold) if hold else None
        self.weight = 0
        self.version = 0
        self.rows = deque()
        self.paused = False

    def submit(self, requests):
        self.rows.extend([request, [], []] for request in requests)

    def completions(self):
        while self.rows and not self.paused:
            time.sleep(self.seconds)
            if self.hold is not None and self.hold.exists():
                continue
            done = []
            for row in self.rows:
                request, tokens, segments = row
                self._misbehave(request)
                if request.id in getattr(self, "aborted", ()):
                    done.append((row, FinishReason.ABORTED))
                    continue
                start = len(tokens)
                tokens.append((request.seed * 31 + len(request.prompt) + start + self.weight) % 11)
                if segments and segments[-1].weight_version == self.version:
                    start = segments.pop().start
                segments.append(Segment(start, len(tokens), self.version))
                if len(tokens) >= request.sampling.max_tokens:
                    done.append((row, FinishReason.LENGTH))
            for row, _ in done:
                self.rows.remove(row)
            for (request, tokens, segments), reason in done:
                logprobs = tuple(-0.5 for _ in tokens)
                yield Completion(request, tuple(tokens), logprobs, reason, tuple(segments))

    def _misbehave(self, request):
        first = request.prompt[0]
        if first in (666, 667) and self.die_once and not Path(self.die_once).exists():
            Path(self.die_once).touch()
            if first == 666:
                os._exit(3)
            time.sleep(3600)
        if request.prompt[0] == 668:
            os._exit(4)

    def abort(self, request_ids):
        self.aborted = set(request_ids) | getattr(self, "aborted", set())

    def update_weights(self, version, weights=None):
        self.version = version
        own = dict(weights or ()).get("w")
        self.weight = 0 if own is None else int(own.sum())

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False

    def take_stats(self):
        stats = RolloutStats(generated_tokens=sum(len(tokens) for _, tokens, _ in self.rows))
        return stats

    def close(self):
        self.rows.clear()

    @property
    def precision(self):
        return Precision.BASE


def make(settings: str) -> SlowBackend:
    torch.set_num_threads(1)
    return SlowBackend(**json.loads(settings))
