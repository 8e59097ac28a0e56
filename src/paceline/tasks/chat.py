"""Chat templates: from messages to the text a policy was trained on, by its folder's Jinja template.

The environment offers what Hugging Face templates expect (transformers/utils/chat_template_utils.py) and is
sandboxed, because a template is a program that came with a download.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.config import ConfigError
from paceline.tasks.base import Message

# Entries of tokenizer_config.json that templates may refer to.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Names under which messages carry their reasoning; templates read one of the first two.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A policy's chat template, compiled, with its special tokens and the recipe's `template_options`."""

    def __init__(
        self, source: str, special_tokens: dict[str, str] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        try:
            self.template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the policy's chat template is not valid Jinja (line {error.lineno}: {error.message})"
            ) from None
        self.variables = {**(special_tokens or {}), **(options or {})}

    @classmethod
    def from_folder(cls, folder: Path, options: dict[str, Any] | None = None) -> "ChatTemplate | None":
        """Reads the template of a Hugging Face folder; None where it has none."""
        settings = _read_json(folder / "tokenizer_config.json")
        jinja_file = folder / "chat_template.jinja"
        source = jinja_file.read_text() if jinja_file.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        if not source:
            return None
        named = _read_json(folder / "special_tokens_map.json") | settings
        tokens = {name: _token_text(named[name]) for name in SPECIAL_TOKENS if named.get(name) is not None}
        return cls(source, tokens, options)

    def render(self, messages: Sequence[Message], generate: bool = True) -> str:
        """Renders a conversation as text; with `generate`, up to where the policy's response begins."""
        chat = [_known_reasoning(message) for message in messages]
        try:
            return self.template.render(
                messages=chat, tools=None, documents=None, add_generation_prompt=generate, **self.variables
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(
                f"the policy's chat template refuses messages with roles [{roles}]: {error}"
            ) from None

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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


class _GenerationBlocks(jinja2.ext.Extension):
    """Ignores `{% generation %}` blocks, which mark the assistant's text for training frameworks."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _known_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return (
        message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _token_text(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object, not a {type(content).__name__}")
    return content
