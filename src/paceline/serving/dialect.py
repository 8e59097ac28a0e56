"""How a family of models writes tool calls and thoughts: told from its chat template, read from its text.

    Hermes, Qwen 2.5 and 3, SmolLM3    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Qwen 3.5, Qwen coder               <tool_call><function=NAME><parameter=KEY>VALUE</parameter> ...
    Llama 3                            {"name": ..., "parameters": {...}}, alone or behind <|python_tag|>
    all that think                     <think> ... </think>

What cannot be read as a call stays text.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from paceline.serving.schemas.base import Json
from paceline.serving.text import overlap

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*$", re.DOTALL)
# Between the parts of JSON that a grammar asks for: a policy may like blanks too much to ever end.
BLANK = r"[ \n]{0,16}"
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


class CallStyle(StrEnum):
    """How a call is written."""

    NONE = "none"
    JSON = "json"
    TAGS = "tags"
    BARE_JSON = "bare-json"


@dataclass(frozen=True)
class Dialect:
    """What a chat template says about its model's responses."""

    calls: CallStyle
    thinks: bool

    @property
    def special(self) -> frozenset[str]:
        """Special tokens that are part of the text."""
        return frozenset((THINK, END_THINK, CALL, END_CALL, PYTHON_TAG))


def dialect_of(template: str) -> Dialect:
    """Returns the dialect of the models that a chat template belongs to."""
    if "tools" not in template:
        calls = CallStyle.NONE
    elif CALL in template:
        calls = CallStyle.TAGS if "<function=" in template else CallStyle.JSON
    elif PYTHON_TAG in template or "<|start_header_id|>" in template:
        calls = CallStyle.BARE_JSON
    else:
        calls = CallStyle.NONE
    return Dialect(calls, END_THINK in template)


@dataclass(frozen=True)
class Text:
    """A piece of what the model says."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolUse:
    """A call of a tool; `arguments` is JSON."""

    name: str
    arguments: str


Part = Text | Thought | ToolUse


@dataclass
class ResponseParser:
    """Splits a response into text, thoughts and calls, as far as it is known."""

    dialect: Dialect
    calls: bool  # whether tools were offered
    thinking: bool = False  # whether the prompt ends within a thought
    _buffer: str = ""
    _mode: type[Part] = field(init=False)
    _opening: str = ""  # what began the call
    _trim: bool = field(init=False)  # blank space is left out here

    def __post_init__(self) -> None:
        self._mode = Thought if self.thinking else Text
        self._trim = self.thinking

    def push(self, text: str) -> list[Part]:
        """Adds text and returns the parts that are now known."""
        self._buffer += text
        parts: list[Part] = []
        while self._advance(parts, last=False):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Returns the rest: nothing more will come."""
        parts: list[Part] = []
        while self._advance(parts, last=True):
            pass
        if self._mode is ToolUse:
            self._call(parts, self._buffer, "")
        else:
            self._say(parts, self._buffer)
        self._buffer = ""
        return parts

    def _advance(self, parts: list[Part], last: bool) -> bool:
        """Deals with the next mark in the buffer; returns False if there is none."""
        if self._trim:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
        if self._mode is Text and self._is_bare_call():
            self._mode, self._opening = ToolUse, ""
            return True
        marks = self._marks()
        found = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if not found:
            if self._mode is not ToolUse and not last:
                keep = max((overlap(self._buffer, mark) for mark in marks), default=0)
                told = len(self._buffer) - keep
                self._say(parts, self._buffer[:told])
                self._buffer = self._buffer[told:]
            return False
        at, mark = min(found)
        before, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        if self._mode is ToolUse:
            self._call(parts, before, mark)
        else:
            self._say(parts, before)
        after: dict[str, type[Part]] = {THINK: Thought, CALL: ToolUse, PYTHON_TAG: ToolUse}
        self._mode = after.get(mark, Text)
        self._opening = mark
        self._trim = True
        return True

    def _marks(self) -> tuple[str, ...]:
        if self._mode is Thought:
            return (END_THINK,)
        bare = self.dialect.calls is CallStyle.BARE_JSON
        if self._mode is ToolUse:
            return () if bare else (END_CALL,)
        opening: tuple[str, ...] = ()
        if self.calls and self.dialect.calls is not CallStyle.NONE:
            opening = (PYTHON_TAG if bare else CALL,)
        return (*opening, THINK) if self.dialect.thinks else opening

    def _is_bare_call(self) -> bool:
        """Returns whether the response begins as a call without a mark would."""
        bare = self.calls and self.dialect.calls is CallStyle.BARE_JSON
        begins = bare and not self._said and self._buffer.lstrip().startswith("{")
        return begins

    _said: bool = False

    def _say(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        self._trim = False
        self._said |= self._mode is Text
        parts.append(Thought(text) if self._mode is Thought else Text(text))

    def _call(self, parts: list[Part], text: str, closing: str) -> None:
        uses = read_calls(self.dialect.calls, text)
        if uses:
            parts += uses
        elif self._opening + text + closing:
            parts.append(Text(self._opening + text + closing))


def read_calls(style: CallStyle, text: str) -> list[ToolUse]:
    """Returns the calls in what stands between a call's marks; none where it cannot be read."""
    if style is CallStyle.TAGS:
        return _tagged_call(text)
    key = "parameters" if style is CallStyle.BARE_JSON else "arguments"
    uses = []
    for one in _json_values(text):
        arguments = one.get(key, one.get("arguments", {})) if isinstance(one, dict) else None
        if not isinstance(arguments, dict) or not isinstance(one.get("name"), str):
            return []
        uses.append(ToolUse(one["name"], json.dumps(arguments, ensure_ascii=False)))
    return uses


def _json_values(text: str) -> list[Any]:
    """Returns the JSON values in a text, which `;` may separate; none where there is anything else."""
    decoder = json.JSONDecoder()
    values = []
    rest = text.strip()
    while rest:
        try:
            value, stop = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        rest = rest[stop:].lstrip(" \n\t;")
    return values


def _tagged_call(text: str) -> list[ToolUse]:
    found = FUNCTION.match(text)
    if found is None:
        return []
    arguments = {name: _value(value) for name, value in PARAMETER.findall(found[2])}
    return [ToolUse(found[1].strip(), json.dumps(arguments, ensure_ascii=False))]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def forced_call(style: CallStyle, tools: Sequence[tuple[str, Json]], marks_are_tokens: bool) -> str:
    """Returns a grammar's rule: one call of one of the tools, each a name and the schema of its arguments."""
    key = "parameters" if style is CallStyle.BARE_JSON else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: schema},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in tools
    ]
    call = json_rule(calls[0] if len(calls) == 1 else {"anyOf": calls})
    if style is CallStyle.BARE_JSON:
        return call
    begin, end = (CALL, END_CALL) if marks_are_tokens else (f'"{CALL}"', f'"{END_CALL}"')
    return f'{begin} "\\n" call "\\n" {end}\ncall: {call}'


def json_rule(schema: Json) -> str:
    """Returns a grammar's rule: JSON that follows a schema, with little blank space between its parts."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': BLANK}} | schema)}"
