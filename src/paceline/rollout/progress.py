"""Progress of a rollout: written by the sampling thread, read by the console's."""

import time
from dataclasses import dataclass, field


@dataclass
class RolloutProgress:
    """The requests of the current rollout, or of the last one."""

    total: int = 0
    finished: int = 0
    tokens: int = 0  # of finished responses
    longest: int = 0  # tokens of the longest response so far
    begun: float = field(default_factory=time.perf_counter)

    def add(self, tokens: int) -> None:
        self.finished += 1
        self.tokens += tokens
        self.longest = max(self.longest, tokens)
