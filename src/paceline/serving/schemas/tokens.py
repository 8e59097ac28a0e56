"""Tokens in, tokens out: `/inference/v1/generate`, in vLLM's schema."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.serving.schemas.base import (
    MAX_CHOICES,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    Answer,
    Body,
    Sampled,
    StopText,
    StreamOptions,
    TokenId,
    Usage,
    WeightVersion,
)
from paceline.serving.schemas.chat import ChatLogprobs


class TokenSampling(Sampled):
    """How tokens are sampled. `seed` is the sampling noise's own where `n` is 1."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=1)
    skip_special_tokens: bool = True  # of no effect: there is no text
    detokenize: bool = True
    include_stop_str_in_output: bool = False


class GenerateRequest(Body):
    """Tokens to continue."""

    request_id: str | None = Field(default=None, max_length=256)
    model: str | None = None
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: TokenSampling
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: Literal[0] = 0
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"


class GenerateChoice(Answer):
    """The tokens of a choice, or what is new of them."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    weight_versions: list[WeightVersion] | None = None


class PromptLogprob(Answer):
    """The logprob of a prompt's token, at temperature 1."""

    logprob: float


class GenerateAnswer(Answer):
    """The answer, and an event of its stream."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateChoice]
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None
