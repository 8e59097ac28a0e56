"""What the assistant wrote in a rendered conversation, against what ten families' formats say by hand."""

import pytest

from paceline.config import ConfigError
from paceline.tasks.assistant_turns import Chat, render_chats
from paceline.tasks.chat import ChatTemplate


def each(said: str, prompt: str) -> str:
    """A template that writes `said` for every message, and `prompt` where the assistant is to begin."""
    asked = "{% if add_generation_prompt %}{{ '" + prompt + "' }}{% endif %}"
    return "{% for m in messages %}" + said + "{% endfor %}" + asked


def headed(before: str, after: str, end: str) -> str:
    """A template that writes a header with the role, the content and an end, for every message alike."""
    said = f"'{before}' + m.role + '{after}' + m.content + '{end}'"
    return each("{{ " + said + " }}", f"{before}assistant{after}")


def by_role(user: str, assistant: str, prompt: str = "") -> str:
    said = "{% if m.role == 'user' %}" + user + "{% else %}" + assistant + "{% endif %}"
    return each(said, prompt)


# Each family's format, and what its assistant writes for "A1" and "A2".
FAMILIES = {
    "chatml": (headed("<|im_start|>", "\\n", "<|im_end|>\\n"), ["A1<|im_end|>\n", "A2<|im_end|>\n"]),
    "llama3": (
        "{{ bos_token }}" + headed("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>"),
        ["A1<|eot_id|>", "A2<|eot_id|>"],
    ),
    "llama2": (
        by_role(
            "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}", "{{ ' ' + m.content + ' ' + eos_token }}"
        ),
        [" A1 </s>", " A2 </s>"],
    ),
    "mistral": (
        "{{ bos_token }}"
        + by_role("{{ '[INST] ' + m.content + '[/INST]' }}", "{{ ' ' + m.content + eos_token }}"),
        [" A1</s>", " A2</s>"],
    ),
    "gemma": (
        "{{ bos_token }}"
        + by_role(
            "{{ '<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n' }}",
            "{{ '<start_of_turn>model\n' + m.content | trim + '<end_of_turn>\n' }}",
            "<start_of_turn>model\n",
        ),
        ["A1<end_of_turn>\n", "A2<end_of_turn>\n"],
    ),
    "phi3": (headed("<|", "|>\\n", "<|end|>\\n"), ["A1<|end|>\n", "A2<|end|>\n"]),
    "zephyr": (headed("<|", "|>\\n", "</s>\\n"), ["A1</s>\n", "A2</s>\n"]),
    "deepseek": (
        "{{ bos_token }}"
        + by_role(
            "{{ '<|User|>' + m.content }}", "{{ '<|Assistant|>' + m.content + eos_token }}", "<|Assistant|>"
        ),
        ["A1</s>", "A2</s>"],
    ),
    "command-r": (
        "{{ bos_token }}"
        + by_role(
            "{{ '<|START|><|USER|>' + m.content + '<|END|>' }}",
            "{{ '<|START|><|CHATBOT|>' + m.content + '<|END|>' }}",
            "<|START|><|CHATBOT|>",
        ),
        ["A1<|END|>", "A2<|END|>"],
    ),
    "marked": (
        by_role(
            "{{ 'user: ' + m.content + '\n' }}",
            "{{ 'bot: ' }}{% generation %}{{ m.content + '#' }}{% endgeneration %}{{ '\n' }}",
            "bot: ",
        ),
        ["A1#", "A2#"],
    ),
}
TURNS = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2"},
]
# Rewrites an earlier turn when another follows, as templates that drop reasoning do.
FORGETFUL = each(
    "{{ m.role }}{% if m.role == 'assistant' and loop.last %}{{ '<think>' }}{% endif %}{{ m.content }}",
    "assistant",
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def learned(source: str, *chats: Chat) -> list[list[str]]:
    rendered = render_chats(template(source), chats)
    plain = template(source)
    for chat, one in zip(chats, rendered, strict=True):
        assert one.text == plain.render(list(chat.messages), generate=False), "marks leave nothing behind"
    return [[one.text[begin:end] for begin, end in one.learned] for one in rendered]


@pytest.mark.parametrize("family", FAMILIES)
def test_assistant_turns_are_what_the_family_writes(family):
    source, both = FAMILIES[family]
    whole, first, last = Chat(TURNS), Chat(TURNS[:2]), Chat(TURNS, learned_from=2)
    assert learned(source, whole, first, last) == [both, both[:1], both[1:]]


def test_marks_of_a_template_win_over_the_difference_of_renderings():
    """The marked template leaves out the newline that ends a turn; a difference could not."""
    source, both = FAMILIES["marked"]
    unmarked = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert learned(source, Chat(TURNS)) == [both]
    assert learned(unmarked, Chat(TURNS)) == [["A1#\n", "A2#\n"]]


def test_template_that_rewrites_earlier_turns_is_refused_with_the_row():
    fine = Chat(TURNS[:1] + [{"role": "assistant", "content": "A"}], source="data.jsonl:1")
    with pytest.raises(
        ConfigError, match=r"data.jsonl:2: .*message 2 when more follows.*sft.chat_template=FILE"
    ):
        render_chats(template(FORGETFUL), [fine, Chat(TURNS, source="data.jsonl:2")])


def test_tools_of_each_chat_reach_its_rendering():
    source = "{% for t in tools or [] %}{{ t.name }};{% endfor %}" + FAMILIES["chatml"][0]
    texts = [
        one.text for one in render_chats(template(source), [Chat(TURNS, [{"name": "add"}]), Chat(TURNS)])
    ]
    assert texts[0] == "add;" + texts[1]
