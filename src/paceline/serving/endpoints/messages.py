"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from collections.abc import AsyncIterator
from typing import Any

from paceline.serving.conversation import (
    ANY_TOOL,
    NO_TOOL,
    SOME_TOOL,
    Block,
    Conversation,
    Spoken,
    blocks,
    json_object,
    speak,
    template_variables,
)
from paceline.serving.dialect import Text, Thought, ToolUse
from paceline.serving.endpoints.base import Endpoint, event
from paceline.serving.errors import ApiError, invalid
from paceline.serving.schemas.base import Json
from paceline.serving.schemas.messages import (
    AnsweredBlock,
    AnthropicMessage,
    AnthropicUsage,
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline.serving.service import Call

CHOICES = {"auto": ANY_TOOL, "any": SOME_TOOL, "none": NO_TOOL}


class AnthropicEndpoint(Endpoint):
    """Tells errors as Anthropic does."""

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic()

    def error_event(self, error: ApiError) -> str:
        return event(self.error(error), "error")


class Messages(AnthropicEndpoint):
    """Anthropic's messages."""

    path = "/v1/messages"
    body = MessagesRequest
    answer = MessagesAnswer
    summary = "Continues a conversation."

    async def handle(self, body: MessagesRequest, call: Call) -> MessagesAnswer | AsyncIterator[str]:
        self.service.check_model(body.model)
        spoken = await speak(
            self.service,
            call,
            conversation_of(body),
            body,
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            stream=body.stream,
        )
        writer = _Writer(self, call, spoken)
        return writer.events() if body.stream else await writer.whole()


class CountTokens(AnthropicEndpoint):
    """Anthropic's token count."""

    path = "/v1/messages/count_tokens"
    body = CountTokensRequest
    answer = TokenCount
    summary = "Counts the tokens of a conversation."

    async def handle(self, body: CountTokensRequest, call: Call) -> TokenCount:
        self.service.check_model(body.model)
        conversation = conversation_of(body)
        prompt = await self.service.render(conversation.messages, template_variables(conversation))
        return TokenCount(input_tokens=len(prompt.tokens))


class _Writer:
    """Writes one request's answer."""

    def __init__(self, endpoint: Messages, call: Call, spoken: Spoken) -> None:
        self.model = endpoint.service.model
        self.call = call
        self.spoken = spoken

    async def whole(self) -> MessagesAnswer:
        content = [self._block(block, block.text) async for block, _, done in blocks(self.spoken) if done]
        return self._message(content, True)

    async def events(self) -> AsyncIterator[str]:
        yield _event("message_start", message=self._message([], False).model_dump(exclude_unset=True))
        index = -1
        async for block, new, done in blocks(self.spoken):
            if block.index != index:
                index = block.index
                begun = self._block(block, "").model_dump(exclude_unset=True)
                yield _event("content_block_start", index=index, content_block=begun)
            if new:
                yield _event("content_block_delta", index=index, delta=_delta(block, new))
            if done:
                yield _event("content_block_stop", index=index)
        last = self._message([], True)
        delta = {"stop_reason": last.stop_reason, "stop_sequence": last.stop_sequence}
        yield _event("message_delta", delta=delta, usage=last.usage.model_dump())
        yield _event("message_stop")

    def _message(self, content: list[AnsweredBlock], ended: bool) -> MessagesAnswer:
        usage = self.spoken.batch.usage
        reused = usage.prompt_tokens_details.cached_tokens
        return MessagesAnswer(
            id=f"msg_{self.call.id}",
            type="message",
            role="assistant",
            model=self.model,
            content=content,
            stop_reason=self._reason() if ended else None,
            stop_sequence=(self.spoken.batch.choices[0].stop.found or None) if ended else None,
            usage=AnthropicUsage(
                input_tokens=usage.prompt_tokens - reused,
                output_tokens=usage.completion_tokens,
                cache_read_input_tokens=reused,
                cache_creation_input_tokens=0,
            ),
        )

    def _reason(self) -> Any:
        (choice,) = self.spoken.batch.choices
        if choice.finish == "length":
            return "max_tokens"
        if choice.stop.found:
            return "stop_sequence"
        return "tool_use" if self.spoken.called[0] else "end_turn"

    def _block(self, block: Block, text: str) -> AnsweredBlock:
        if block.kind is ToolUse:
            arguments = json_object(text) if text else {}
            name = f"toolu_{self.call.id}_{block.index}"
            return AnsweredBlock(type="tool_use", id=name, name=block.name, input=arguments)
        if block.kind is Thought:
            return AnsweredBlock(type="thinking", thinking=text, signature="")
        return AnsweredBlock(type="text", text=text)


def _delta(block: Block, new: str) -> Json:
    if block.kind is ToolUse:
        return {"type": "input_json_delta", "partial_json": new}
    if block.kind is Thought:
        return {"type": "thinking_delta", "thinking": new}
    assert block.kind is Text
    return {"type": "text_delta", "text": new}


def _event(kind: str, **content: Any) -> str:
    return event({"type": kind, **content}, kind)


def conversation_of(body: CountTokensRequest) -> Conversation:
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": _plain(body.system)})
    for message in body.messages:
        messages += _template_messages(message)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({"description": tool.description} if tool.description is not None else {}),
                "parameters": tool.input_schema,
            },
        }
        for tool in body.tools or ()
    ]
    choice = ANY_TOOL
    if body.tool_choice is not None:
        choice = CHOICES.get(body.tool_choice.type, body.tool_choice.name or "")
        if not tools and choice not in (ANY_TOOL, NO_TOOL):
            raise invalid("tool_choice", "there are no tools to choose from")
    wanted = body.output_config.format if body.output_config is not None else None
    schema = wanted.schema_ if wanted is not None else None
    return Conversation(messages, tools, choice, schema, "output_config.format")


def _template_messages(message: AnthropicMessage) -> list[Json]:
    """Returns a message as chat templates take it: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    known: list[Json] = []
    said: Json = {"role": message.role, "content": ""}
    for block in message.content:
        match block:
            case ToolResultBlock():
                known.append(
                    {"role": "tool", "content": _plain(block.content), "tool_call_id": block.tool_use_id}
                )
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                said.setdefault("tool_calls", []).append(
                    {"id": block.id, "type": "function", "function": function}
                )
            case ThinkingBlock():
                said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
            case TextBlock():
                said["content"] += block.text
    return [*known, said] if len(said) > 2 or said["content"] or not known else known


def _plain(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
