"""A strategy: which drafter proposes how many tokens per step. `PLAIN` is one of them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Strategy:
    drafter: str = ""
    count: int = 0

    def __str__(self) -> str:
        return f"{self.drafter}:{self.count}" if self.count else "plain"


PLAIN = Strategy()


class Pacer(Protocol):
    def choose(self, running: int) -> Strategy:
        """For a step of `running` rows."""


@dataclass(frozen=True)
class FixedPacer:
    """One strategy while few rows run, plain decoding above: verification is free only while the machine has room."""

    strategy: Strategy
    max_running: int

    def choose(self, running: int) -> Strategy:
        return self.strategy if running <= self.max_running else PLAIN
