"""The process that renders chat templates: a template is a downloaded program.

    worker ──▶ parent    {}, once: it has started
    parent ──▶ worker    {"source": ..., "variables": {...}, "chats": [...],     JSON, one request at a time
                          "tools": [...] of each chat, "marks": [before, after] or null}
    worker ──▶ parent    {"texts": [...]} or {"error": kind, "message": ...}

Jinja's sandbox keeps a template away from Python's objects, but not from looping or from building a gigabyte:
a limit on this process's memory and the parent's clock (`chat_process.py`) do. The environment offers what
Hugging Face templates expect (transformers/utils/chat_template_utils.py). Light to import: only Jinja.
"""

import json
import resource
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Characters that one request may return.
MAX_TEXT = 1 << 24
# Characters of an error's message.
MAX_MESSAGE = 500


def main(descriptor: int, memory_bytes: int) -> None:
    connection = Connection(descriptor)
    _limit(resource.RLIMIT_AS, memory_bytes)
    # It writes no files.
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    connection.send_bytes(b"{}")
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(json.dumps(answer(request)).encode())


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Renders each chat; returns `texts`, or `error` and `message`."""
    try:
        template = compile_template(request["source"], tuple(request["marks"] or ()))
        variables = request["variables"]
        texts = [
            template.render(variables, messages=chat, tools=tools or variables.get("tools"))
            for chat, tools in zip(request["chats"], request["tools"], strict=True)
        ]
    except jinja2.TemplateSyntaxError as error:
        return _error("syntax", f"line {error.lineno}: {error.message}")
    except jinja2.TemplateError as error:
        return _error("refused", str(error))
    except MemoryError:
        return _error("memory", "")
    # Any other failure: division by zero, a type error, endless recursion.
    except Exception as error:
        return _error("failed", f"{type(error).__name__}: {error}")
    length = sum(map(len, texts))
    return {"texts": texts} if length <= MAX_TEXT else _error("length", f"{length} characters")


def _error(kind: str, message: str) -> dict[str, str]:
    printable = "".join(character if character.isprintable() else " " for character in message)
    return {"error": kind, "message": printable[:MAX_MESSAGE]}


def _limit(what: int, amount: int) -> None:
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (amount, amount))


@lru_cache(maxsize=8)
def compile_template(source: str, marks: tuple[str, ...] = ()) -> jinja2.Template:
    """Returns the template; constants are computed here, so this can take long as well.

    `marks` are written before and after each `{% generation %}` block.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.extend(generation_marks=marks)
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(source)


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` blocks, which mark the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = getattr(self.environment, "generation_marks", ())  # `compile_template` has set it
        if not marks:
            return body
        before, after = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in marks)
        return [before, *body, after]


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
