"""`/v1/responses`: OpenAI's API of items, without a store."""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from paceline.serving.conversation import (
    ANY_TOOL,
    NO_TOOL,
    Block,
    Conversation,
    Spoken,
    blocks,
    json_object,
    speak,
)
from paceline.serving.dialect import Text, Thought, ToolUse
from paceline.serving.endpoints.base import Endpoint, TokenTexts, event, now
from paceline.serving.errors import invalid
from paceline.serving.schemas.base import Json
from paceline.serving.schemas.responses import (
    CallItem,
    CallOutput,
    ChosenTool,
    InputContent,
    InputMessage,
    ReasoningItem,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    SchemaText,
)
from paceline.serving.service import Call

LOGPROBS = "message.output_text.logprobs"


class Responses(Endpoint):
    """OpenAI's responses."""

    path = "/v1/responses"
    body = ResponsesRequest
    answer = ResponsesAnswer
    summary = "Continues a conversation, in items."

    async def handle(self, body: ResponsesRequest, call: Call) -> ResponsesAnswer | AsyncIterator[str]:
        self.service.check_model(body.model)
        spoken = await speak(
            self.service,
            call,
            conversation_of(body),
            body,
            max_tokens=body.max_output_tokens,
            top_logprobs=body.top_logprobs or 0,
            stream=body.stream,
        )
        writer = _Writer(self, body, call, spoken)
        return writer.events() if body.stream else await writer.whole()


class _Writer:
    """Writes one request's answer."""

    def __init__(self, endpoint: Responses, body: ResponsesRequest, call: Call, spoken: Spoken) -> None:
        self.body = body
        self.call = call
        self.spoken = spoken
        self.model = endpoint.service.model
        self.created = now()
        self.texts = TokenTexts(endpoint.service)
        self.output: list[Json] = []
        self._numbers = count()

    async def whole(self) -> ResponsesAnswer:
        async for block, _, done in blocks(self.spoken):
            if done:
                self.output.append(self._item(block, block.text, "completed"))
        return self._answer(ended=True)

    async def events(self) -> AsyncIterator[str]:
        started = self._answer(ended=False).model_dump()
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        index = -1
        async for block, new, done in blocks(self.spoken):
            if block.index != index:
                index = block.index
                item = self._item(block, "", "in_progress")
                if block.kind is not ToolUse:
                    item["content"] = []
                yield self._event("response.output_item.added", output_index=index, item=item)
                if block.kind is Text:
                    yield self._event(
                        "response.content_part.added", **self._place(block), part=_text_part("")
                    )
            if new:
                logprobs: Json = {"logprobs": []} if block.kind is Text else {}
                yield self._event(f"{_kind(block)}.delta", **self._place(block), delta=new, **logprobs)
            if done:
                for one in self._done(block):
                    yield one
        last = self._answer(ended=True)
        yield self._event(f"response.{last.status}", response=last.model_dump())

    def _done(self, block: Block) -> list[str]:
        place = self._place(block)
        item = self._item(block, block.text, "completed")
        self.output.append(item)
        ends = self._event("response.output_item.done", output_index=block.index, item=item)
        if block.kind is ToolUse:
            told = {"arguments": block.text, "name": block.name}
            return [self._event(f"{_kind(block)}.done", **place, **told), ends]
        if block.kind is Thought:
            return [self._event(f"{_kind(block)}.done", **place, text=block.text), ends]
        return [
            self._event(f"{_kind(block)}.done", **place, text=block.text, logprobs=[]),
            self._event("response.content_part.done", **place, part=item["content"][0]),
            ends,
        ]

    def _event(self, kind: str, **content: Any) -> str:
        return event({"type": kind, "sequence_number": next(self._numbers), **content}, kind)

    def _place(self, block: Block) -> Json:
        place: Json = {"item_id": self._name(block), "output_index": block.index}
        return place if block.kind is ToolUse else {**place, "content_index": 0}

    def _name(self, block: Block) -> str:
        prefix = {ToolUse: "fc", Thought: "rs", Text: "msg"}[block.kind]
        return f"{prefix}_{self.call.id}_{block.index}"

    def _item(self, block: Block, text: str, status: str) -> Json:
        name = self._name(block)
        if block.kind is ToolUse:
            return {
                "type": "function_call",
                "id": name,
                "call_id": f"call_{self.call.id}_{block.index}",
                "name": block.name,
                "arguments": text,
                "status": status,
            }
        if block.kind is Thought:
            thoughts = [{"type": "reasoning_text", "text": text}]
            return {"type": "reasoning", "id": name, "summary": [], "content": thoughts, "status": status}
        part = _text_part(text)
        if status == "completed" and (self.body.top_logprobs or LOGPROBS in (self.body.include or ())):
            part["logprobs"] = self._logprobs()
        return {"type": "message", "id": name, "status": status, "role": "assistant", "content": [part]}

    def _logprobs(self) -> list[Json]:
        """Returns those of all tokens: which of them a text is made of is not known to the token."""
        generation = self.spoken.batch.choices[0].generation
        tops = generation.top_logprobs or [{} for _ in generation.tokens]
        return [
            {
                **self.texts.entry(token, logprob),
                "top_logprobs": [self.texts.entry(*pair) for pair in top.items()],
            }
            for token, logprob, top in zip(generation.tokens, generation.logprobs, tops, strict=False)
        ]

    def _answer(self, ended: bool) -> ResponsesAnswer:
        body, batch = self.body, self.spoken.batch
        cut = ended and batch.choices[0].finish == "length"
        usage = batch.usage
        chosen = body.tool_choice
        return ResponsesAnswer(
            id=f"resp_{self.call.id}",
            object="response",
            created_at=self.created,
            status="incomplete" if cut else "completed" if ended else "in_progress",
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.model,
            output=list(self.output),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=1.0 if body.temperature is None else body.temperature,
            tool_choice=chosen.model_dump() if isinstance(chosen, ChosenTool) else chosen or "auto",
            tools=[
                {"parameters": {}, "strict": False} | tool.model_dump(exclude_none=True)
                for tool in body.tools or ()
            ],
            top_p=1.0 if body.top_p is None else body.top_p,
            metadata=body.metadata or {},
            text=body.text.model_dump(exclude_none=True, by_alias=True)
            if body.text is not None
            else {"format": {"type": "text"}},
            truncation="disabled",
            usage=ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details={"cached_tokens": usage.prompt_tokens_details.cached_tokens},
                output_tokens=usage.completion_tokens,
                output_tokens_details={"reasoning_tokens": 0},
                total_tokens=usage.total_tokens,
            )
            if ended
            else None,
            masked=self.spoken.masked,
        )


def _kind(block: Block) -> str:
    names = {ToolUse: "function_call_arguments", Thought: "reasoning_text", Text: "output_text"}
    return f"response.{names[block.kind]}"


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def conversation_of(body: ResponsesRequest) -> Conversation:
    messages: list[Json] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for item in body.input:
            _add(messages, item)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({"description": tool.description} if tool.description is not None else {}),
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    if choice not in (None, NO_TOOL, ANY_TOOL) and not tools:
        raise invalid("tool_choice", "there are no tools to choose from")
    wanted = body.text.format if body.text is not None else None
    schema: Json | None = None
    if isinstance(wanted, SchemaText):
        schema = wanted.schema_
    elif wanted is not None and wanted.type == "json_object":
        schema = {"type": "object"}
    name = choice.name if isinstance(choice, ChosenTool) else choice or ANY_TOOL
    return Conversation(messages, tools, name, schema, "text.format")


def _add(messages: list[Json], item: InputMessage | CallItem | CallOutput | ReasoningItem) -> None:
    """Adds an item to the messages that chat templates take: calls and thoughts belong to the assistant's."""
    match item:
        case InputMessage(role="assistant"):
            last = _assistant(messages)
            last["content"] += _plain(item.content)
        case InputMessage():
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _plain(item.content)})
        case CallItem():
            function = {"name": item.name, "arguments": json_object(item.arguments)}
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        case CallOutput():
            messages.append({"role": "tool", "content": _plain(item.output), "tool_call_id": item.call_id})
        case ReasoningItem():
            last = _assistant(messages)
            thoughts = _plain(item.content or [])
            last["reasoning_content"] = last.get("reasoning_content", "") + thoughts


def _assistant(messages: list[Json]) -> Json:
    """Returns the assistant's message at the end, which is made if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _plain(content: InputContent) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
