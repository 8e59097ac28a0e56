"""The time of a decode step by batch size, and of one that verifies k proposals.

    python -m benchmarks.decode --model qwen3-8b --batches 1,8,64 --proposals 0,3

A step is (time for n + 1 new tokens - time for 1) / n, so prefill and admission cancel out; that is also how
the peers are measured. Verification is timed with proposals that are never right, so that every step still
emits one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.probe import MODEL_HELP, MOST_PROPOSALS, MOST_ROWS, make_parser, numbers, write_json
from benchmarks.timing import timed
from paceline.bench.setup import bench_policy, bench_requests, refuse_beyond_positions
from paceline.bench.spread import Spread
from paceline.device import best_device
from paceline.drafting.base import Drafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from paceline.types import Precision


class NoDrafter(Drafter):
    """A drafter that proposes -1, which is no token and costs what any other proposal costs to verify."""

    name = "nothing"
    max_tokens = 15

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        self.context.proposals_SK.fill_(-1)


@dataclass(frozen=True)
class DecodePoint:
    """A step with `batch` rows that verifies `proposals` tokens in each."""

    batch: int
    proposals: int
    step_ms: Spread
    tokens_per_second: float
    prefill_ms: float
    first_run_seconds: float  # includes compiling kernels and capturing graphs
    memory_gb: float


def bench_decode(
    policy: Decoder,
    batches: list[int],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    deterministic: bool,
    proposals: Sequence[int] = (0,),
    precision: Precision = Precision.BASE,
) -> list[DecodePoint]:
    """Measures each batch size with each number of proposals, in one engine."""
    # One more than asked for: the first comes from the prefill.
    refuse_beyond_positions(policy.config, prompt_tokens, new_tokens + 1, f"--new {new_tokens}")
    most_rows = max(batches)
    settings = EngineSettings(
        max_running=most_rows,
        kv_tokens=most_rows * (prompt_tokens + new_tokens + 64),
        max_length=prompt_tokens + new_tokens + 2,
        deterministic=deterministic,
        precision=precision,
    )
    engine = Engine(policy, settings, drafters=[NoDrafter()])
    return [
        _measure(engine, batch, count, prompt_tokens, new_tokens, repeats)
        for batch in batches
        for count in proposals
    ]


def _measure(
    engine: Engine, batch: int, proposals: int, prompt_tokens: int, new_tokens: int, repeats: int
) -> DecodePoint:
    engine.pacer = FixedPacer(Strategy(NoDrafter.name, proposals), batch) if proposals else None
    first = _seconds(engine, batch, prompt_tokens, new_tokens + 1)
    steps, prefills = [], []
    for _ in range(repeats):
        short = _seconds(engine, batch, prompt_tokens, 1)
        prefills.append(short)
        steps.append((_seconds(engine, batch, prompt_tokens, new_tokens + 1) - short) / new_tokens * 1e3)
    step = Spread.of(steps)
    memory = torch.cuda.max_memory_allocated() / 1e9 if engine.policy.device.type == "cuda" else 0.0
    return DecodePoint(
        batch,
        proposals,
        step_ms=step,
        tokens_per_second=batch / step.median * 1e3,
        prefill_ms=Spread.of(prefills).median * 1e3,
        first_run_seconds=first,
        memory_gb=memory,
    )


def _seconds(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> float:
    requests = bench_requests([new_tokens] * batch, prompt_tokens, engine.policy.config.vocab_size)

    def generate() -> int:
        engine.submit(requests)
        return sum(len(completion.tokens) for completion in engine.completions())

    seconds, count = timed(generate, engine.policy.device)
    assert count == batch * new_tokens, f"{count} tokens came back instead of {batch * new_tokens}"
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin", help=MODEL_HELP)
    parser.add_argument("--batches", type=numbers(1, MOST_ROWS), default="1,8,32,64,128,256")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens that a step's time is averaged over")
    parser.add_argument(
        "--proposals", type=numbers(0, MOST_PROPOSALS), default="0", help="that each step verifies; 0: plain"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--precision", type=Precision, default=Precision.BASE, help="base, fp8, kv or fp8+kv")
    options = parser.parse_args()
    device = best_device()
    points = bench_decode(
        bench_policy(options.model, device),
        options.batches,
        options.prompt,
        options.new,
        options.repeats,
        options.deterministic,
        options.proposals,
        options.precision,
    )
    print(
        f"{'batch':>6} {'verified':>8} {'step ms [low, high]':>26} {'tok/s':>9} {'prefill ms':>11} "
        f"{'first run s':>12}"
    )
    for p in points:
        print(
            f"{p.batch:>6} {p.proposals:>8} {p.step_ms!s:>26} {p.tokens_per_second:>9.0f} "
            f"{p.prefill_ms:>11.1f} {p.first_run_seconds:>12.1f}"
        )
    how = {
        "model": options.model,
        "deterministic": options.deterministic,
        "precision": str(options.precision),
    }
    write_json(options.json, how, device, points)


if __name__ == "__main__":
    main()
