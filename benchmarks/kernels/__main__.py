"""Times this project's kernels beside torch's, and beside the device's peak rates.

    python -m benchmarks.kernels --model qwen3-8b

Each kernel is compared with torch's result first; exit code 1 if one is wrong.
"""

from dataclasses import asdict
from pathlib import Path

from benchmarks.kernels.case import KernelPoint
from benchmarks.kernels.limits import DeviceLimits
from benchmarks.kernels.run import CASES, bench_kernels, choose_kernels, measure_limits
from benchmarks.probe import make_parser, write_json
from paceline.device import best_device
from paceline.models.source import BUILTIN_POLICIES
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.shapes import SHAPES

HEADER = (
    f"{'kernel':<14} {'size':<40} {'us [low, high]':>28} {'torch us':>10} {'limit us':>10} "
    f"{'of limit':>9} {'error':>8}"
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin", help="whose layers: a folder or a named shape")
    parser.add_argument("--only", default="", help=f"of {', '.join(CASES)}, with commas between")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device, shape = best_device(), shape_of(options.model)
    try:
        names = choose_kernels([name for name in options.only.split(",") if name], shape, device)
    except ValueError as error:
        parser.error(str(error))
    limits = measure_limits(device, shape)
    print(limits_line(limits))
    print(HEADER)
    points = []
    for point in bench_kernels(shape, device, names, limits, options.repeats):
        points.append(point)
        print(kernel_line(point), flush=True)
    write_json(options.json, {"model": options.model, "limits": asdict(limits)}, device, points)
    raise SystemExit(not all(point.correct for point in points))


def shape_of(model: str) -> DecoderConfig:
    return SHAPES[model] if model in SHAPES else read_config(Path(BUILTIN_POLICIES.get(model, model)))


def limits_line(limits: DeviceLimits) -> str:
    fp8 = "" if limits.fp8_flops is None else f", {limits.fp8_flops / 1e12:.1f} in FP8"
    return (
        f"limits: {limits.bytes_per_second / 1e9:.0f} GB/s by a copy, "
        f"{limits.flops / 1e12:.3g} TFLOP/s by a square product{fp8}"
    )


def kernel_line(p: KernelPoint) -> str:
    if p.microseconds is None:
        return f"{p.kernel:<14} {p.size:<40} WRONG: differs from torch's result by {p.error:.1e}, not timed"
    own = p.microseconds
    spread = f"{own.median:.1f} [{own.low:.1f}, {own.high:.1f}]"
    torchs = "-" if p.torch_microseconds is None else f"{p.torch_microseconds.median:.1f}"
    limit = share = "-"
    if p.limit_microseconds is not None:
        limit = f"{p.limit_microseconds:.1f}"
        share = f"{100 * p.limit_microseconds / own.median:.0f}%"
    return f"{p.kernel:<14} {p.size:<40} {spread:>28} {torchs:>10} {limit:>10} {share:>9} {p.error:>8.0e}"


if __name__ == "__main__":
    main()
