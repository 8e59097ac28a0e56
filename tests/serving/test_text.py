"""Text and calls out of a stream: the same however it is cut into pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st

from paceline.models.source import BUILTIN_POLICY
from paceline.policy.tokenizer import load_tokenizer
from paceline.serving.dialect import CallStyle, Dialect, ResponseParser, Text, Thought, ToolUse, dialect_of
from paceline.serving.text import StopFilter, TextStream
from tests.serving.servers import TEMPLATE, byte_tokenizer

BYTES = byte_tokenizer()
CHARACTERS = load_tokenizer(BUILTIN_POLICY)


def pieces(data: st.DataObject, whole):
    """Cuts a sequence anywhere."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@given(st.text(), st.data())
def test_streamed_text_is_the_text(text, data):
    stream = TextStream(BYTES)
    told = [stream.push(piece) for piece in pieces(data, BYTES.encode(text).ids)]
    whole = "".join(told) + stream.finish()
    assert whole == BYTES.decode(BYTES.encode(text).ids)


@given(st.lists(st.integers(0, 300), max_size=60), st.data())
def test_streamed_text_of_any_tokens_does_not_depend_on_the_pieces(tokens, data):
    """Bytes that are no characters, special tokens, and ids without a token."""
    stream, whole = TextStream(BYTES), TextStream(BYTES)
    told = "".join(stream.push(piece) for piece in pieces(data, tokens)) + stream.finish()
    assert told == whole.push(tokens) + whole.finish() and "<|im_end|>" not in told


@given(st.lists(st.integers(0, 47), max_size=30))
def test_streamed_text_of_the_builtin_policy_is_what_it_decodes(tokens):
    stream = TextStream(CHARACTERS)
    assert stream.push(tokens) + stream.finish() == CHARACTERS.decode(tokens)


@given(st.text("ab\n"), st.lists(st.text("ab\n", min_size=1), min_size=1, max_size=3), st.data())
def test_stop_texts_end_a_text_before_the_one_that_is_whole_first(text, stops, data):
    """Of "ab" and "b" in "xab" both are whole at once, and the longer one is cut off."""
    stop = StopFilter(stops)
    told = ""
    whole = [(text.find(one) + len(one), text.find(one)) for one in stops if one in text]
    first = min(whole, default=(0, len(text)))[1]
    for piece in pieces(data, text):
        told += stop.push(piece)
        assert text[:first].startswith(told), "nothing of a stop text is told"
    told += stop.finish()
    assert told == text[:first] and bool(stop.found) == (first < len(text))


SAID = {
    CallStyle.JSON: """<think>
So.</think>

I ask.
<tool_call>
{"name": "f", "arguments": {"a": "<b>"}}
</tool_call>
<tool_call>{"name": "g", "arguments": {}}</tool_call>""",
    CallStyle.TAGS: """<think>So.</think>I ask.
<tool_call>
<function=f>
<parameter=a>
<b>
</parameter>
</function>
</tool_call>
<tool_call><function=g></function></tool_call>""",
    CallStyle.BARE_JSON: """<think>So.</think>
{"name": "f", "parameters": {"a": "<b>"}}; {"name": "g", "parameters": {}}""",
}


@given(st.sampled_from(list(SAID)), st.data())
def test_calls_and_thoughts_are_read_in_each_dialect(style, data):
    parser = ResponseParser(Dialect(style, thinks=True), calls=True)
    parts = [part for piece in pieces(data, SAID[style]) for part in parser.push(piece)] + parser.finish()
    said = "I ask.\n" if style is not CallStyle.BARE_JSON else ""
    assert "".join(part.text for part in parts if isinstance(part, Thought)) == "So."
    assert "".join(part.text for part in parts if isinstance(part, Text)) == said
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolUse)]
    assert calls == [("f", {"a": "<b>"}), ("g", {})]


@given(st.sampled_from([*SAID, CallStyle.NONE]), st.text("<tool_cal/>{}\"' ;thinkx", max_size=40), st.data())
def test_what_is_no_call_stays_text(style, text, data):
    """Nothing is lost but blank space, whatever a policy writes."""
    parser = ResponseParser(Dialect(style, thinks=False), calls=True)
    parts = [part for piece in pieces(data, text) for part in parser.push(piece)] + parser.finish()
    if not any(isinstance(part, ToolUse) for part in parts):
        told = "".join(part.text for part in parts)
        assert "".join(told.split()) == "".join(text.split())


def test_dialect_is_told_by_the_template():
    assert dialect_of(TEMPLATE) == Dialect(CallStyle.JSON, thinks=False)
    assert dialect_of("{{ messages }}") == Dialect(CallStyle.NONE, thinks=False)
    assert dialect_of("{{ tools }}<tool_call><function=x></think>") == Dialect(CallStyle.TAGS, thinks=True)
    assert dialect_of("{{ tools }}<|python_tag|>") == Dialect(CallStyle.BARE_JSON, thinks=False)
