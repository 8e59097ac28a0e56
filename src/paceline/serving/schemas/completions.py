"""OpenAI's `/v1/completions`."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.serving.schemas.base import (
    MAX_CHOICES,
    MAX_STOPS,
    Answer,
    Json,
    Sampled,
    StopText,
    StreamOptions,
    TokenId,
    Usage,
    WeightVersion,
)

Tokens = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(Sampled):
    """A text, or tokens, to continue; several are continued each on its own."""

    model: str
    prompt: str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MAX_CHOICES)]
    max_tokens: int = Field(default=16, ge=1, lt=2**31)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: Literal[False] = False
    suffix: Literal[None, ""] = None
    best_of: Literal[None, 1] = None
    logit_bias: Annotated[Json, Field(max_length=0)] | None = None
    add_special_tokens: bool = Field(default=True, description="of the tokenizer, to a text")
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = Field(default=False, description="names of tokens: `token_id:N`")
    user: str | None = None


class CompletionLogprobs(Answer):
    """The tokens of a choice, their logprobs, and where in the text each begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    """One continuation, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[WeightVersion] | None = None


class CompletionAnswer(Answer):
    """The answer, and an event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
