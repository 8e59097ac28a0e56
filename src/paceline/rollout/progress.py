"""How far a rollout is, for whoever watches: written by the thread that samples, read by another."""

import time
from dataclasses import dataclass, field


@dataclass
class RolloutProgress:
    """The requests of the rollout that runs now, or of the last one."""

    total: int = 0
    finished: int = 0
    tokens: int = 0  # of finished responses
    longest: int = 0  # tokens of the longest response so far
    begun: float = field(default_factory=time.perf_counter)

    def add(self, tokens: int) -> None:
        """Counts a finished response."""
        self.finished += 1
        self.tokens += tokens
        self.longest = max(self.longest, tokens)
