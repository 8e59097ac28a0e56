"""OpenAI's `/v1/chat/completions`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.serving.schemas.base import (
    MAX_CHOICES,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    Answer,
    Body,
    Json,
    Sampled,
    StopText,
    StreamOptions,
    Usage,
    WeightVersion,
)


class TextPart(Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


def text_parts(content: Any) -> Any:
    """Refuses parts that are no text by their name."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"parts of type {kind!r}: this server takes text only")
    return content


Content = str | list[TextPart]


class FunctionCall(Body):
    """A call of a function: its arguments are JSON in a text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    _only_text = field_validator("content", mode="before")(text_parts)


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: Json = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """The schema that an answer must follow."""

    name: str
    description: str | None = None
    schema_: Json = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(Sampled):
    """A conversation to continue."""

    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Json | None = Field(default=None, description="variables of the chat template")
    return_token_ids: bool = False
    logit_bias: Annotated[Json, Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    # Of no effect on what is sampled.
    user: str | None = None
    metadata: Json | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TokenLogprob(Answer):
    """A token and its logprob."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChosenLogprob(TokenLogprob):
    """The sampled token, and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob] = []


class ChatLogprobs(Answer):
    """The tokens of a choice."""

    content: list[ChosenLogprob]
    refusal: None = None


class AnsweredCall(Answer):
    """A call of a function that the model made, or what is new of it in a stream."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: dict[str, str]


class AnsweredMessage(Answer):
    """The model's message, or what is new of it in a stream."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(Answer):
    """One continuation."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    token_ids: list[int] | None = None
    weight_versions: list[WeightVersion] | None = None


class ChatAnswer(Answer):
    """The answer. `masked` says that a grammar cut the distribution that the tokens come from."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    masked: bool = False


class ChatChunkChoice(Answer):
    """What is new of one continuation."""

    index: int
    delta: AnsweredMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    token_ids: list[int] | None = None


class ChatChunk(Answer):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
