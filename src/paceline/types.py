"""The data that the packages exchange: requests, completions, samples.

Plain data without torch. A backend turns requests into completions, a task scores them, the learner learns
from the groups they form.
"""

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum


class Purpose(StrEnum):
    """The purpose of a request: training and evaluation use different noise for the same prompt and step."""

    TRAIN = "train"
    EVAL = "eval"


# The lowest temperature above 0. Logits divided by less can pass float32's range, where no token is likelier.
MIN_TEMPERATURE = 1e-5


class Precision(StrEnum):
    """What rollouts are computed in. The learner's parameters never change type."""

    # The policy's own dtype: bfloat16 on a GPU, float32 on a CPU, unless the recipe sets another.
    BASE = "base"
    FP8 = "fp8"  # layer weights and activations in blockwise FP8
    FP8_KV = "fp8+kv"  # and keys and values
    KV = "kv"  # keys and values alone in FP8

    @classmethod
    def _missing_(cls, value: object) -> "Precision | None":
        return cls.BASE if value == "bf16" else None  # the earlier spelling of `base` in recipes and runs

    @property
    def fp8_weights(self) -> bool:
        """Whether the layers' projections multiply in FP8."""
        return self in (Precision.FP8, Precision.FP8_KV)

    @property
    def fp8_kv(self) -> bool:
        """Whether the KV cache holds FP8."""
        return self in (Precision.FP8_KV, Precision.KV)

    @property
    def without_fp8_kv(self) -> "Precision":
        """This precision with keys and values in the policy's own dtype."""
        return Precision.FP8 if self.fp8_weights else Precision.BASE


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_tokens, or the model's own limit
    ABORTED = "aborted"
    REFUSED = "refused"  # could never run: `Completion.error` has the reason


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are sampled, and what ends it."""

    temperature: float = 1.0  # 0: the most likely token
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # texts that end the response; the token that completes one is its last
    ignore_eos: bool = False
    top_logprobs: int = 0  # also report the most likely tokens at each position, this many

    @property
    def truncates(self) -> bool:
        """Whether the distribution is cut: by top-p, top-k or min-p."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True)
class Request:
    """One sequence to generate; with shared noise its tokens depend on the weights and these fields only."""

    id: str
    prompt: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    group: str = ""  # requests of one group share their prompt
    expected_tokens: int = 0  # predicted response length, for `rollout.admission: longest`
    hold: bool = False  # keep the finished sequence's cache for a request that `continues` this one
    purpose: Purpose = Purpose.TRAIN  # drafters do not learn from evaluations
    continues: str = ""  # id of a held request whose prompt and response begin this prompt
    grammar: str = ""  # that the response must follow; masks the distribution (`engine/grammars.py`)
    scope: str = ""  # where the cache keeps prefixes, only requests of one scope share them


@dataclass(frozen=True)
class Segment:
    """A run of response tokens `[start, stop)` with one origin.

    A plain response is one sampled segment. Turns add observations (not sampled, hence outside the loss); a
    rollout that continues after a weight update adds a segment with the new version.
    """

    start: int
    stop: int
    weight_version: int
    sampled: bool = True


@dataclass(frozen=True)
class Routing:
    """The experts that a rollout chose, for every token of its forward passes.

    These are prompt and response without the last token, which was sampled but not run.
    """

    experts: bytes  # [tokens, layers with experts, choices], little-endian
    layers: int
    choices: int
    item_bytes: int  # 1: unsigned; 2: signed

    @property
    def tokens(self) -> int:
        """The number of tokens whose experts are recorded."""
        return len(self.experts) // (self.layers * self.choices * self.item_bytes)


@dataclass(frozen=True)
class Completion:
    """A finished request: its tokens, their logprobs and origins, and why it ended."""

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # full-vocabulary logprob of each token at the request's temperature
    finish_reason: FinishReason
    segments: tuple[Segment, ...]
    error: str = ""
    top_logprobs: tuple[dict[int, float], ...] = ()  # by position, where the request asked for them
    routing: Routing | None = None  # where `rollout.router_replay` recorded it
    reused_tokens: int = 0  # of the prompt, whose keys and values an earlier request had left

    @property
    def loss_mask(self) -> list[bool]:
        """Which of the tokens are in the loss: those that the policy sampled."""
        mask = [False] * len(self.tokens)
        for segment in self.segments:
            mask[segment.start : segment.stop] = [segment.sampled] * (segment.stop - segment.start)
        return mask

    @property
    def truncated(self) -> bool:
        """Whether it ended at its length limit."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True)
class Score:
    """A task's score of one completion; `reward` is the weighted sum that the learner uses."""

    reward: float
    correct: bool
    components: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A completion and its score."""

    completion: Completion
    score: Score


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, in sample order."""

    prompt_id: str
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> list[float]:
        """The samples' rewards, in sample order."""
        return [sample.score.reward for sample in self.samples]


def request_seed(
    purpose: Purpose, run_seed: int, step: int, prompt_id: str, occurrence: int, sample_index: int
) -> int:
    """Returns a signed 64-bit seed, a pure function of the arguments: retries and restarts repeat it."""
    identity = json.dumps([str(purpose), run_seed, step, prompt_id, occurrence, sample_index])
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
