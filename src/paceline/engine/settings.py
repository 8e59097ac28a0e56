"""How an engine is sized and what it computes in; `backends/native.py` fills this from a recipe and the
machine.
"""

from dataclasses import dataclass

from paceline.backend import BASE_PRECISION


@dataclass(frozen=True)
class EngineSettings:
    max_running: int = 256
    kv_tokens: int = 65536
    # Prompt and response at the longest; 0: not known. The pool holds one this long, if it ever did, whatever
    # types its layers change to, and drafters size what they keep by it.
    request_tokens: int = 0
    max_length: int = 0  # longest sequence; 0: the policy's own limit
    prefill_tokens: int = 16384  # per chunk
    steps_ahead: int = 4  # launched before the first one's outcome is read; a CPU has nothing to run ahead of
    admission: str = "fifo"  # or "longest": by `Request.expected_tokens`, so that the tail starts early
    deterministic: bool = False
    verify: str = "shared-noise"  # or "rejection"
    graph_memory: int = (
        0  # bytes that captured steps may take, which limits how deep a batch may speculate; 0: no limit
    )
    # tokens that drafters propose for a row at most: with the batch, the largest step that graphs have memory
    # for
    max_proposal: int = 15
    precision: str = BASE_PRECISION  # or "fp8" or "fp8+kv"
    base_precision_layers: int = 0  # at either end, with FP8
    kv_scales_per_head: bool = False
    records_routing: bool = False  # completions say which experts they went through
