"""OpenAI's `/v1/responses`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.serving.schemas.base import MAX_TOP_LOGPROBS, Answer, Body, Json, Sampled
from paceline.serving.schemas.chat import NamedFunction, PlainFormat


class InputText(Body):
    """A piece of a message's text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


InputContent = str | list[InputText]


def only_text(content: Any) -> Any:
    """Refuses parts that are no text by their name."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and not kind.endswith("text"):
            raise ValueError(f"parts of type {kind!r}: this server takes text only")
    return content


class InputMessage(Body):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    _only_text = field_validator("content", mode="before")(only_text)


class CallItem(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutput(Body):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent
    id: str | None = None
    status: str | None = None

    _only_text = field_validator("output", mode="before")(only_text)


class ReasoningItem(Body):
    """What the model thought."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[InputText] = []
    content: list[InputText] | None = None
    encrypted_content: None = None
    status: str | None = None


InputItem = InputMessage | CallItem | CallOutput | ReasoningItem


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ChosenTool(NamedFunction):
    """The one tool that the model must call."""

    type: Literal["function"]


class SchemaText(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: Json = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    """What the answer's text must look like."""

    format: Annotated[PlainFormat | SchemaText, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class ResponsesRequest(Sampled):
    """A conversation to continue. Nothing is stored: each request carries all of its conversation."""

    model: str
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    stream: bool = False
    tools: list[FunctionTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    previous_response_id: None = None
    conversation: None = None
    background: Literal[None, False] = None
    truncation: Literal[None, "disabled"] = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    # Of no effect on what is sampled.
    store: bool | None = None
    metadata: Json | None = None
    reasoning: Json | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream_options: Json | None = None


class ResponsesUsage(Answer):
    """The tokens of a request."""

    input_tokens: int
    input_tokens_details: Json
    output_tokens: int
    output_tokens_details: Json
    total_tokens: int


class ResponsesAnswer(Answer):
    """The answer: messages, thoughts and calls in their order."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: Json | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Json]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str | Json
    tools: list[Json]
    top_p: float
    metadata: Json
    text: Json
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    masked: bool
