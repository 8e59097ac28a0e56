"""Drafters, acceptance by depth, and the numbers of draft tokens that an engine may choose from.

"Accept length" means tokens emitted per target step, the target's own token included.
"""

from dataclasses import dataclass
from functools import cached_property

from paceline.simulate.hardware import Origin, Source
from paceline.simulate.model_shape import ModelShape, load_model

# Host seconds a step that any drafter takes.
DRAFT_SECONDS = 2e-5
# The reduced vocabulary of EAGLE-3's published heads.
EAGLE_VOCAB = 32000
# Draft tokens that `k=paced` goes up to.
DEFAULT_MAX_DRAFT = 7
# The most that any engine verifies at once.
MAX_DRAFT = 1024


@dataclass(frozen=True)
class DrafterShape:
    """The sizes of what proposes tokens.

    It is an EAGLE head (`layers` as wide as the target's), a smaller model (`model`), or neither (history,
    n-gram).
    """

    name: str
    layers: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    fixed_seconds: float = DRAFT_SECONDS  # a step
    model: ModelShape | None = None

    def parameters(self, target: ModelShape) -> float:
        if self.model is not None:
            return self.model.matrix_parameters
        if not self.layers:
            return 0.0
        hidden = target.hidden_size
        attention = 2 * hidden * target.qkv_width + target.query_width * hidden
        layer = attention + 3 * hidden * self.intermediate_size
        return self.layers * layer + self.vocab_size * hidden + 3 * hidden**2

    def kv_bytes_per_token(self, target: ModelShape, bytes_per_value: float) -> float:
        """Returns the bytes of the drafter's own cache that one token takes beside this target."""
        if self.model is not None:
            return self.model.kv_bytes_per_token(2.0)
        return target.kv_bytes_per_token(bytes_per_value) * self.layers / target.num_layers


def eagle(target: ModelShape) -> DrafterShape:
    """Returns an EAGLE head: one decoder layer as wide as the target's, with a head of its own."""
    return DrafterShape("eagle", 1, target.intermediate_size, min(EAGLE_VOCAB, target.vocab_size))


def history() -> DrafterShape:
    return DrafterShape("history")


def make_drafter(name: str, target: ModelShape) -> DrafterShape:
    if name == "eagle":
        return eagle(target)
    if name == "history":
        return history()
    try:
        return DrafterShape(name, model=load_model(name))
    except ValueError as error:
        raise ValueError(f"drafter {name!r}: must be eagle, history, or a smaller model: {error}") from None


@dataclass(frozen=True)
class Acceptance:
    """The probability by depth that a draft token is accepted, given that those before it were."""

    by_depth: tuple[float, ...]  # the last one repeats
    origin: Origin = Origin(Source.ASSUMED, "given by hand")

    def __post_init__(self) -> None:
        if not self.by_depth or not all(0 <= p <= 1 for p in self.by_depth):
            raise ValueError(
                f"acceptance {self.by_depth}: give one or more probabilities between 0 and 1, by depth"
            )

    def accept_length(self, draft_tokens: int) -> float:
        """Returns 1 + the sum over depths of the probability that everything up to there is accepted.

        Leviathan et al. 2023, eq. 1, by depth.
        """
        total = 1.0
        survived = 1.0
        for depth in range(draft_tokens):
            survived *= self.by_depth[min(depth, len(self.by_depth) - 1)]
            total += survived
        return total

    @classmethod
    def from_accept_length(
        cls, accept_length: float, draft_tokens: int, origin: Origin | None = None
    ) -> "Acceptance":
        """Returns the constant probability that gives this accept length at this depth, by bisection."""
        if not 1 <= accept_length <= draft_tokens + 1:
            raise ValueError(
                f"accept length {accept_length}: with k = {draft_tokens} "
                f"it lies between 1 and {draft_tokens + 1}"
            )
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if cls((middle,)).accept_length(draft_tokens) < accept_length:
                low = middle
            else:
                high = middle
        note = f"accept length {accept_length:g} at k = {draft_tokens}"
        return cls((high,), origin or Origin(Source.ASSUMED, note))

    @classmethod
    def parse(cls, text: str) -> "Acceptance":
        """Reads `0.8`, `0.85,0.8,0.7` by depth, or `3.0@3`: accept length at a number of draft tokens."""
        try:
            if "@" in text:
                length, _, tokens = text.partition("@")
                return cls.from_accept_length(float(length), int(tokens))
            return cls(tuple(float(p) for p in text.split(",")), Origin(Source.ASSUMED, f"acceptance {text}"))
        except ValueError as error:
            raise ValueError(
                f"use 0.8, or 0.85,0.8,0.7 by depth, or 3.0@3 for an accept length at k ({error})"
            ) from None


@dataclass(frozen=True)
class Speculation:
    """The numbers of draft tokens that the engine may choose from.

    A single one is a fixed k; several are paced, 0 being plain decoding.
    """

    draft_tokens: tuple[int, ...] = (0,)
    acceptance: Acceptance = Acceptance((0.0,))
    max_running: int = 0  # above this many rows decode plainly; 0: no limit

    @classmethod
    def parse(cls, text: str, acceptance: Acceptance, max_running: int = 0) -> "Speculation":
        """Reads `0`, `3`, or `paced` / `paced:7` for the best of 0..7."""
        kind, _, limit = text.partition(":")
        try:
            most = int(limit or DEFAULT_MAX_DRAFT) if kind == "paced" else int(text)
        except ValueError:
            most = -1
        if not 0 <= most <= MAX_DRAFT:
            raise ValueError(f"use a number of draft tokens from 0 to {MAX_DRAFT}, or paced, or paced:MAX")
        return cls(tuple(range(most + 1)) if kind == "paced" else (most,), acceptance, max_running)

    @property
    def off(self) -> bool:
        return self.draft_tokens == (0,)

    @cached_property
    def accept_lengths(self) -> dict[int, float]:
        return {k: self.acceptance.accept_length(k) for k in {0, *self.draft_tokens}}

    def allowed(self, rows: int) -> tuple[int, ...]:
        return (0,) if self.max_running and rows > self.max_running else self.draft_tokens
