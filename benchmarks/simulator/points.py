"""Measured points: what `calibrate.py` fits and what `validate.py` compares with.

One JSON file is one machine. Each point has how long something took; `use` is whether a fit may see it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.policy.files import errors_name, read_json

MEASUREMENTS = Path(__file__).parent / "measurements"
FIT = "fit"
HELD_OUT = "held-out"


@dataclass(frozen=True)
class GemmPoint:
    """Products with these weights (width, depth, how many times) at `rows` rows, in seconds together."""

    rows: int
    weights: tuple[tuple[int, int, int], ...]
    seconds: float
    precision: str = "bf16"
    kernel: str = "paceline"
    use: str = FIT


@dataclass(frozen=True)
class AttentionPoint:
    """One layer's attention: prefill of `new` tokens a row, or a decode step of `queries` tokens a row."""

    heads: int
    kv_heads: int
    head_dim: int
    contexts: tuple[int, ...]  # one per row
    seconds: float
    queries: int = 1
    new: int = 0  # 0: a decode step
    use: str = FIT


@dataclass(frozen=True)
class ExpertPoint:
    """All products of one layer's experts for `rows` tokens."""

    rows: int
    experts: int
    experts_per_token: int
    hidden: int
    width: int
    seconds: float
    use: str = FIT


@dataclass(frozen=True)
class RestPoint:
    """Norms, RoPE, activation of one layer at `tokens` tokens; or the sampler, where `vocab` is given."""

    tokens: int
    hidden: int
    qkv_width: int
    feed_forward: int
    seconds: float
    vocab: int = 0
    use: str = FIT


@dataclass(frozen=True)
class StepPoint:
    """A whole decode (queries = 1), verify or prefill step."""

    model: str
    rows: int
    context: int
    seconds: float
    queries: int = 1
    prefill: int = 0  # tokens a row
    layer: str = "engine"  # or kernels: the same step without an engine
    engine: str = "paceline"
    use: str = HELD_OUT


@dataclass(frozen=True)
class RatioPoint:
    """Two steps of the same rows in one run: verify with `queries` tokens a row over a plain step."""

    model: str
    rows: int
    context: int
    queries: int
    ratio: float
    layer: str = "kernels"
    use: str = HELD_OUT


@dataclass(frozen=True)
class RolloutPoint:
    """A whole rollout of `paceline bench rollout`, with its log-normal lengths."""

    model: str
    requests: int
    prompt: int
    lengths: tuple[float, float, int, int]  # mean, sigma, low, high
    seconds: float
    tail_seconds: float = 0.0
    # Mean step with at most this many running, and more than half of it.
    step_seconds_by_running: tuple[tuple[int, float], ...] = ()
    engine: str = "paceline"
    use: str = HELD_OUT


@dataclass(frozen=True)
class Measurements:
    """All points of one machine, with what they were measured on."""

    device: str
    software: str
    date: str
    gemms: tuple[GemmPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    experts: tuple[ExpertPoint, ...] = ()
    rest: tuple[RestPoint, ...] = ()
    steps: tuple[StepPoint, ...] = ()
    ratios: tuple[RatioPoint, ...] = ()
    rollouts: tuple[RolloutPoint, ...] = ()
    notes: tuple[str, ...] = ()


KernelPoint = GemmPoint | AttentionPoint | ExpertPoint | RestPoint
KINDS = {
    "gemms": GemmPoint,
    "attention": AttentionPoint,
    "experts": ExpertPoint,
    "rest": RestPoint,
    "steps": StepPoint,
    "ratios": RatioPoint,
    "rollouts": RolloutPoint,
}


def load_measurements(path: Path) -> Measurements:
    record = read_json(path)
    with errors_name(path):
        points = {
            name: tuple(_point(kind, entry) for entry in record.pop(name, ())) for name, kind in KINDS.items()
        }
        return Measurements(**points, **_tupled(record))


def _point(kind: Callable[..., Any], entry: dict[str, Any]) -> Any:
    """Returns one point; its time must be one."""
    for key in ("seconds", "ratio"):
        value = entry.get(key, 1.0)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{key} = {value!r} of {entry}: must be above 0")
    return kind(**_tupled(entry))


def merged(parts: list[Measurements]) -> Measurements:
    """Returns the points of several files of one kind of device, with the first one's description."""
    points = {
        name: tuple(point for part in parts for point in getattr(part, name)) for name in (*KINDS, "notes")
    }
    return replace(parts[0], **points)


def write_measurements(measurements: Measurements, path: Path) -> None:
    parts = []
    for key, value in asdict(measurements).items():
        lines = ",\n  ".join(json.dumps(entry) for entry in value) if isinstance(value, tuple) else ""
        parts.append(f'"{key}": ' + (f"[\n  {lines}\n ]" if isinstance(value, tuple) else json.dumps(value)))
    path.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def _tupled(record: dict[str, Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        return tuple(convert(v) for v in value) if isinstance(value, list) else value

    return {key: convert(value) for key, value in record.items()}
