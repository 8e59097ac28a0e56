"""Chat templates that fail, loop or take all memory: each is an error, and the next one works."""

import threading
import time

import pytest

from paceline.config import ConfigError
from paceline.tasks import chat_process
from paceline.tasks.chat import ChatTemplate

USER = {"role": "user", "content": "2 + 2?"}
FINE = ChatTemplate("{{ messages[0].content }}")
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    "source, reason",
    [
        ("{{ 1 / 0 }}", "fails on messages with roles .user.: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "fails on .*: TypeError"),
        ("{{ messages[5].content }}", "refuses messages"),
        ("{{ 'x'.join(3) }}", "fails on .*TypeError"),
        ("{{ '%d' % 'x' }}", "fails on .*TypeError"),
        ("{{ strftime_now(5) }}", "fails on .*TypeError"),
        ("{{ messages | tojson(indent='x', separators=3) }}", "fails on .*TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on .*RecursionError"),
        ("{{ range(1000000000) | list | length }}", "fails on .*OverflowError"),
        ("{% include 'x' %}", "fails on .*TypeError"),
        ("{% import 'os' as os %}", "fails on .*TypeError"),
        ("{{ raise_exception('\x1b[2J no') }}", "refuses .*:  .2J no"),
        ("{% if %}", r"is not valid Jinja \(line 1: "),
        ("{{ ''.__class__.__mro__ }}", "refuses .*unsafe"),
    ],
)
def test_template_that_raises_is_a_config_error_that_names_it(source, reason):
    with pytest.raises(ConfigError, match=f"^the policy's chat template {reason}"):
        ChatTemplate(source).render([USER])
    assert FINE.render([USER]) == "2 + 2?"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        # computed while the template is compiled
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_template_that_loops_is_killed(source, monkeypatch):
    monkeypatch.setattr(chat_process, "TIME_LIMIT_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(
        ConfigError, match="does not end on messages with roles .user.: no result after 0.5 s"
    ):
        ChatTemplate(source).render([USER])
    assert time.monotonic() - start < 120
    monkeypatch.undo()
    assert FINE.render([USER]) == "2 + 2?"


@pytest.mark.parametrize(
    "source, reason",
    [
        (DOUBLING + "{{ ns.x }}", "takes more than 1024 MiB of memory"),
        ("{{ 'a' * 4000000000 }}", "takes more than 1024 MiB"),
        ("{{ '%4000000000d' | format(1) }}", "takes more than 1024 MiB|fails on"),
        ("{{ 'a' * 20000000 }}", "writes too much .*: 20000000 characters"),
        ("{% for i in range(90000) %}{{ 'a' * 90000 }}{% endfor %}", "takes more than 1024 MiB"),
    ],
)
def test_template_that_takes_all_memory_is_killed(source, reason, monkeypatch):
    monkeypatch.setattr(chat_process, "TIME_LIMIT_SECONDS", 120.0)
    with pytest.raises(ConfigError, match=reason):
        ChatTemplate(source).render([USER])
    assert FINE.render([USER]) == "2 + 2?"


def test_template_gets_values_that_are_not_json_as_text():
    from datetime import date

    assert ChatTemplate("{{ messages[0].when }}").render([{"role": "user", "when": date(2026, 1, 2)}]) == (
        "2026-01-02"
    )
    loop: dict = {"role": "user"}
    loop["content"] = loop
    with pytest.raises(ConfigError, match="fails on .*ValueError: Circular"):
        ChatTemplate("{{ messages[0].content }}").render([loop])


def test_template_process_answers_each_thread_with_its_own_texts():
    texts: dict[int, list[str]] = {}

    def render(number: int) -> None:
        message = {"role": "user", "content": str(number)}
        texts[number] = [FINE.render([message]) for _ in range(30)]

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: [str(number)] * 30 for number in range(4)}


def test_template_process_is_restarted_after_a_kill():
    assert FINE.render([USER]) == "2 + 2?"
    chat_process.template_process().running.process.kill()
    chat_process.template_process().running.process.wait()
    assert FINE.render([USER]) == "2 + 2?"
