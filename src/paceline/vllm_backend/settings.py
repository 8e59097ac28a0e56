"""The settings of the process that runs vLLM; plain data, read in both environments."""

import json
from dataclasses import dataclass, field
from typing import Any

from paceline.records import parse, plain


@dataclass(frozen=True)
class DraftSettings:
    """How vLLM speculates."""

    drafter: str  # the recipe's name for it, and that of its statistics
    method: str  # vLLM's name
    tokens: int  # proposed per step
    folder: str = ""  # of the head or the draft model; empty: the method needs none
    max_running: int = 0  # propose while at most this many requests run; 0: always
    options: dict[str, Any] = field(default_factory=dict)  # of vLLM's `speculative_config`, as given


@dataclass(frozen=True)
class VllmSettings:
    """Everything that the process needs to make its engine."""

    folder: str  # the policy's Hugging Face folder
    dtype: str
    max_positions: int  # of a request, prompt and response
    max_running: int
    kv_bytes: int  # of the KV cache; 0: what vLLM takes by itself
    prefill_tokens: int  # per step at most
    seed: int
    eos_token_ids: tuple[int, ...]
    request_seeds: bool
    sleeps: bool = False  # gives its memory to a learner on the same GPU
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    draft: DraftSettings | None = None
    engine: dict[str, Any] = field(default_factory=dict)  # options of vLLM's engine, as given

    def dump(self) -> str:
        return json.dumps(plain(self))

    @classmethod
    def load(cls, text: str) -> "VllmSettings":
        return parse(cls, json.loads(text))
