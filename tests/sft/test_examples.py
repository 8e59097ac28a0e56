"""Rows become the tokens and masks that their texts say; what teaches nothing is refused or counted."""

import json

import numpy as np
import pytest
from tokenizers import processors

from paceline.config import ConfigError, load_config
from paceline.sft.examples import Examples, Reader, split_held_out
from paceline.tasks.chat import ChatTemplate
from paceline.tasks.make import make_task
from tests.tasks.test_chat import CHATML, byte_tokenizer, save_folder

END = 0
CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2 ✓"},
    {"role": "user", "content": "and 1?"},
    {"role": "assistant", "content": "3"},
]


def plain_tokenizer():
    """Begins no text with a token of its own."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.ByteLevel()
    return tokenizer


def reader(most_tokens: int = 512, template: bool = True) -> Reader:
    return Reader(plain_tokenizer(), ChatTemplate(CHATML) if template else None, (END,), most_tokens)


def read(tmp_path, *rows, **settings) -> Examples:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return reader(**settings).read(path, "sft.data")


def parts(sequence) -> tuple[str, str]:
    """Returns all of an example's text, and what is learned of it, without the end token."""
    decode = byte_tokenizer().decode
    tokens = np.asarray(sequence.tokens)
    learned = tokens[sequence.prompt_length :][sequence.loss_mask]
    return tuple(
        decode([int(t) for t in some if t != END], skip_special_tokens=False) for some in (tokens, learned)
    )


def test_messages_are_learned_in_the_assistants_turns_alone(tmp_path):
    (example,) = read(tmp_path, {"messages": CHAT}).sequences
    text, learned = parts(example)
    assert text == ChatTemplate(CHATML).render(CHAT, generate=False)
    assert learned == "2 ✓<|im_end|>\n3<|im_end|>\n"


def test_pairs_of_messages_are_learned_in_the_completion_alone(tmp_path):
    (example,) = read(tmp_path, {"prompt": CHAT[:3], "completion": CHAT[3:]}).sequences
    assert parts(example)[1] == "3<|im_end|>\n"


@pytest.mark.parametrize("column", ["completion", "response"])
def test_pairs_of_texts_end_with_the_end_token(tmp_path, column):
    (example,) = read(tmp_path, {"prompt": "1+1=", column: "2"}, template=False).sequences
    assert parts(example) == ("1+1=2", "2")
    assert example.tokens[-1] == END and example.loss_mask.all()


def test_plain_text_is_learned_but_for_its_first_token_and_cut_where_it_is_too_long(tmp_path):
    found = read(tmp_path, {"text": "abcdefgh"}, most_tokens=4)
    texts = [parts(example) for example in found.sequences]
    assert texts == [("abcd", "bcd"), ("efgh", "fgh")]
    assert found.too_long == 0


def test_examples_that_are_too_long_are_left_out_and_counted(tmp_path):
    pairs = [{"prompt": "a", "response": "b" * count} for count in (2, 50, 3)]
    found = read(tmp_path, *pairs, most_tokens=10)
    assert [len(one.tokens) for one in found.sequences] == [4, 5] and found.too_long == 1
    with pytest.raises(ConfigError, match=r"sft.data = .*all 1 are too long \(at most 10 tokens\)"):
        read(tmp_path, pairs[1], most_tokens=10)


def test_examples_whose_turns_never_end_are_counted(tmp_path):
    rows = [{"messages": CHAT[:2]}, {"prompt": "a", "response": "b"}]
    assert read(tmp_path, *rows).endless == 1, "<|im_end|> is not the policy's end token here"


@pytest.mark.parametrize(
    "row, said",
    [
        (
            {"question": "x"},
            "rows.jsonl:2: has the columns question; an example is `messages`, `prompt` with",
        ),
        ({"conversations": []}, "write `conversations` as messages with role and content"),
        ({"messages": CHAT[:1]}, "rows.jsonl:2: no message is the assistant's"),
        ({"messages": "hello"}, "rows.jsonl:2: messages must be a list of objects with `role`"),
        ({"prompt": "", "response": "b"}, "rows.jsonl:2: `prompt` has no tokens.*or give it as `text`"),
        ({"prompt": "a", "response": 3}, "rows.jsonl:2: must be text, not 3"),
    ],
)
def test_row_that_cannot_be_learned_from_is_refused_with_its_place(row, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, {"prompt": "a", "response": "b"}, row)


def test_messages_without_a_template_are_refused_with_the_key(tmp_path):
    with pytest.raises(ConfigError, match="messages need a chat template.*sft.chat_template=FILE"):
        read(tmp_path, {"messages": CHAT}, template=False)


def test_held_out_examples_do_not_depend_on_the_others(tmp_path):
    pairs = [{"prompt": str(i), "response": "b"} for i in range(200)]
    found = read(tmp_path, *pairs)
    train, held_out = split_held_out(found, 0.2, seed=3)
    assert 20 < len(held_out.sequences) < 60 and len(train.sequences) + len(held_out.sequences) == 200
    fewer = split_held_out(read(tmp_path, *pairs[::2]), 0.2, seed=3)[1]
    known = {parts(example)[0] for example in held_out.sequences}
    assert {parts(example)[0] for example in fewer.sequences} <= known
    assert known != {parts(one)[0] for one in split_held_out(found, 0.2, seed=4)[1].sequences}


@pytest.mark.parametrize("chat", [False, True])
def test_demonstrations_are_prompted_as_in_rl(chat, tmp_path):
    folder = save_folder(tmp_path / "policy", CHATML)
    overrides = [
        *("task.train_problems=8", "task.eval_problems=8"),
        *(f"task.chat={chat}", "task.prompt_format='{prompt}Search aloud.'"),
    ]
    task = make_task(load_config("countdown", overrides).task, byte_tokenizer(), folder)
    found = reader(100_000).demonstrations(task, 20, 3, most_response=100_000)
    for example, demonstration in zip(found.sequences, task.demonstrations(20, 3), strict=True):
        assert tuple(example.tokens[: example.prompt_length]) == task.prompts.encode(demonstration.problem)
        assert example.tokens[-1] == END
        assert parts(example)[1] == demonstration.response
        assert ("<|im_start|>" in parts(example)[0]) is chat


def test_demonstrations_that_rl_would_cut_off_are_left_out(tmp_path):
    overrides = ["task.train_problems=8", "task.eval_problems=8"]
    task = make_task(load_config("countdown", overrides).task, byte_tokenizer(), tmp_path)
    lengths = [len(s.loss_mask) for s in reader(10**6).demonstrations(task, 32, 0, 10**6).sequences]
    limit = sorted(lengths)[20]
    found = reader(10**6).demonstrations(task, 32, 0, limit)
    assert len(found.sequences) == sum(length <= limit for length in lengths)
    assert found.too_long == 32 - len(found.sequences)
    with pytest.raises(ConfigError, match=r"all 32 demonstrations are too long: rollout\.max_tokens = 5"):
        reader(10**6).demonstrations(task, 32, 0, 5)


def test_file_tasks_rows_are_demonstrations_where_a_column_has_responses(tmp_path):
    """GSM8K: the answer column ends in the answer, and is what the policy is to write."""
    rows = [{"question": f"{i}+1?", "answer": f"it is\n#### {i + 1}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"task.data.path={tmp_path / 'rows.jsonl'}",
        *("task.chat=false", "task.prompt_format='{prompt} '"),
    ]
    none = "task.data.response_column="
    without = make_task(load_config("gsm8k", [*overrides, none]).task, byte_tokenizer(), tmp_path)
    task = make_task(load_config("gsm8k", overrides).task, byte_tokenizer(), tmp_path)
    try:
        assert without.demonstrations is None
        found = reader().demonstrations(task, 0, 0, 100)
        assert len(found.sequences) == len(task.train)
        first = task.train[0]
        assert parts(found.sequences[0]) == (
            f"<s>{first.prompt} it is\n#### {first.answer}",
            f"it is\n#### {first.answer}",
        )
    finally:
        task.close()
        without.close()
