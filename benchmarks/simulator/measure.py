"""Times this machine's kernels, the native engine's own: the points that `calibrate.py` fits.

On a GPU every measurement is a CUDA graph over enough copies of its operands that none is left in the L2
cache. Every few sizes a point is held out, so that a fit can be judged.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.simulator.measure_grid import Grid
from benchmarks.simulator.points import (
    FIT,
    HELD_OUT,
    AttentionPoint,
    ExpertPoint,
    GemmPoint,
    Measurements,
    RestPoint,
)
from benchmarks.timing import time_call
from paceline.kernels.linear import linear
from paceline.kernels.moe import choose_expert_tile, expert_feed_forward, experts_triton
from paceline.kernels.norm import rms_norm_residual
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.prefill_attention import prefill_attention
from paceline.kernels.rope_kv import rope_and_write_kv
from paceline.kernels.sampler import sample
from paceline.kernels.swiglu import silu_multiply
from paceline.policy.config import DecoderConfig

BLOCK = 16  # tokens of a cache block
MAX_COPIES = 24  # of a weight matrix
MAX_CACHES = 12  # of a layer's KV cache
MAX_PRODUCT = 2e9  # values that a product may write; more logits are never computed at once
MAX_LOGITS = 1e9  # values that the sampler may read
NORM_EPS = 1e-6


def _use(place: int, every: int) -> str:
    """Returns the point's `use`: all but the last of every few are for fits."""
    return HELD_OUT if place % every == every - 1 else FIT


class KernelBench:
    """Measures the operators of one grid on one device."""

    def __init__(self, device: torch.device, grid: Grid) -> None:
        self.device = device
        self.grid = grid
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)

    # -- operands and times -------------------------------------------------------------------------------

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device).normal_(0, 0.02)

    def _copies(self, num_bytes: float, most: int) -> int:
        return max(2, min(most, math.ceil(self.grid.copies_bytes / num_bytes)))

    def _caches(
        self, length: int, rows: int, layers: int
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Returns keys and values by layer, in shuffled blocks, and the block table."""
        blocks = -(-length // BLOCK)
        table = torch.randperm(rows * blocks).int().view(rows, blocks).to(self.device)
        shape = (rows * blocks, BLOCK, self.grid.dense.num_kv_heads, self.grid.dense.head_dim)
        return [(self._random(*shape), self._random(*shape)) for _ in range(layers)], table

    def _seconds(self, run: Callable[[], object]) -> float:
        """Returns the median on a GPU; on a CPU the best: every disturbance of a shared machine adds."""
        spread = time_call(run, self.device, self.grid.repeats)
        return spread.median if self.device.type == "cuda" else spread.low

    def _mean_seconds(self, runs: Sequence[Callable[[], object]]) -> float:
        """Returns the seconds of one of several runs that differ only in their operands."""
        return self._seconds(lambda: [run() for run in runs]) / len(runs)

    # -- operators ----------------------------------------------------------------------------------------

    def gemms(self) -> Iterator[GemmPoint]:
        shape = self.grid.dense
        qkv_width = _qkv_width(shape)
        weights = (
            (qkv_width, shape.hidden_size),
            (shape.hidden_size, shape.num_heads * shape.head_dim),
            (2 * shape.intermediate_size, shape.hidden_size),
            (shape.hidden_size, shape.intermediate_size),
            (shape.vocab_size, shape.hidden_size),
        )
        for number, (width, depth) in enumerate(weights):
            copies = self._copies(width * depth * 2, MAX_COPIES)
            matrices = [self._random(width, depth) for _ in range(copies)]
            out_dtype = torch.float32 if number == len(weights) - 1 else None  # logits
            for place, rows in enumerate(self.grid.gemm_rows):
                if rows * width > MAX_PRODUCT:
                    continue
                x = self._random(rows, depth)
                seconds = self._mean_seconds([partial(linear, x, w, out_dtype) for w in matrices])
                yield GemmPoint(rows, ((width, depth, 1),), seconds, use=_use(place + number, 3))

    def attention(self) -> Iterator[AttentionPoint]:
        shape = self.grid.dense
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        for place, (rows, context, queries) in enumerate(self.grid.attention):
            layers = self._copies(rows * context * shape.num_kv_heads * shape.head_dim * 4, MAX_CACHES)
            caches, table = self._caches(context + queries, rows, layers)
            q = self._random(rows, queries, shape.num_heads, shape.head_dim)
            contexts = torch.full((rows,), context, dtype=torch.int32, device=self.device)
            runs = [partial(paged_attention, q, k, v, table, contexts) for k, v in caches]
            seconds = self._mean_seconds(runs)
            yield AttentionPoint(*heads, (context,) * rows, seconds, queries, use=_use(place, 4))

    def prefills(self) -> Iterator[AttentionPoint]:
        shape = self.grid.dense
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        for place, (sequences, new, context) in enumerate(self.grid.prefill):
            caches, table = self._caches(new + context, sequences, 2)
            q = self._random(sequences * new, shape.num_heads, shape.head_dim)
            bounds = torch.arange(0, sequences * new + 1, new, device=self.device, dtype=torch.int32)
            contexts = torch.full((sequences,), context, dtype=torch.int32, device=self.device)
            runs = [partial(prefill_attention, q, k, v, table, bounds, contexts) for k, v in caches]
            seconds = self._mean_seconds(runs)
            yield AttentionPoint(*heads, (context,) * sequences, seconds, 1, new, _use(place, 3))

    def rest(self) -> Iterator[RestPoint]:
        """Measures norms, RoPE with the cache write, the activation, and the sampler."""
        shape = self.grid.dense
        angle = torch.rand(max(self.grid.tokens), shape.head_dim // 2, device=self.device)
        cos, sin = angle.cos(), angle.sin()
        for place, tokens in enumerate(self.grid.tokens):
            use = _use(place, 3)
            sizes = (shape.hidden_size, _qkv_width(shape), shape.intermediate_size)
            yield RestPoint(tokens, *sizes, self._layer_rest_seconds(tokens, cos, sin), use=use)
            if tokens * shape.vocab_size <= MAX_LOGITS:
                yield RestPoint(tokens, 0, 0, 0, self._sampler_seconds(tokens), shape.vocab_size, use)

    def _layer_rest_seconds(self, tokens: int, cos: torch.Tensor, sin: torch.Tensor) -> float:
        shape = self.grid.dense
        norm, head_norm = self._random(shape.hidden_size), self._random(shape.head_dim)
        x, residual = self._random(tokens, shape.hidden_size), self._random(tokens, shape.hidden_size)
        qkv = self._random(tokens, _qkv_width(shape))
        gate_up = self._random(tokens, 2 * shape.intermediate_size)
        positions = torch.arange(tokens, device=self.device)
        rope = (qkv, positions, positions, cos, sin)

        def layer(k: torch.Tensor, v: torch.Tensor) -> None:
            rope_and_write_kv(*rope, k, v, shape.num_heads, head_norm, head_norm, NORM_EPS)
            rms_norm_residual(x, residual, norm, NORM_EPS)
            silu_multiply(gate_up)
            rms_norm_residual(x, residual, norm, NORM_EPS)

        caches, _ = self._caches(tokens, 1, 4)
        return self._mean_seconds([partial(layer, k, v) for k, v in caches])

    def _sampler_seconds(self, tokens: int) -> float:
        logits = torch.randn(tokens, self.grid.dense.vocab_size, device=self.device)
        temperature = torch.ones(tokens, device=self.device)
        seed = torch.randint(0, 2**62, (tokens,), device=self.device)
        positions = torch.arange(tokens, device=self.device)
        return self._seconds(lambda: sample(logits, temperature, seed, positions))

    def experts(self) -> Iterator[ExpertPoint]:
        """Measures the sparse shape's experts, routed at random."""
        shape = self.grid.experts
        count, chosen = shape.num_experts, shape.num_experts_per_token
        hidden, width = shape.hidden_size, shape.expert_intermediate_size
        layers = [
            (self._random(count, 2 * width, hidden), self._random(count, hidden, width)) for _ in range(2)
        ]
        router = self._random(count, hidden)
        for place, rows in enumerate(self.grid.expert_rows):
            x = self._random(rows, hidden)
            if self.device.type == "cuda":
                weights = torch.full((rows, chosen), 1 / chosen, dtype=self.dtype, device=self.device)
                picked = torch.rand(rows, count, device=self.device).topk(chosen, dim=1).indices.int()
                tile = choose_expert_tile(rows * chosen, count)
                runs = [partial(experts_triton, x, weights, picked, *layer, tile) for layer in layers]
            else:
                runs = [partial(expert_feed_forward, x, router, *layer, chosen, True) for layer in layers]
            seconds = self._mean_seconds(runs)
            yield ExpertPoint(rows, count, chosen, hidden, width, seconds, _use(place, 3))


def _qkv_width(shape: DecoderConfig) -> int:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


def measure_kernels(device: torch.device, grid: Grid, note: Callable[[str], None], date: str) -> Measurements:
    """Measures every operator of the grid, and reports progress to `note`."""
    bench = KernelBench(device, grid)
    on_gpu = device.type == "cuda"
    arithmetic = "bf16" if on_gpu else f"float32, {torch.get_num_threads()} threads"
    started = time.perf_counter()

    def collect(what: str, points: Iterable) -> tuple:
        with torch.inference_mode():
            made = tuple(points)
        note(f"[{time.perf_counter() - started:5.1f} s] {len(made)} points: {what}")
        return made

    return Measurements(
        torch.cuda.get_device_name(device) if on_gpu else "CPU",
        f"torch {torch.__version__}, {arithmetic}",
        date,
        gemms=collect("products", bench.gemms()),
        attention=(*collect("attention", bench.attention()), *collect("prefill attention", bench.prefills())),
        rest=collect("norms, RoPE, activation, sampler", bench.rest()),
        experts=collect("experts", bench.experts()),
    )
