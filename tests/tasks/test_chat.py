"""Chat templates render what transformers renders, and prompts encode to the tokens transformers gives."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from paceline.config import ConfigError
from paceline.tasks.base import Observation, Problem
from paceline.tasks.chat import ChatTemplate
from paceline.tasks.prompts import PromptEncoder, filter_overlong_prompts

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{#- a comment #}
{{- "<|start|>system<|stop|>\\n\\n" + (date_string or "none") }}
{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n'+ message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {{- message.tool_calls | tojson(indent=2) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|stop|>\\n\\n' }}
{%- endif %}
"""
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
THINKING = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
            {%- set content = '<think>' ~ message.reasoning_content ~ '</think>' ~ content %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role in ('user', 'system', 'tool') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
INDENTED = """{% for message in messages %}
    {% if message.role == 'user' %}
User: {{ message.content }}
    {% else %}
Other: {{ message.content }}
    {% endif %}
{% endfor %}
    {% if add_generation_prompt %}
Bot:{% endif %}"""
TEMPLATES = {
    "indented": INDENTED,
    "chatml": CHATML,
    "llama": LLAMA,
    "alternating": ALTERNATING,
    "thinking": THINKING,
}

USER = {"role": "user", "content": "2 + 2?"}
CHATS = {
    "plain": [USER],
    "system": [{"role": "system", "content": "  terse  "}, USER],
    "several": [
        USER,
        {"role": "assistant", "content": "<think>hm</think>\n\n4"},
        {"role": "user", "content": ""},
    ],
    "odd text": [
        {
            "role": "user",
            "content": "<b>&amp; {{ bos_token }} {% raw %} \u00e4\u4e2d\U0001f600\n\n\t'quotes\" \\n",
        }
    ],
    "reasoning": [USER, {"role": "assistant", "content": "4", "reasoning": "easy"}],
    "tool call": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "calc", "arguments": {"x": "<1>", "\u00fc": 2}}],
        },
    ],
}


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    # As Llama's does, it begins every text with <s>; a template that writes <s> itself must not get a second
    # one.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save_folder(folder, template, as_file=False, as_list=False, added_token=False):
    folder.mkdir(exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<s>", "special": True} if added_token else "<s>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": "</s>"}
    if as_file:
        (folder / "chat_template.jinja").write_text(template)
        settings["chat_template"] = "the file wins"
    elif template is not None:
        settings["chat_template"] = (
            [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
            if as_list
            else template
        )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_chat_template_renders_like_transformers(tmp_path, template, chat, generate):
    folder = save_folder(tmp_path / "policy", TEMPLATES[template])
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"enable_thinking": False, "date_string": "today"}
    ours = ChatTemplate.from_folder(folder, options)
    try:
        expected = reference.apply_chat_template(
            CHATS[chat], tokenize=False, add_generation_prompt=generate, **options
        )
    except Exception:
        with pytest.raises(ConfigError, match="the policy's chat template refuses messages with roles"):
            ours.render(CHATS[chat], generate)
        return
    assert ours.render(CHATS[chat], generate) == expected


@pytest.mark.parametrize("kind", ["as_file", "as_list", "added_token"])
def test_chat_template_is_found_in_every_place(tmp_path, kind):
    folder = save_folder(tmp_path / "policy", LLAMA, **{kind: True})
    assert ChatTemplate.from_folder(folder).render([USER]).startswith("<s><|start|>system")


def test_chat_template_is_sandboxed():
    escape = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ConfigError, match="refuses"):
        escape.render([USER])
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% if %}").render([USER])


@pytest.mark.parametrize("template", ["chatml", "llama"])
def test_prompt_encoder_tokens_equal_those_of_transformers(tmp_path, template):
    folder = save_folder(tmp_path / "policy", TEMPLATES[template])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    encoder = PromptEncoder(
        tokenizer, ChatTemplate.from_folder(folder), "Q: {prompt}", chat=True, system_prompt="terse"
    )
    chat = [{"role": "system", "content": "terse"}, {"role": "user", "content": "Q: {x} 1 + 1?"}]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert list(encoder.encode(Problem("a", "{x} 1 + 1?", "2"))) == expected
    assert list(encoder.encode(Problem("a", tuple(chat), "2"))) == expected, (
        "a chat's own system message stays"
    )
    plain = PromptEncoder(tokenizer, None, "Q: {prompt}")
    assert tokenizer.decode(plain.encode(Problem("a", "1 + 1?", "2"))) == "Q: 1 + 1?"


def test_follow_up_continues_the_conversation(tmp_path):
    """The tokens so far and the observation's together are the rendering of the whole conversation."""
    folder = save_folder(tmp_path / "policy", CHATML)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = ChatTemplate.from_folder(folder)
    encoder = PromptEncoder(tokenizer, template, chat=True)
    prompt = encoder.encode(Problem("a", "2 + 2?", "4"))
    response = tuple(tokenizer.encode("five", add_special_tokens=False).ids)
    end = tokenizer.token_to_id("<|im_end|>")
    again = {"role": "user", "content": "Sure?"}
    whole = template.render([USER, {"role": "assistant", "content": "five"}, again])
    expected = tokenizer.encode(whole, add_special_tokens=False).ids
    ended = (*response, end)
    assert [*prompt, *ended, *encoder.encode_observation(Observation((again,)), end)] == expected
    assert [
        *prompt,
        *response,
        *encoder.encode_observation(Observation((again,)), response[-1]),
    ] == expected, "stopped by a text: the end is added"


def test_missing_chat_template_or_chat_is_refused_with_the_way_out(tmp_path):
    folder = save_folder(tmp_path / "policy", None)
    assert ChatTemplate.from_folder(folder) is None
    encoder = PromptEncoder(byte_tokenizer(), None)
    with pytest.raises(ConfigError, match="no chat template.*task.chat=false"):
        encoder.encode(Problem("a", (USER,), ""))
    with pytest.raises(ConfigError, match="set task.chat=true"):
        PromptEncoder(byte_tokenizer(), None, system_prompt="x").encode(Problem("a", "plain", ""))


def test_overlong_prompts_are_dropped_and_counted(caplog):
    encoder = PromptEncoder(byte_tokenizer())
    problems = [Problem(str(n), "x" * n, "") for n in (1, 5, 9)]
    assert [p.id for p in filter_overlong_prompts(problems, encoder, 6, "training")] == ["1", "5"]  # and <s>
    assert "1 of 3 training prompts are longer and were dropped" in caplog.text
    with pytest.raises(ConfigError, match="leaves no training prompts: the shortest has 6 tokens"):
        filter_overlong_prompts(problems[1:], encoder, 5, "training")
