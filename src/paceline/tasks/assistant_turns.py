"""Which parts of a rendered conversation its assistant wrote: what supervised fine-tuning imitates.

    user: hi | assistant: hello<end>\\n | user: and? | assistant: bye<end>\\n
               └─────learned─────┘                     └────learned────┘

A template that has `{% generation %}` blocks says it itself. Of any other it is the difference between two
renderings: of the messages before a turn, up to where the policy would begin to write, and of the messages
through it. Where a later message changes what came before (Qwen3 drops earlier reasoning), there is no such
difference, and the conversation is refused.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import ConfigError
from paceline.tasks.base import Message
from paceline.tasks.chat import ChatTemplate

# Around generated text; no text that anybody wrote has them.
MARKS = (f"\u2063{secrets.token_hex(12)}[", f"]{secrets.token_hex(12)}\u2063")

WAY_OUT = (
    "name a template that marks what the assistant writes with {% generation %} (sft.chat_template=FILE), or "
    "split the conversation, one assistant turn at the end of each"
)


@dataclass(frozen=True)
class Chat:
    """A conversation, the tools it may use, and from which message on its assistant is imitated."""

    messages: Sequence[Message]
    tools: Any = None
    learned_from: int = 0
    source: str = ""  # file and row, for errors


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text, and the ranges of characters that its assistant wrote."""

    text: str
    learned: tuple[tuple[int, int], ...]


def render_chats(template: ChatTemplate, chats: Sequence[Chat]) -> list[RenderedChat]:
    """Renders conversations; an error names the one at fault."""
    render = _by_marks if template.marks_generation else _by_differences
    try:
        return render(template, chats)
    except ConfigError as error:
        if len(chats) == 1:
            where = f"{chats[0].source}: " if chats[0].source else ""
            raise ConfigError(f"{where}{error}") from None
    return [rendered for chat in chats for rendered in render_chats(template, [chat])]


def _by_marks(template: ChatTemplate, chats: Sequence[Chat]) -> list[RenderedChat]:
    tools = [chat.tools for chat in chats]
    texts = template.render_all([chat.messages for chat in chats], False, tools, MARKS)
    skipped = [0] * len(chats)  # blocks of the messages that are not learned from
    if asked := [i for i, chat in enumerate(chats) if chat.learned_from]:
        before = [chats[i].messages[: chats[i].learned_from] for i in asked]
        rendered = template.render_all(before, False, [tools[i] for i in asked], MARKS)
        for i, text in zip(asked, rendered, strict=True):
            skipped[i] = text.count(MARKS[0])
    return [_unmarked(text, skip) for text, skip in zip(texts, skipped, strict=True)]


def _unmarked(text: str, skip: int) -> RenderedChat:
    opening, closing = MARKS
    plain, *marked = text.split(opening)
    learned = []
    for part in marked:
        written, _, rest = part.partition(closing)
        learned.append((len(plain), len(plain) + len(written)))
        plain += written + rest
    return RenderedChat(plain, tuple(learned[skip:]))


def _by_differences(template: ChatTemplate, chats: Sequence[Chat]) -> list[RenderedChat]:
    turns = [
        (chat, place)
        for chat in chats
        for place, message in enumerate(chat.messages)
        if message.get("role") == "assistant" and place >= chat.learned_from
    ]
    whole = template.render_all([chat.messages for chat in chats], False, [chat.tools for chat in chats])
    tools = [chat.tools for chat, _ in turns]
    before = template.render_all([chat.messages[:place] for chat, place in turns], True, tools)
    through = template.render_all([chat.messages[: place + 1] for chat, place in turns], False, tools)
    found = iter(zip(turns, before, through, strict=True))
    rendered = []
    for chat, text in zip(chats, whole, strict=True):
        learned = []
        for _ in range(sum(other is chat for other, _ in turns)):
            (_, place), start, end = next(found)
            if not (end.startswith(start) and text.startswith(end)):
                raise ConfigError(
                    f"the chat template changes what stands before or in message {place + 1} when more "
                    f"follows, so what the assistant wrote there cannot be told apart; {WAY_OUT}"
                )
            learned.append((len(start), len(end)))
        rendered.append(RenderedChat(text, tuple(learned)))
    return rendered
