"""Chat templates: from messages to the text a policy was trained on, by its folder's Jinja template.

A template is a downloaded program. It runs in a process of its own (`chat_process.py`), in Jinja's sandbox
and within limits; any failure there becomes an error that names the template.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.config import ConfigError
from paceline.tasks.base import Message
from paceline.tasks.chat_process import MEMORY_LIMIT_BYTES, template_process

# Entries of tokenizer_config.json that templates may refer to.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Names under which messages carry their reasoning; templates read one of the first two.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# The error of a failed rendering, by the worker's kind of error.
FAILURES = {
    "syntax": "is not valid Jinja ({message})",
    "refused": "refuses messages with roles [{roles}]: {message}",
    "failed": "fails on messages with roles [{roles}]: {message}",
    "time": "does not end on messages with roles [{roles}]: {message}",
    "memory": f"takes more than {MEMORY_LIMIT_BYTES >> 20} MiB of memory on messages with roles [{{roles}}]",
    "length": "writes too much for messages with roles [{roles}]: {message}",
    "died": "ended the process that renders it, on messages with roles [{roles}]",
}


class ChatTemplate:
    """A policy's chat template, with its special tokens and the recipe's `template_options`."""

    def __init__(
        self, source: str, special_tokens: dict[str, str] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self.source = source
        self.variables = {**(special_tokens or {}), **(options or {})}

    @classmethod
    def from_folder(cls, folder: Path, options: dict[str, Any] | None = None) -> "ChatTemplate | None":
        """Reads the template of a Hugging Face folder; None where it has none."""
        settings = _read_json(folder / "tokenizer_config.json")
        jinja_file = folder / "chat_template.jinja"
        source = _read_text(jinja_file) if jinja_file.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not source:
            return None
        if not isinstance(source, str):
            where = folder / "tokenizer_config.json"
            raise ConfigError(f"{where}: chat_template must be a text, not a {type(source).__name__}")
        listed = _read_json(folder / "special_tokens_map.json") | settings
        tokens = {name: _token_text(listed[name]) for name in SPECIAL_TOKENS if listed.get(name) is not None}
        return cls(source, tokens, options)

    def render(self, messages: Sequence[Message], generate: bool = True) -> str:
        """Renders a conversation as text; with `generate`, up to where the policy's response begins."""
        (text,) = self.render_all([messages], generate)
        return text

    @property
    def marks_generation(self) -> bool:
        """Whether the template itself says what the assistant writes, by `{% generation %}` blocks."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    def render_all(
        self,
        chats: Sequence[Sequence[Message]],
        generate: bool = True,
        tools: Sequence[Any] | None = None,
        marks: tuple[str, str] | None = None,
    ) -> list[str]:
        """Renders several conversations in one request to the process, which is faster.

        `tools` are those of each chat; `marks` are written around what the template marks as generated.
        """
        variables = {"tools": None, "documents": None, "add_generation_prompt": generate, **self.variables}
        known = [[_known_reasoning(message) for message in messages] for messages in chats]
        offered = [None] * len(known) if tools is None else list(tools)
        reply = template_process().render(self.source, variables, known, offered, marks)
        if "error" in reply:
            roles = ", ".join(str(message.get("role")) for message in chats[0])
            what = FAILURES[reply["error"]].format(roles=roles, message=reply["message"])
            raise ConfigError(f"the policy's chat template {what}")
        return reply["texts"]

    def follow_up(self, messages: Sequence[Message]) -> str:
        """Returns the text between a response and the next one when `messages` come in between.

        It is the difference between two renderings, because a template may rewrite earlier turns (Qwen3
        drops their reasoning) while the tokens the policy has sampled must stay as they are.
        """
        marker = "\u2063response\u2063"
        opening: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
        text = self.render([*opening, *messages])
        if marker not in text:
            raise ConfigError(
                "the policy's chat template drops earlier responses, so a task with turns cannot answer "
                "with messages; use text"
            )
        return text.rpartition(marker)[2]


def _known_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return (
        message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise ConfigError(f"{path} is not readable text: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object, not a {type(content).__name__}")
    return content
