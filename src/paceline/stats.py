"""Statistics of a rollout: tokens, decode steps, requests, acceptance of each drafter, precision.

Plain data beside the contract (`backend.py`). A backend fills it in, `report/` turns it into metrics.
"""

from dataclasses import dataclass, field

from paceline.pacing.strategy import Observation
from paceline.pacing.trace import TraceRow
from paceline.types import FinishReason, Precision

# Requests of one rollout whose trace is kept; further ones are only counted.
MOST_REQUESTS = 2048


@dataclass
class RolloutStats:
    """What a backend did since the last `take_stats`; lists have one entry per decode step."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    # Filling the cache for prompts and adding their rows: on a GPU between events in the stream.
    prefill_seconds: float = 0.0
    # Timing steps before the first request, for a pacer without step times; its graph captures included.
    timing_seconds: float = 0.0
    # Waiting for rewards and tools while generation was idle; the sampler fills it in.
    reward_wait_seconds: float = 0.0
    # Capturing CUDA graphs; part of the decode steps that were captured.
    capture_seconds: float = 0.0
    running: list[int] = field(default_factory=list)
    # From one step's outcome to the next one's on the host's clock, less the prefill between them. Where the
    # host reads an outcome late, one entry is too long and the next too short, even negative; sums hold.
    step_seconds: list[float] = field(default_factory=list)
    # How each step ran: `plain`, or drafter and length such as `history:5`.
    strategies: list[str] = field(default_factory=list)
    draft_seconds: float = 0.0  # of all decode steps; the rest is verification, or plain decoding
    verify_seconds: float = 0.0
    drafts: dict[str, "DraftStats"] = field(default_factory=dict)  # by drafter
    precision: "PrecisionStats | None" = None  # None: the policy's own dtype
    trace: list[TraceRow] = field(default_factory=list)  # pacing decisions and their outcomes
    requests: list["RequestTrace"] = field(default_factory=list)  # those that left, in order of leaving
    requests_left_out: int = 0  # beyond `MOST_REQUESTS`
    drafter_version: int | None = None  # of the head that drafts now; None: no drafter has one
    graph_pool_bytes: int | None = None  # GPU memory that captured graphs hold; None: no graphs
    replicas: "ReplicaStats | None" = None  # None: one generator

    def note(self, observation: Observation) -> None:
        """Records one step, when its outcome is read."""
        strategy = observation.decision.strategy
        self.running.append(observation.running)
        self.strategies.append(str(strategy))
        self.draft_seconds += observation.draft_seconds
        self.verify_seconds += observation.verify_seconds
        if strategy.count:
            self.drafts.setdefault(strategy.drafter, DraftStats()).note(observation)
        if not self.trace or self.trace[-1].decision is not observation.decision:
            self.trace.append(TraceRow(observation.decision))
        self.trace[-1].note(observation)

    def note_request(self, trace: "RequestTrace") -> None:
        """Records the trace of a request that has left; beyond `MOST_REQUESTS` it is only counted."""
        if len(self.requests) < MOST_REQUESTS:
            self.requests.append(trace)
        else:
            self.requests_left_out += 1


@dataclass(frozen=True)
class RequestTrace:
    """The stages of a request in a generator: when it began to wait, prefill, decode, and when it left.

    Times are the host's `time.perf_counter`; a preempted request waits again. The row is -1 while a request
    has none.
    """

    id: str
    moments: tuple[tuple[str, float, int], ...]  # stage ("waiting", "prefill", "decode", "left"), begin, row
    prompt_tokens: int
    tokens: int
    reason: FinishReason
    replica: int = 0


@dataclass(frozen=True)
class PrecisionStats:
    """Statistics of a low-precision rollout."""

    precision: Precision
    quantise_seconds: float  # the last weight update's
    kv_error: float  # of attention with the FP8 cache, relative, in the worst layer at the last calibration
    kv_base_layers: int  # whose keys and values fell back to the policy's own dtype


@dataclass(frozen=True)
class ReplicaStats:
    """Statistics of several generators behind one queue, since they were started."""

    count: int  # running now
    restarts: int  # of processes that died, hung or ran out of memory
    retried_requests: int  # because of a restart
    idle_share: float  # of their time while anything was outstanding, since the last `take_stats`
    unused_share: float  # of it, in which no drafter was trained either


@dataclass
class DraftStats:
    """Acceptance of a drafter's proposals; a draft is the proposal for one row in one step, even if empty."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    # By position i: drafts whose token i was accepted.
    accepted_at: list[int] = field(default_factory=list)
    # Drafts of which at least one token was verified.
    begun: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens emitted per draft, the policy's own token included."""
        return 1.0 + self.accepted / max(1, self.drafts)

    @property
    def first_accepted(self) -> float:
        """The share of the begun drafts whose likeliest first token was accepted."""
        return sum(self.accepted_at[:1]) / max(1, self.begun)

    @property
    def accepted_shares(self) -> list[float]:
        """The share of drafts whose token i was accepted."""
        return [accepted / max(1, self.drafts) for accepted in self.accepted_at]

    def note(self, observation: Observation) -> None:
        """Records one step's drafts."""
        self.drafts += observation.drafts
        self.proposed += observation.proposed
        self.accepted += sum(observation.accepted_at)
        self.begun += observation.begun
        self.accepted_at += [0] * (observation.decision.strategy.count - len(self.accepted_at))
        for i, accepted in enumerate(observation.accepted_at):
            self.accepted_at[i] += accepted
