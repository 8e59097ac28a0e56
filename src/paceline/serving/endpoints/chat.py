"""`/v1/chat/completions`."""

from collections.abc import AsyncIterator, Sequence

from paceline.serving.conversation import (
    ANY_TOOL,
    NO_TOOL,
    Conversation,
    Spoken,
    final_text,
    json_object,
    speak,
)
from paceline.serving.dialect import Part, Text, Thought, ToolUse
from paceline.serving.endpoints.base import DONE, Endpoint, TokenTexts, event, merged, now
from paceline.serving.errors import invalid
from paceline.serving.schemas.base import Json, stops
from paceline.serving.schemas.chat import (
    AnsweredCall,
    AnsweredMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatFinish,
    ChatRequest,
    Content,
    Message,
    NamedTool,
    SchemaFormat,
)
from paceline.serving.service import Call, Choice, Piece


class ChatCompletions(Endpoint):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    body = ChatRequest
    answer = ChatAnswer
    summary = "Continues a conversation."

    async def handle(self, body: ChatRequest, call: Call) -> ChatAnswer | AsyncIterator[str]:
        self.service.check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "it needs logprobs: true")
        spoken = await speak(
            self.service,
            call,
            conversation_of(body),
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            stop=stops(body.stop),
            top_logprobs=body.top_logprobs or 0,
            count=body.n,
            stream=body.stream,
        )
        writer = _Writer(self, body, call, spoken)
        return writer.events() if body.stream else await writer.whole()


class _Writer:
    """Writes one request's answer."""

    def __init__(self, endpoint: ChatCompletions, body: ChatRequest, call: Call, spoken: Spoken) -> None:
        self.body = body
        self.spoken = spoken
        self.call = call
        self.texts = TokenTexts(endpoint.service)
        self.head = {"id": f"chatcmpl-{call.id}", "created": now(), "model": endpoint.service.model}

    async def whole(self) -> ChatAnswer:
        choices: list[ChatChoice] = []
        async for choice, piece, parts in self.spoken.parts():
            message = AnsweredMessage(role="assistant", content=final_text(parts, Text) or None)
            if thoughts := final_text(parts, Thought):
                message.reasoning_content = thoughts
            uses = [part for part in parts if isinstance(part, ToolUse)]
            if uses:
                message.tool_calls = [self._call(choice, i, use, False) for i, use in enumerate(uses)]
            elif message.content is None:
                message.content = ""
            done = ChatChoice(
                index=choice.index, message=message, logprobs=None, finish_reason=self._finish(choice)
            )
            done.weight_versions = choice.weight_versions
            if self.body.logprobs:
                done.logprobs = self.texts.chat(piece)
            if self.body.return_token_ids:
                done.token_ids = piece.tokens
            choices.append(done)
        choices.sort(key=lambda one: one.index)
        answer = ChatAnswer(
            **self.head, object="chat.completion", choices=choices, usage=self.spoken.batch.usage
        )
        if self.spoken.masked:
            answer.masked = True
        if self.body.return_token_ids:
            answer.prompt_token_ids = list(self.spoken.prompt.tokens)
        return answer

    async def events(self) -> AsyncIterator[str]:
        for choice in self.spoken.batch.choices:
            yield self._event(choice, AnsweredMessage(role="assistant", content=""))
        held: dict[int, list[Piece]] = {}  # pieces whose text is still held back, for their logprobs
        async for choice, piece, parts in self.spoken.parts():
            pieces = held.setdefault(choice.index, [])
            pieces.append(piece)
            if not parts and not piece.ended and not self.body.return_token_ids:
                continue
            deltas = [self._delta(choice, part) for part in self._numbered(choice, parts)]
            for number, delta in enumerate(deltas or [AnsweredMessage()]):
                last = number >= len(deltas) - 1
                yield self._event(choice, delta, merged(pieces) if last else None)
            pieces.clear()
            if piece.ended:
                yield self._event(choice, AnsweredMessage(), finish=self._finish(choice))
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield event(
                ChatChunk(
                    **self.head, object="chat.completion.chunk", choices=[], usage=self.spoken.batch.usage
                )
            )
        yield DONE

    def _event(
        self,
        choice: Choice,
        delta: AnsweredMessage,
        piece: Piece | None = None,
        finish: ChatFinish | None = None,
    ) -> str:
        part = ChatChunkChoice(index=choice.index, delta=delta, logprobs=None, finish_reason=finish)
        if piece is not None and self.body.logprobs:
            part.logprobs = self.texts.chat(piece)
        if piece is not None and self.body.return_token_ids:
            part.token_ids = piece.tokens
        return event(ChatChunk(**self.head, object="chat.completion.chunk", choices=[part]))

    def _numbered(self, choice: Choice, parts: Sequence[Part]) -> list[tuple[int, Part]]:
        """Returns each part with the number of the call that it is."""
        number = self.spoken.called[choice.index] - sum(isinstance(part, ToolUse) for part in parts)
        numbered = []
        for part in parts:
            numbered.append((number, part))
            number += isinstance(part, ToolUse)
        return numbered

    def _delta(self, choice: Choice, numbered: tuple[int, Part]) -> AnsweredMessage:
        number, part = numbered
        match part:
            case Text(text):
                return AnsweredMessage(content=text)
            case Thought(text):
                return AnsweredMessage(reasoning_content=text)
            case ToolUse():
                return AnsweredMessage(tool_calls=[self._call(choice, number, part, True)])

    def _call(self, choice: Choice, number: int, use: ToolUse, indexed: bool) -> AnsweredCall:
        call = AnsweredCall(
            id=f"call_{self.call.id}_{choice.index}_{number}",
            type="function",
            function={"name": use.name, "arguments": use.arguments},
        )
        if indexed:
            call.index = number
        return call

    def _finish(self, choice: Choice) -> ChatFinish:
        if choice.finish == "stop" and self.spoken.called[choice.index]:
            return "tool_calls"
        return "length" if choice.finish == "length" else "stop"


def conversation_of(body: ChatRequest) -> Conversation:
    wanted = body.response_format
    schema: Json | None = None
    if isinstance(wanted, SchemaFormat):
        schema = wanted.json_schema.schema_
    elif wanted is not None and wanted.type == "json_object":
        schema = {"type": "object"}
    choice = body.tool_choice
    if choice not in (None, NO_TOOL, ANY_TOOL) and not body.tools:
        raise invalid("tool_choice", "there are no tools to choose from")
    return Conversation(
        [template_message(message) for message in body.messages],
        [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        choice.function.name if isinstance(choice, NamedTool) else choice or ANY_TOOL,
        schema,
        "response_format",
        dict(body.chat_template_kwargs or {}),
    )


def template_message(message: Message) -> Json:
    """Returns a message as chat templates take it."""
    known: Json = {
        "role": "system" if message.role == "developer" else message.role,
        "content": plain_text(message.content),
    }
    if message.tool_calls:
        known["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": json_object(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            known[name] = value
    return known


def plain_text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
