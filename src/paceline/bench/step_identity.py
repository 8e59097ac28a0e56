"""Whether cells of `bench step` sampled the same tokens where they must.

A setting that only changes speculation samples what plain decoding samples, as long as the weights agree:

    on a CPU                   every step, and every update with it
    GPU, deterministic mode    every step until an update differs, which the learner there does not rule out
    GPU, fast mode             nothing is promised; the first step's share of equal completions is reported
    anything else changed      not compared, as with FP8

Whether an update agreed shows in its loss and gradient norm: they are sums over everything that it saw.
"""

from dataclasses import dataclass

from paceline.bench.step_cell import MeasuredCell
from paceline.bench.step_settings import same_tokens_promised

# Metrics of a step that agree only if its update does.
UPDATE_WITNESSES = ("policy/loss", "policy/gradient_norm")


@dataclass(frozen=True)
class Agreement:
    """How a cell's samples compare with plain decoding's."""

    promised: bool = False  # equal tokens are promised here
    compared_steps: int = 0  # from the first on
    first_step_share: float | None = None  # of completions that are identical; None: not compared
    problem: str = ""  # what broke the promise
    note: str = ""  # why not all steps were compared

    def __str__(self) -> str:
        if self.first_step_share is None:
            return "not compared"
        if self.problem:
            return "NO"
        if self.promised:
            return f"yes, {self.compared_steps} steps"
        return f"{100 * self.first_step_share:.1f}% of step 1"


def compare_with_plain(cell: MeasuredCell, plain: MeasuredCell) -> Agreement:
    """Compares a cell's tokens with those of a plain one, step by step."""
    if not same_tokens_promised(plain.config, cell.config):
        return Agreement()
    on_cpu = cell.machine.device_type == "cpu"
    promised = on_cpu or cell.config.rollout.deterministic
    share = _identical_share(plain.tokens(1), cell.tokens(1))
    if not promised:
        return Agreement(False, 1, share)
    for step, (ours, theirs) in enumerate(zip(cell.steps, plain.steps, strict=True), start=1):
        sample = _first_difference(plain.tokens(step), cell.tokens(step))
        if sample:
            return Agreement(True, step, share, f"cell {cell.name}, step {step}: {sample}")
        witness = next((key for key in UPDATE_WITNESSES if ours.get(key) != theirs.get(key)), None)
        if witness is not None:
            told = f"step {step}: {witness} is {ours.get(witness)} and plain's {theirs.get(witness)}"
            if on_cpu:
                return Agreement(True, step, share, f"cell {cell.name}, {told}, from the same tokens")
            return Agreement(True, step, share, note=f"compared up to step {step}; {told}")
    return Agreement(True, len(cell.steps), share)


def _identical_share(plain: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]) -> float:
    return sum(other.get(request) == tokens for request, tokens in plain.items()) / max(1, len(plain))


def _first_difference(plain: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]) -> str:
    """Returns the first request whose tokens differ and where; empty where none do."""
    for request in sorted(plain.keys() | other.keys()):
        expected = plain.get(request)
        found = other.get(request)
        if expected is None or found is None:
            return f"sample {request} is missing in {'plain' if expected is None else 'this cell'}"
        if expected != found:
            pairs = zip(expected, found, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
            return f"sample {request} differs from plain decoding at token {place}"
    return ""
