"""Times this machine's kernels, the native engine's own: the points that `calibrate` fits. The only file here
that needs torch.

On a GPU every measurement is a CUDA graph over enough copies of its operands that none is left in the L2
cache.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from paceline.kernels.linear import linear
from paceline.kernels.moe import choose_expert_tile, expert_feed_forward, experts_triton
from paceline.kernels.norm import rms_norm_residual
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.prefill_attention import prefill_attention
from paceline.kernels.rope_kv import rope_and_write_kv
from paceline.kernels.sampler import sample
from paceline.kernels.swiglu import silu_multiply
from paceline.simulate.points import (
    FIT,
    HELD_OUT,
    AttentionPoint,
    ExpertPoint,
    GemmPoint,
    Measurements,
    RestPoint,
)

BLOCK = 16


@dataclass(frozen=True)
class Grid:
    """What to measure. Shapes of one model family suffice: the curves are in bytes and operations."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    gemm_rows: tuple[int, ...]
    attention: tuple[tuple[int, int, int], ...]  # rows, context, queries
    prefill: tuple[tuple[int, int, int], ...]  # sequences, new tokens, context
    tokens: tuple[int, ...]  # for norms and the sampler
    experts: tuple[int, int, int, int] = (0, 0, 0, 0)  # experts, per token, hidden, width
    expert_rows: tuple[int, ...] = ()
    copies_bytes: int = 200_000_000
    repeats: int = 5


GPU = Grid(
    4096,
    32,
    8,
    128,
    12288,
    151936,
    gemm_rows=(1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096, 16384),
    attention=(
        (1, 256, 1),
        (1, 1024, 1),
        (1, 8192, 1),
        (1, 32000, 1),
        (4, 2048, 1),
        (8, 512, 1),
        (8, 8192, 1),
        (32, 256, 1),
        (32, 1024, 1),
        (32, 4096, 1),
        (64, 256, 1),
        (128, 512, 1),
        (128, 2048, 1),
        (256, 256, 1),
        (256, 1024, 1),
        (1, 1024, 4),
        (8, 1024, 4),
        (32, 1024, 4),
        (8, 1024, 8),
        (32, 2048, 8),
    ),
    prefill=((64, 128, 0), (1, 4096, 0), (1, 8192, 0), (1, 8192, 20000), (4, 1024, 1024)),
    tokens=(1, 16, 64, 256, 1024, 8192),
    experts=(128, 8, 2048, 768),
    expert_rows=(1, 4, 16, 64, 256, 1024, 4096),
)
CPU = Grid(
    256,
    8,
    4,
    32,
    768,
    4096,
    gemm_rows=(1, 8, 32, 64, 128, 256),
    attention=(
        (1, 64, 1),
        (1, 512, 1),
        (4, 64, 1),
        (4, 256, 1),
        (16, 64, 1),
        (16, 256, 1),
        (32, 128, 1),
        (4, 64, 4),
        (4, 256, 6),
        (8, 128, 6),
    ),
    prefill=((4, 64, 0), (8, 32, 0), (1, 128, 0)),
    tokens=(1, 8, 32, 128),
    experts=(8, 2, 128, 128),
    expert_rows=(1, 8, 32, 128),
    copies_bytes=4_000_000,
    repeats=3,
)


class Bench:
    def __init__(self, device: torch.device, grid: Grid) -> None:
        self.device, self.grid = device, grid
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device).normal_(0, 0.02)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device=self.device)

    def copies(self, num_bytes: float, most: int = 24) -> int:
        return max(2, min(most, math.ceil(self.grid.copies_bytes / num_bytes)))

    def seconds(self, run: Callable[[], object]) -> float:
        return self._graph_seconds(run) if self.device.type == "cuda" else self._host_seconds(run)

    def _host_seconds(self, run: Callable[[], object]) -> float:
        """The best of several: on a shared machine every disturbance adds."""
        run()
        times = []
        for _ in range(self.grid.repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    def _graph_seconds(self, run: Callable[[], object]) -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiles
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        times = []
        for _ in range(self.grid.repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 2e3)
        return statistics.median(times)

    # -- operators --------------------------------------------------------------------------------------------------

    def gemms(self) -> Iterable[GemmPoint]:
        grid = self.grid
        q = grid.heads * grid.head_dim
        qkv = (grid.heads + 2 * grid.kv_heads) * grid.head_dim
        shapes = (
            (qkv, grid.hidden),
            (grid.hidden, q),
            (2 * grid.feed_forward, grid.hidden),
            (grid.hidden, grid.feed_forward),
            (grid.vocab, grid.hidden),
        )
        for number, (width, depth) in enumerate(shapes):
            weights = [self.random(width, depth) for _ in range(self.copies(width * depth * 2))]
            for place, rows in enumerate(grid.gemm_rows):
                if rows * width > 2e9:
                    continue  # nobody computes that many logits at once
                x = self.random(rows, depth)
                wide = torch.float32 if number == 4 else None
                seconds = self.seconds(lambda: [linear(x, w, wide) for w in weights]) / len(weights)  # noqa: B023
                yield GemmPoint(
                    rows, ((width, depth, 1),), seconds, use=HELD_OUT if (place + number) % 3 == 2 else FIT
                )

    def caches(
        self, lengths: list[int], layers: int
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        blocks = -(-max(lengths) // BLOCK)
        table = torch.randperm(len(lengths) * blocks).int().view(len(lengths), blocks).to(self.device)
        shape = (len(lengths) * blocks, BLOCK, self.grid.kv_heads, self.grid.head_dim)
        return [(self.random(*shape), self.random(*shape)) for _ in range(layers)], table

    def attention(self) -> Iterable[AttentionPoint]:
        grid = self.grid
        for place, (rows, context, queries) in enumerate(grid.attention):
            layers = self.copies(rows * context * grid.kv_heads * grid.head_dim * 4, 12)
            caches, table = self.caches([context + queries] * rows, layers)
            q = self.random(rows, queries, grid.heads, grid.head_dim)
            contexts = torch.full((rows,), context, dtype=torch.int32, device=self.device)
            seconds = (
                self.seconds(lambda: [paged_attention(q, k, v, table, contexts) for k, v in caches]) / layers
            )  # noqa: B023
            use = HELD_OUT if place % 4 == 3 else FIT
            yield AttentionPoint(
                grid.heads, grid.kv_heads, grid.head_dim, (context,) * rows, seconds, queries, use=use
            )

    def prefills(self) -> Iterable[AttentionPoint]:
        grid = self.grid
        for place, (sequences, new, context) in enumerate(grid.prefill):
            caches, table = self.caches([new + context] * sequences, 2)
            q = self.random(sequences * new, grid.heads, grid.head_dim)
            bounds = torch.arange(0, sequences * new + 1, new, device=self.device, dtype=torch.int32)
            contexts = torch.full((sequences,), context, dtype=torch.int32, device=self.device)
            seconds = (
                self.seconds(lambda: [prefill_attention(q, k, v, table, bounds, contexts) for k, v in caches])
                / 2
            )  # noqa: B023
            use = HELD_OUT if place % 3 == 2 else FIT
            yield AttentionPoint(
                grid.heads, grid.kv_heads, grid.head_dim, (context,) * sequences, seconds, 1, new, use
            )

    def rest(self) -> Iterable[RestPoint]:
        grid = self.grid
        qkv_width = (grid.heads + 2 * grid.kv_heads) * grid.head_dim
        norm, head_norm = self.random(grid.hidden), self.random(grid.head_dim)
        angle = torch.rand(max(grid.tokens), grid.head_dim // 2, device=self.device)
        cos, sin = angle.cos(), angle.sin()
        for place, tokens in enumerate(grid.tokens):
            (caches, _), layers = self.caches([tokens], 4), 4
            x, residual = self.random(tokens, grid.hidden), self.random(tokens, grid.hidden)
            qkv, gate_up = self.random(tokens, qkv_width), self.random(tokens, 2 * grid.feed_forward)
            positions = torch.arange(tokens, device=self.device)

            def run() -> None:
                for k, v in caches:  # noqa: B023
                    rope_and_write_kv(
                        qkv, positions, positions, cos, sin, k, v, grid.heads, head_norm, head_norm, 1e-6
                    )  # noqa: B023
                    rms_norm_residual(x, residual, norm, 1e-6)  # noqa: B023
                    silu_multiply(gate_up)  # noqa: B023
                    rms_norm_residual(x, residual, norm, 1e-6)  # noqa: B023

            use = HELD_OUT if place % 3 == 2 else FIT
            yield RestPoint(
                tokens, grid.hidden, qkv_width, grid.feed_forward, self.seconds(run) / layers, use=use
            )
            if tokens * grid.vocab > 1e9:
                continue
            logits = torch.randn(tokens, grid.vocab, device=self.device)
            temperature, seed = torch.ones(tokens, device=self.device), self.integers(2**62, tokens)
            seconds = self.seconds(lambda: sample(logits, temperature, seed, positions))  # noqa: B023
            yield RestPoint(tokens, 0, 0, 0, seconds, grid.vocab, use)

    def experts(self) -> Iterable[ExpertPoint]:
        count, chosen, hidden, width = self.grid.experts
        if not count:
            return
        layers = [
            (self.random(count, 2 * width, hidden), self.random(count, hidden, width)) for _ in range(2)
        ]
        router = self.random(count, hidden)
        for place, rows in enumerate(self.grid.expert_rows):
            x = self.random(rows, hidden)
            weights = torch.full((rows, chosen), 1 / chosen, dtype=self.dtype, device=self.device)
            picked = torch.rand(rows, count, device=self.device).topk(chosen, dim=1).indices.int()
            tile = choose_expert_tile(rows * chosen, count)

            def run() -> None:
                for gate_up, down in layers:
                    if self.device.type == "cuda":
                        experts_triton(x, weights, picked, gate_up, down, tile)  # noqa: B023
                    else:
                        expert_feed_forward(x, router, gate_up, down, chosen, True)  # noqa: B023

            use = HELD_OUT if place % 3 == 2 else FIT
            yield ExpertPoint(rows, count, chosen, hidden, width, self.seconds(run) / len(layers), use)


def measure_kernels(device: torch.device, grid: Grid, note: Callable[[str], None], date: str) -> Measurements:
    bench = Bench(device, grid)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    software = f"torch {torch.__version__}, {'bf16' if device.type == 'cuda' else f'float32, {torch.get_num_threads()} threads'}"
    started = time.perf_counter()

    def collect(what: str, points: Iterable) -> tuple:
        with torch.inference_mode():
            made = tuple(points)
        note(f"[{time.perf_counter() - started:5.1f} s] {len(made)} points: {what}")
        return made

    return Measurements(
        name,
        software,
        date,
        gemms=collect("products", bench.gemms()),
        attention=(*collect("attention", bench.attention()), *collect("prefill attention", bench.prefills())),
        rest=collect("norms, RoPE, activation, sampler", bench.rest()),
        experts=collect("experts", bench.experts()),
    )
