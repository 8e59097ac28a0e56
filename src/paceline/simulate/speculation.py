"""Drafters, acceptance by depth, and which number of draft tokens is fastest now.

"Accept length" means tokens emitted per target step, the target's own token included.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.simulate.hardware import Origin, Source
from paceline.simulate.model_shape import ModelShape, load_model


@dataclass(frozen=True)
class Drafter:
    """What proposes tokens: an EAGLE head (`layers` as wide as the target's), a smaller model (`model`), or
    neither (history, n-gram).
    """

    name: str
    layers: int
    feed_forward: int
    vocab: int
    fixed_seconds: float  # a step
    model: ModelShape | None = None

    def parameters(self, model: ModelShape) -> float:
        if self.model is not None:
            return self.model.parameters
        if not self.layers:
            return 0.0
        layer = (
            2 * model.hidden * model.qkv_width
            + model.heads * model.head_dim * model.hidden
            + 3 * model.hidden * self.feed_forward
        )
        return self.layers * layer + self.vocab * model.hidden + 3 * model.hidden**2


def eagle(model: ModelShape, vocab: int = 32000) -> Drafter:
    """One decoder layer as wide as the target's, own head over a reduced vocabulary (EAGLE-3's published
    heads use 32,000).
    """
    width = model.feed_forward if model.feed_forward else 4 * model.hidden
    return Drafter("eagle", 1, width, min(vocab, model.vocab), 2e-5)


def history() -> Drafter:
    return Drafter("history", 0, 0, 0, 2e-5)


def make_drafter(name: str, model: ModelShape) -> Drafter:
    if name == "eagle":
        return eagle(model)
    if name == "history":
        return history()
    try:
        return Drafter(name, 0, 0, 0, 2e-5, load_model(name))
    except ValueError as error:
        raise ValueError(f"drafter {name!r}: must be eagle, history, or a smaller model: {error}") from None


@dataclass(frozen=True)
class Acceptance:
    """`by_depth[i]`: probability that draft token i + 1 is accepted, given that those before it were. The
    last one repeats.
    """

    by_depth: tuple[float, ...]
    origin: Origin = Origin(Source.ASSUMED, "given by hand")

    def __post_init__(self) -> None:
        if not self.by_depth or not all(0 <= p <= 1 for p in self.by_depth):
            raise ValueError(
                f"acceptance {self.by_depth}: give one or more probabilities between 0 and 1, by depth"
            )

    def accept_length(self, draft_tokens: int) -> float:
        """1 + sum over depths of the probability that everything up to there is accepted (Leviathan et al.
        2023, eq. 1, by depth).
        """
        total, alive = 1.0, 1.0
        for depth in range(draft_tokens):
            alive *= self.by_depth[min(depth, len(self.by_depth) - 1)]
            total += alive
        return total

    @classmethod
    def from_accept_length(
        cls, accept_length: float, draft_tokens: int, origin: Origin | None = None
    ) -> "Acceptance":
        """The constant probability that gives this accept length at this depth, by bisection."""
        if not 1 <= accept_length <= draft_tokens + 1:
            raise ValueError(
                f"accept length {accept_length}: with k = {draft_tokens} it lies between 1 and "
                f"{draft_tokens + 1}"
            )
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if cls((middle,)).accept_length(draft_tokens) < accept_length
                else (low, middle)
            )
        return cls(
            (high,),
            origin or Origin(Source.ASSUMED, f"accept length {accept_length:g} at k = {draft_tokens}"),
        )

    @classmethod
    def parse(cls, text: str) -> "Acceptance":
        """`0.8`, `0.85,0.8,0.7` by depth, or `3.0@3`: accept length at a number of draft tokens."""
        try:
            if "@" in text:
                length, _, tokens = text.partition("@")
                return cls.from_accept_length(float(length), int(tokens))
            return cls(tuple(float(p) for p in text.split(",")), Origin(Source.ASSUMED, f"acceptance {text}"))
        except ValueError as error:
            raise ValueError(
                f"--accept {text!r}: use 0.8, or 0.85,0.8,0.7 by depth, or 3.0@3 for an accept length at k "
                f"({error})"
            ) from None


@dataclass(frozen=True)
class Speculation:
    """Which numbers of draft tokens the engine may choose from. A single one is a fixed k; several are paced,
    0 being plain decoding.
    """

    draft_tokens: tuple[int, ...] = (0,)
    acceptance: Acceptance = Acceptance((0.0,))
    max_running: int = 0  # above this many rows decode plainly; 0: no limit

    @classmethod
    def parse(cls, text: str, acceptance: Acceptance, max_running: int = 0) -> "Speculation":
        """`0`, `3`, or `paced` / `paced:7` for the best of 0..7."""
        kind, _, limit = text.partition(":")
        try:
            if kind == "paced":
                return cls(tuple(range(int(limit or 7) + 1)), acceptance, max_running)
            if int(text) >= 0:
                return cls((int(text),), acceptance, max_running)
        except ValueError:
            pass
        raise ValueError(f"-k {text!r}: use a number of draft tokens from 0 on, or paced, or paced:MAX")

    @property
    def off(self) -> bool:
        return self.draft_tokens == (0,)

    @cached_property
    def accept_lengths(self) -> dict[int, float]:
        return {k: self.acceptance.accept_length(k) for k in {0, *self.draft_tokens}}

    def allowed(self, rows: int) -> tuple[int, ...]:
        return (0,) if self.max_running and rows > self.max_running else self.draft_tokens

    def expected_rate(self, seconds: np.ndarray, draft_tokens: int) -> np.ndarray:
        """Tokens per second and row."""
        return self.accept_lengths[draft_tokens] / seconds
