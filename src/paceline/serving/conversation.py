"""A conversation with tools and an answer's schema: what the chat APIs have in common."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from paceline.serving.dialect import (
    CALL,
    THINK,
    CallStyle,
    Part,
    ResponseParser,
    ToolUse,
    dialect_of,
    forced_call,
    json_rule,
)
from paceline.serving.errors import invalid
from paceline.serving.schemas.base import Json, Sampled
from paceline.serving.service import Batch, Call, Choice, Piece, Prompt, Service, seeds_of

# What `choice` of tools may say beside the name of one.
NO_TOOL, ANY_TOOL, SOME_TOOL = "none", "auto", "required"


@dataclass(frozen=True)
class Conversation:
    """What is to be continued, as chat templates take it."""

    messages: list[Json]
    tools: list[Json] = field(default_factory=list)  # in OpenAI's form, which templates expect
    choice: str = ANY_TOOL  # or the name of a tool
    schema: Json | None = None  # that the answer must follow
    schema_field: str = ""  # where in the request it stands
    variables: Json = field(default_factory=dict)


@dataclass
class Spoken:
    """The choices of a request, read as text, thoughts and calls."""

    batch: Batch
    prompt: Prompt
    parsers: list[ResponseParser]
    masked: bool
    called: list[int]  # calls so far, by choice

    async def parts(self) -> AsyncIterator[tuple[Choice, Piece, list[Part]]]:
        """Yields what is new of any choice, until all have ended."""
        async for choice, piece in self.batch.pieces():
            parser = self.parsers[choice.index]
            parts = parser.push(piece.text)
            if piece.ended:
                parts += parser.finish()
            self.called[choice.index] += sum(isinstance(part, ToolUse) for part in parts)
            yield choice, piece, parts


async def speak(
    service: Service,
    call: Call,
    conversation: Conversation,
    asked: Sampled,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...] = (),
    top_logprobs: int = 0,
    count: int = 1,
    stream: bool,
) -> Spoken:
    """Starts the responses to a conversation."""
    dialect = dialect_of(service.template.source if service.template is not None else "")
    offered = bool(conversation.tools) and conversation.choice != NO_TOOL
    if offered and dialect.calls is CallStyle.NONE:
        raise invalid("tools", "this model's chat template has no tools; leave them out")
    grammar = _grammar(service, conversation, dialect.calls, offered)
    if grammar:
        await service.check_grammar(
            grammar, conversation.schema_field if conversation.schema is not None else "tools"
        )
    prompt = await service.render(conversation.messages, template_variables(conversation))
    service.check_prompt(prompt.tokens, "messages")
    room = service.max_length - len(prompt.tokens)
    sampling = asked.sampling(min(max_tokens or room, room), stop, top_logprobs)
    batch = service.open(
        call,
        [prompt],
        sampling,
        seeds_of(asked.seed, [prompt], count),
        stream,
        keep=dialect.special if offered or dialect.thinks else frozenset(),
        grammar=grammar,
    )
    thinking = dialect.thinks and prompt.source.rstrip().endswith(THINK) and not grammar
    parsers = [ResponseParser(dialect, offered, thinking) for _ in batch.choices]
    return Spoken(batch, prompt, parsers, bool(grammar), [0] * count)


def template_variables(conversation: Conversation) -> Json:
    """Returns what the chat template gets beside the messages."""
    if not conversation.tools or conversation.choice == NO_TOOL:
        return conversation.variables
    return conversation.variables | {"tools": conversation.tools}


def _grammar(service: Service, conversation: Conversation, style: CallStyle, offered: bool) -> str:
    """Returns the grammar that the response must follow; empty: none."""
    names = [tool["function"]["name"] for tool in conversation.tools]
    forced = offered and conversation.choice != ANY_TOOL
    if forced and conversation.choice not in (SOME_TOOL, *names):
        raise invalid(
            "tool_choice", f"there is no tool {conversation.choice!r}; tools are {', '.join(names)}"
        )
    if not forced and conversation.schema is None:
        return ""
    rules = []
    if offered and style is not CallStyle.NONE:
        wanted = [conversation.choice] if conversation.choice in names else names
        tools = [
            (tool["function"]["name"], tool["function"]["parameters"])
            for tool in conversation.tools
            if tool["function"]["name"] in wanted
        ]
        rules.append(forced_call(style, tools, service.tokenizer.token_to_id(CALL) is not None))
    answer = "" if conversation.schema is None else json_rule(conversation.schema)
    if forced or conversation.schema is None:
        return f"start: {rules[0]}"
    if not rules:
        return f"start: {answer}"
    return f"start: answer | use\nanswer: {answer}\nuse: {rules[0]}"


def final_text(parts: list[Part], kind: type[Part]) -> str:
    """Returns the whole of a response's text or thoughts."""
    return "".join(part.text for part in parts if isinstance(part, kind) and not isinstance(part, ToolUse))


def json_object(text: str) -> Any:
    """Returns a call's arguments as templates take them: an object where the text is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


@dataclass
class Block:
    """A run of text or of thoughts, or a call, in an answer that lists them."""

    index: int
    kind: type[Part]
    text: str = ""  # of a call its arguments
    name: str = ""


async def blocks(spoken: Spoken) -> AsyncIterator[tuple[Block, str, bool]]:
    """Yields each block of a single choice as it grows: what is new of it, and whether it is whole.

    A block comes first with what it begins with, and last with nothing new.
    """
    block: Block | None = None
    count = 0
    async for _, piece, parts in spoken.parts():
        for part in parts:
            if block is not None and (block.kind is not type(part) or isinstance(part, ToolUse)):
                yield block, "", True
                block = None
            text = part.arguments if isinstance(part, ToolUse) else part.text
            if block is None:
                block = Block(count, type(part), "", part.name if isinstance(part, ToolUse) else "")
                count += 1
            block.text += text
            yield block, text, False
        if piece.ended and block is not None:
            yield block, "", True
