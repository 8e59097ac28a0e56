"""What the requests of several APIs have in common."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.types import MIN_TEMPERATURE, SamplingParams

# Seeds are signed 64-bit integers.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**63)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
# Texts that end a response.
MAX_STOPS = 16
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


class Body(BaseModel):
    """A request; a field that is not listed may change its meaning, so it is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Answer(BaseModel):
    """Something sent to a client."""

    model_config = ConfigDict(protected_namespaces=())


class Sampled(Body):
    """How tokens are sampled: OpenAI's fields, and those that vLLM adds under the same names."""

    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="0 or -1: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Seed | None = Field(default=None, description="the same seed gives the same tokens")
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    repetition_penalty: float | None = Field(default=None, ge=1, le=1)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=8)

    def sampling(self, max_tokens: int, stop: tuple[str, ...], top_logprobs: int) -> SamplingParams:
        """Returns the engine's parameters; what is not given is temperature 1 without truncation."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            max_tokens=max_tokens,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=stop,
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
        )


class StreamOptions(Body):
    """What a stream carries beside its text."""

    include_usage: bool = False
    include_obfuscation: bool = False  # never done: there is nobody to hide lengths from
    continuous_usage_stats: bool = False


class PromptTokensDetails(Answer):
    """How much of a prompt was in the cache."""

    cached_tokens: int = 0


class Usage(Answer):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class WeightVersion(Answer):
    """Tokens from `start` to `end` were sampled under these weights."""

    version: str
    start: int
    end: int


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Returns the texts that end a response."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


Json = dict[str, Any]
