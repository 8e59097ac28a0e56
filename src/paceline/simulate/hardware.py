"""Hardware profiles: how fast each kind of operator runs on a device, and from which source.

A profile is a JSON file. `kernels` holds efficiency curves in absolute units (seconds, bytes per second,
operations per second); a profile without measurements has `scaled_from` and gets the curves of another one,
scaled by the ratio of the two data sheets. `provenance` has for every part whether it was measured, fitted or
assumed, and every output repeats it.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from paceline.policy.files import read_json

PROFILES = Path(__file__).parent / "profiles"
CALIBRATE = "in a clone of the repository `python -m benchmarks.simulator.calibrate"
Curve = TypeVar("Curve", "GemmCurve", "AttentionCurve", "OtherCurve", "ExpertCurve")
Part = TypeVar("Part")


class Source(StrEnum):
    """How a figure is known."""

    MEASURED = "measured"
    FITTED = "fitted"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Origin:
    """Where a part of a profile or a scenario comes from."""

    source: Source
    note: str


@dataclass(frozen=True)
class DataSheet:
    """The vendor's figures for one device, dense rates."""

    memory_bytes: float
    bandwidth: float
    bf16_flops: float
    fp8_flops: float  # 0: none


@dataclass(frozen=True)
class GemmCurve:
    """A matrix product: launch, and the two limits of a roofline, joined by a p-norm (`operators.gemm`)."""

    launch_seconds: float
    bandwidth: float
    flops: float
    half_rows: float  # rows at which the arithmetic reaches half its rate
    sharpness: float  # p of the norm: infinity would be a roofline with a sharp knee
    row_tile: int = 1  # rows are padded to a multiple of this


@dataclass(frozen=True)
class AttentionCurve:
    """One layer of attention over a paged cache: decode or verify, and prefill."""

    launch_seconds: float
    bandwidth: float
    serial_seconds_per_key: float  # of the longest row, whatever the parallelism
    flops: float  # arithmetic rate of the decode kernel
    prefill_flops: float
    row_seconds: float = 0.0  # per query of every row; a CPU runs them one after another
    query_tile: int = 16  # (query, head of the group) pairs are padded to a multiple of this


@dataclass(frozen=True)
class OtherCurve:
    """Norms, RoPE, activations and sampling: a cost per layer, per byte and per logit."""

    layer_seconds: float
    bandwidth: float
    sampler_elements_per_second: float
    sampler_seconds: float = 0.0  # per step, whatever its size


@dataclass(frozen=True)
class ExpertCurve:
    """The grouped product over chosen experts."""

    launch_seconds: float
    bandwidth: float
    flops: float
    row_tile: int = 16
    busiest_share: float = 1.0  # load of the busiest device over the mean


@dataclass(frozen=True)
class Kernels:
    """The efficiency curves of one device."""

    gemm_bf16: GemmCurve
    gemm_fp8: GemmCurve | None
    attention: AttentionCurve
    other: OtherCurve
    experts: ExpertCurve


@dataclass(frozen=True)
class Links:
    """Links between devices: `domain` of them share the fast one, beyond it is the network."""

    domain: int
    link_bandwidth: float  # one direction, per device
    link_seconds: float  # latency of one collective
    network_bandwidth: float
    network_seconds: float


@dataclass(frozen=True)
class Training:
    """Learning as a share of the data sheet's rate, and weight transfer."""

    utilisation: float  # of the data sheet's bf16 rate, forward and backward
    logprob_utilisation: float
    fixed_seconds: float  # of an update, whatever its size
    sync_seconds: float  # fixed part of sending weights to the engines


@dataclass(frozen=True)
class Hardware:
    """A device's profile."""

    name: str
    data_sheet: DataSheet
    kernels: Kernels
    links: Links
    training: Training
    # By part: data_sheet, gemm_bf16, gemm_fp8, attention, other, experts, links, training.
    provenance: dict[str, Origin]

    @property
    def has_fp8(self) -> bool:
        return self.kernels.gemm_fp8 is not None and self.data_sheet.fp8_flops > 0


def shipped_profiles() -> dict[str, Path]:
    return {path.stem: path for path in sorted(PROFILES.glob("*.json"))}


def load_hardware(name: str, scaled: tuple[str, ...] = ()) -> Hardware:
    """Loads a shipped profile by its name, or a JSON file such as benchmarks/simulator writes.

    `scaled` are the profiles that are being scaled from this one.
    """
    path = shipped_profiles().get(name) or Path(name)
    if not path.is_file():
        known = ", ".join(shipped_profiles())
        hint = f"{CALIBRATE} FILE` makes one of this machine"
        raise ValueError(f"hardware {name!r} is neither a shipped profile ({known}) nor a file; {hint}")
    if name in scaled:
        chain = " -> ".join((*scaled, name))
        raise ValueError(f"{path}: scaled_from leads back to where it began ({chain}); name a shipped one")
    with _profile_errors(path):
        record = read_json(path)
    base = None
    if "scaled_from" in record:
        base = load_hardware(str(record["scaled_from"]), (*scaled, name))
    with _profile_errors(path):
        return _parsed(record) if base is None else _scaled(record, base)


@contextmanager
def _profile_errors(path: Path) -> Iterator[None]:
    """Turns errors within into ones that name the profile and the way out."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        hint = f"{CALIBRATE} {path}` writes one"
        raise ValueError(f"{path} is not a hardware profile: {why}. {hint}") from None


def _parsed(record: dict[str, Any]) -> Hardware:
    kernels = record["kernels"]
    provenance = _origins(record["provenance"])
    for part in ("gemm_bf16", "attention", "other", "experts", "links", "training", "data_sheet"):
        if part not in provenance:
            raise ValueError(f"provenance does not say where {part} comes from")
    return Hardware(
        name=record["name"],
        data_sheet=_part(DataSheet, record, "data_sheet"),
        kernels=Kernels(
            _part(GemmCurve, kernels, "gemm_bf16"),
            _part(GemmCurve, kernels, "gemm_fp8") if kernels.get("gemm_fp8") else None,
            _part(AttentionCurve, kernels, "attention"),
            _part(OtherCurve, kernels, "other"),
            _part(ExpertCurve, kernels, "experts"),
        ),
        links=_part(Links, record, "links"),
        training=_part(Training, record, "training"),
        provenance=provenance,
    )


def _part(kind: type[Part], record: dict[str, Any], name: str) -> Part:
    """Returns one part of a profile, its numbers checked.

    Costs may be 0; rates and sizes may not.
    """
    part = kind(**record[name])
    for field, value in vars(part).items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and value < math.inf
        may_be_zero = "seconds" in field or field in ("half_rows", "fp8_flops")
        if not number or not value >= 0 or (value == 0 and not may_be_zero):
            least = "0 or more" if may_be_zero else "above 0"
            raise ValueError(f"{name}.{field} = {value!r}: must be a number {least}")
        if field.endswith("utilisation") and value > 1:
            raise ValueError(f"{name}.{field} = {value!r}: a share of the data sheet's rate, at most 1")
        if field == "sharpness" and value < 1:
            raise ValueError(f"{name}.{field} = {value!r}: must be at least 1")
    return part


def _origins(record: dict[str, Any]) -> dict[str, Origin]:
    return {part: Origin(Source(origin["source"]), origin["note"]) for part, origin in record.items()}


def _scaled(record: dict[str, Any], base: Hardware) -> Hardware:
    """Returns the base's curves with rates multiplied by the ratio of the data sheets; launch times stay."""
    sheet = _part(DataSheet, record, "data_sheet")
    bandwidth = sheet.bandwidth / base.data_sheet.bandwidth
    flops = sheet.bf16_flops / base.data_sheet.bf16_flops
    fp8 = None
    if base.kernels.gemm_fp8 is not None and base.has_fp8 and sheet.fp8_flops:
        fp8_flops = sheet.fp8_flops / base.data_sheet.fp8_flops
        fp8 = _faster(base.kernels.gemm_fp8, bandwidth, fp8_flops)
    kernels = Kernels(
        _faster(base.kernels.gemm_bf16, bandwidth, flops),
        fp8,
        _faster(base.kernels.attention, bandwidth, flops),
        _faster(base.kernels.other, bandwidth, flops),
        _faster(base.kernels.experts, bandwidth, flops),
    )
    note = f"{base.name}'s curve x ratio of the data sheets (bandwidth {bandwidth:.2f}, bf16 {flops:.2f})"
    provenance = dict.fromkeys((f.name for f in dataclasses.fields(Kernels)), Origin(Source.ASSUMED, note))
    provenance["training"] = Origin(Source.ASSUMED, "as for the base profile")
    return Hardware(
        record["name"],
        sheet,
        kernels,
        _part(Links, record, "links"),
        _part(Training, record, "training") if record.get("training") else base.training,
        provenance | _origins(record["provenance"]),
    )


def _faster(curve: Curve, bandwidth: float, flops: float) -> Curve:
    """Returns the curve with its bandwidth and its arithmetic rates, where it has any, multiplied."""
    factors = {"bandwidth": bandwidth, "flops": flops, "prefill_flops": flops}
    rates = {name: getattr(curve, name) * x for name, x in factors.items() if hasattr(curve, name)}
    return dataclasses.replace(curve, **rates)
