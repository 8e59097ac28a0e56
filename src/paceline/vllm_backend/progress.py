"""What one step of vLLM did, in plain types."""

from dataclasses import dataclass, field


class RequestRefused(ValueError):
    """vLLM refuses a request; the message is its reason."""


@dataclass(frozen=True)
class Progress:
    """What one step added to a request."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str  # "stop" or "length"; empty: still running
    prompt_logprobs: list[float] = field(default_factory=list)  # of a text that is only read


@dataclass
class StepStats:
    """What one step of vLLM did."""

    seconds: float
    drafts: int = 0
    proposed: int = 0
    accepted_at: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    preemptions: int = 0
