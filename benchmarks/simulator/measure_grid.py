"""Which sizes `calibrate.py` measures, on a GPU and on a CPU.

Shapes of one model family suffice: the curves are in bytes and operations.
"""

from dataclasses import dataclass

from paceline.policy.config import DecoderConfig
from paceline.policy.shapes import SHAPES


@dataclass(frozen=True)
class Grid:
    """The sizes to measure at."""

    dense: DecoderConfig  # whose products, attention and other operators are timed
    experts: DecoderConfig  # whose experts are
    gemm_rows: tuple[int, ...]
    attention: tuple[tuple[int, int, int], ...]  # rows, context, queries
    prefill: tuple[tuple[int, int, int], ...]  # sequences, new tokens, context
    tokens: tuple[int, ...]  # for norms and the sampler
    expert_rows: tuple[int, ...]
    copies_bytes: int  # of operands that one measurement goes through, so that none stays in a cache
    repeats: int


def _decode(contexts: dict[int, tuple[int, ...]]) -> tuple[tuple[int, int, int], ...]:
    """Returns decode steps with one query a row, from the contexts by number of rows."""
    return tuple((rows, context, 1) for rows, listed in contexts.items() for context in listed)


_GPU_DECODE = {
    1: (256, 1024, 8192, 32000),
    4: (2048,),
    8: (512, 8192),
    32: (256, 1024, 4096),
    64: (256,),
    128: (512, 2048),
    256: (256, 1024),
}
_GPU_VERIFY = ((1, 1024, 4), (8, 1024, 4), (32, 1024, 4), (8, 1024, 8), (32, 2048, 8))
_CPU_DECODE = {1: (64, 512), 4: (64, 256), 16: (64, 256), 32: (128,)}
_CPU_VERIFY = ((4, 64, 4), (4, 256, 6), (8, 128, 6))

GPU = Grid(
    dense=SHAPES["qwen3-8b"],
    experts=SHAPES["qwen3-30b-a3b"],
    gemm_rows=(1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096, 16384),
    attention=(*_decode(_GPU_DECODE), *_GPU_VERIFY),
    prefill=((64, 128, 0), (1, 4096, 0), (1, 8192, 0), (1, 8192, 20000), (4, 1024, 1024)),
    tokens=(1, 16, 64, 256, 1024, 8192),
    expert_rows=(1, 4, 16, 64, 256, 1024, 4096),
    copies_bytes=200_000_000,
    repeats=5,
)

_CPU_DENSE = DecoderConfig(
    family="qwen3",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_positions=1024,
)
_CPU_EXPERTS = DecoderConfig(
    family="qwen3_moe",
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=384,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=1024,
    num_experts=8,
    num_experts_per_token=2,
    expert_intermediate_size=128,
)
CPU = Grid(
    dense=_CPU_DENSE,
    experts=_CPU_EXPERTS,
    gemm_rows=(1, 8, 32, 64, 128, 256),
    attention=(*_decode(_CPU_DECODE), *_CPU_VERIFY),
    prefill=((4, 64, 0), (8, 32, 0), (1, 128, 0)),
    tokens=(1, 8, 32, 128),
    expert_rows=(1, 8, 32, 128),
    copies_bytes=4_000_000,
    repeats=3,
)
