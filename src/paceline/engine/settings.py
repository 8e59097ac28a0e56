"""An engine's sizes and precision; `factory.py` fills them from a recipe and the machine."""

from dataclasses import dataclass

from paceline.types import Precision


@dataclass(frozen=True)
class EngineSettings:
    """The native engine's settings; sizes are in tokens unless they say otherwise."""

    max_running: int = 256  # requests decoded together
    kv_tokens: int = 65536  # size of the KV pool
    # Longest prompt and response together; 0: unknown. The pool always holds one request this long, whatever
    # types its layers change to, and drafters size their state by it.
    request_tokens: int = 0
    max_length: int = 0  # longest sequence; 0: the policy's own limit
    prefill_tokens: int = 16384  # per chunk
    # Steps launched before the first one's outcome is read; no effect on a CPU.
    steps_ahead: int = 4
    admission: str = "fifo"  # or "longest": by expected length, so that the tail starts early
    deterministic: bool = False  # GPU: a completion's bits do not depend on its batch
    verify: str = "shared-noise"  # or "rejection"
    # Bytes that captured steps may take, which limits how deep a batch may speculate; 0: no limit.
    graph_memory: int = 0
    # Most tokens proposed for a row; with the batch, the largest step that graphs reserve memory for.
    max_proposal: int = 15
    trees: bool = False  # proposals may be trees, whose steps hold more
    start_seconds: float = 0.0  # to time steps before the first request, where a pacer asks for it
    precision: Precision = Precision.BASE
    base_precision_layers: int = 0  # at either end of the stack, with FP8
    kv_scales_per_head: bool = False
    keeps_cache: bool = False  # over a weight update: rows continue with keys and values of older weights
    keeps_prefixes: bool = False  # prompts start from what finished requests left in the cache
    records_routing: bool = False  # completions carry the experts that their tokens went through

    def __post_init__(self) -> None:
        if self.keeps_prefixes and self.keeps_cache:
            raise ValueError("keeps_prefixes with keeps_cache: a prefix of older weights would be continued")
        if self.trees and self.verify != "shared-noise":
            raise ValueError(
                f"trees with verify = {self.verify!r}: they are verified by shared-noise only; "
                "use chains (rollout.speculation.shape=chain) or shared-noise"
            )
