"""Anthropic's `/v1/messages`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.serving.schemas.base import MAX_STOPS, Answer, Body, Json, Sampled, StopText


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: Json | None = None
    citations: list[Any] | None = None


class ToolUseBlock(Body):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    cache_control: Json | None = None
    caller: Json | None = None


class ToolResultBlock(Body):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool | None = None
    cache_control: Json | None = None


class ThinkingBlock(Body):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]
KNOWN_BLOCKS = ("text", "tool_use", "tool_result", "thinking")


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]

    @field_validator("content", mode="before")
    @classmethod
    def _known_blocks(cls, content: Any) -> Any:
        for block in content if isinstance(content, list) else ():
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in KNOWN_BLOCKS:
                raise ValueError(f"blocks of type {kind!r}: this server takes {', '.join(KNOWN_BLOCKS)}")
        return content


class AnthropicTool(Body):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: Json
    cache_control: Json | None = None
    strict: bool | None = None


class AnthropicToolChoice(Body):
    """Whether, and which, tool is called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnswerFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Body):
    """What an answer must look like."""

    format: AnswerFormat | None = None


class Thinking(Body):
    """Of no effect: a policy thinks as its template has it."""

    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountTokensRequest(Body):
    """A conversation whose tokens are counted."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = Field(default=None, max_length=128)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(Sampled, CountTokensRequest):
    """A conversation to continue."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    metadata: Json | None = None
    service_tier: str | None = None


class TokenCount(Answer):
    """The tokens of a prompt."""

    input_tokens: int


class AnthropicUsage(Answer):
    """The tokens of a request: those of the prompt that were in the cache are counted on their own."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class AnsweredBlock(Answer):
    """A text, thoughts or a call, by its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None


class MessagesAnswer(Answer):
    """The model's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage
