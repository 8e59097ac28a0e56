"""The memory of captured graphs, and what may be captured within a budget.

All graphs allocate from one pool, one after the other, and none keeps more than its small outputs: the pool is as large as
the largest step needs, nearly all of it for logits and the widest activations, which grow with the tokens of a step. So a
budget in bytes is a limit on tokens per step, and deep proposals exist for small batches only.
"""

import torch

from paceline.policy.config import DecoderConfig

LARGE_STEP = 64  # tokens from which a step's memory is in proportion to them


class GraphMemory:
    def __init__(self, config: DecoderConfig, score_bytes: int, activation_bytes: int, budget: int) -> None:
        self.budget = budget  # bytes; 0: no limit
        self.pool_bytes = 0  # what the pool has taken from the device
        self.graph_bytes = 0  # what captures took beside it: the graphs themselves, and kernels loaded meanwhile
        self.largest = 0  # tokens of the largest step captured
        # Before anything has been measured: logits, and what the feed-forward layer holds at once.
        self._estimate = score_bytes * config.vocab_size + activation_bytes * (3 * config.intermediate_size + 6 * config.hidden_size)

    def note(self, tokens: int, pool_bytes: int, graph_bytes: int) -> None:
        """A step of so many tokens was captured, and took so much more."""
        self.pool_bytes += pool_bytes
        self.graph_bytes += graph_bytes
        self.largest = max(self.largest, tokens)

    @property
    def bytes_per_token(self) -> float:
        return self.pool_bytes / self.largest if self.largest >= LARGE_STEP else self._estimate

    def max_queries(self, bucket: int) -> int:
        """Tokens per row that a step of this bucket may look at; at least 1, since plain decoding always runs."""
        if not self.budget:
            return 1 << 30
        return max(1, int(self.budget / self.bytes_per_token) // bucket)


def pool_bytes_taken() -> int:
    """Bytes that torch holds of the device; only a pool grows it while a graph is being captured."""
    return torch.cuda.memory_reserved()
