"""Problems from files: columns, verl's layout, a split that is stable, and errors that name the row."""

import json
import os

import pytest

from paceline.config import ConfigError, DataConfig
from paceline.tasks.files import FileProblems, is_held_out, read_problems


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def sums(count, start=0):
    return [
        {"question": f"{n} + 1?", "answer": f"so\n#### {n + 1}", "level": n % 3}
        for n in range(start, start + count)
    ]


def verl_row(n):
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{n} + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n},
    }


def refused(path, **settings):
    with pytest.raises(ConfigError) as caught:
        FileProblems(DataConfig(path=str(path), **settings), seed=0)
    return str(caught.value)


def test_file_problems_read_columns_pattern_and_extras(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sums(40))
    config = DataConfig(
        path=path, prompt_column="question", answer_pattern=r"####\s*(.+)", held_out_share=0.25
    )
    task = FileProblems(config, seed=0)
    everything = {p.prompt: p for p in (*task.train, *task.held_out)}
    assert len(everything) == 40 and 3 <= len(task.held_out) <= 18
    assert everything["7 + 1?"].answer == "8" and everything["7 + 1?"].extra == {
        "answer": "so\n#### 8",
        "level": 1,
    }


def test_file_split_is_stable_under_appending_and_differs_by_seed(tmp_path):
    config = DataConfig(path="x", prompt_column="question")
    first = read_problems(tmp_path.joinpath(write_jsonl(tmp_path / "a.jsonl", sums(500))), config, "path")
    more = read_problems(
        tmp_path.joinpath(write_jsonl(tmp_path / "b.jsonl", sums(100, 1000) + sums(500))), config, "path"
    )

    def held_out(problems, seed=0):
        return {p.prompt for p in problems if is_held_out(p, 0.1, seed)}

    before = held_out(first)
    assert 30 <= len(before) <= 75
    assert before == held_out(more) & {p.prompt for p in first}
    assert before != held_out(first, seed=1)
    assert {p.id for p in first} <= {p.id for p in more}, (
        "ids, hence request seeds, do not depend on the place in the file"
    )
    assert held_out(first) <= {p.prompt for p in first if is_held_out(p, 0.2, 0)}, (
        "a larger share keeps what was held out"
    )


def test_held_out_file_rows_are_not_trained_on(tmp_path, caplog):
    config = DataConfig(
        path=write_jsonl(tmp_path / "a.jsonl", sums(10)),
        held_out_path=write_jsonl(tmp_path / "b.jsonl", sums(5, 8)),
        prompt_column="question",
    )
    task = FileProblems(config, seed=0)
    assert [p.prompt for p in task.train] == [f"{n} + 1?" for n in range(8)] and len(task.held_out) == 5
    assert "2 rows are also in" in caplog.text


@pytest.mark.parametrize(
    "suffix", [".jsonl", pytest.param(".parquet", marks=[pytest.mark.slow, pytest.mark.ci])]
)
def test_verl_files_work_as_they_are(tmp_path, suffix):
    rows = [verl_row(n) for n in range(50)]
    rows[3]["prompt"].append({"role": "assistant", "content": "hm", "name": "bot"})
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        write_parquet(path, rows)
    else:
        write_jsonl(path, rows)
    problems = read_problems(path, DataConfig(path=str(path)), "path")
    assert problems[4].prompt == ({"role": "user", "content": "4 + 1?"},) and problems[4].answer == "5"
    assert problems[4].extra["data_source"] == "sums" and problems[4].extra["extra_info"] == {"index": 4}
    assert problems[3].prompt[1] == {"role": "assistant", "content": "hm", "name": "bot"}
    assert "name" not in problems[4].prompt[0], (
        "parquet fills missing keys with null; templates must not see them"
    )


@pytest.mark.slow
@pytest.mark.ci
def test_parquet_and_jsonl_give_the_same_problems(tmp_path):
    write_parquet(tmp_path / "a.parquet", sums(20))
    config = DataConfig(path="x", prompt_column="question")
    write_jsonl(tmp_path / "a.jsonl", sums(20))
    assert read_problems(tmp_path / "a.parquet", config, "path") == read_problems(
        tmp_path / "a.jsonl", config, "path"
    )


def test_answers_that_are_not_text_become_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{n}", "answer": n} for n in (1, 2.5)])
    assert [p.answer for p in read_problems(tmp_path / "a.jsonl", DataConfig(path=path), "path")] == [
        "1",
        "2.5",
    ]


def test_file_errors_name_the_row_and_the_way_out(tmp_path):
    path = tmp_path / "a.jsonl"
    assert "task.data.path is empty" in refused("")
    assert "there is no such file" in refused(path)
    write_jsonl(path, [{"question": "?", "answer": "1"}])
    assert (
        refused(path)
        == f"{path}:1 has no value in task.data.prompt_column = 'prompt'; its columns are question, answer"
    )
    assert "finds no group in the answer '1'" in refused(
        path, prompt_column="question", answer_pattern="####(.*)"
    )
    assert "no held-out problems among the 1 rows" in refused(
        path, prompt_column="question", held_out_share=0.01
    )
    write_jsonl(path, [{"prompt": ["not a message"], "answer": "1"}])
    assert "must be text or a list of messages" in refused(path)
    path.write_text('{"prompt": "a", "answer": "1"}\n\nnot json\n')
    assert f"{path}:3 is not JSON" in refused(path)
    path.write_text("[1]\n")
    assert "must be a JSON object, not a list" in refused(path)
    path.write_text("")
    assert "holds no rows" in refused(path)
    (tmp_path / "a.csv").write_text("x")
    assert "must end in .jsonl or .parquet" in refused(tmp_path / "a.csv")


def test_data_path_that_is_no_file_is_named_in_the_error(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, wrong in (
        ("pipe.jsonl", "is a pipe or a device"),
        ("none.jsonl", "there is no such file"),
    ):
        path = tmp_path / name
        assert (
            refused(path) == f"task.data.path = '{path}': {wrong}; give a .jsonl or .parquet file, "
            "or a folder that `datasets` saved"
        )


@pytest.mark.parametrize(
    "content, reason",
    [
        (b'{"prompt": "a", "answer": "b"}\n\n{"prompt": \xff}\n', ":3 is not UTF-8: invalid start byte"),
        (
            b'{"prompt": "a", "answer": "b"}\n{"prompt": "a"\n',
            ":2 is not JSON: Expecting ',' delimiter at column 15",
        ),
        (b"\n[1]\n", ":2 must be a JSON object, not a list"),
        (b"[" * 100_000, ":1 is not JSON: it is nested too deep"),
        (b'{"prompt": "a", "answer": ' + b"9" * 6000 + b"}", ":1 holds a whole number of more than 4300"),
        (b'{"prompt": "a', ":1 is not JSON: Unterminated string starting at column 12"),
        (b'{"prompt": "a\tb"}', ":1 is not JSON: Invalid control character at column 14"),
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": "\\ud800", "answer": ""}', ":2 holds a half character"),
        ('{"prompt": "a", "answer": "b"}'.encode("utf-16"), ":1 is UTF-16; the file must be UTF-8"),
        (b'{"prompt": "a"}', ":1 has no value in task.data.answer_column = 'answer'; its columns are prompt"),
        (b'{"prompt": "", "answer": "b"}', ":1: a prompt must be text or a list of messages"),
    ],
)
def test_jsonl_errors_name_file_and_line(content, reason, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert refused(path).startswith(f"{path}{reason}")


def test_jsonl_bom_is_skipped(tmp_path):
    rows = "".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\r\n" for n in range(40))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    (tmp_path / "plain.jsonl").write_text(rows)
    with_bom, plain = (
        FileProblems(DataConfig(path=str(tmp_path / f"{name}.jsonl")), seed=0) for name in ("bom", "plain")
    )
    assert with_bom.train == plain.train and len(plain.train) + len(plain.held_out) == 40


def test_answer_pattern_that_is_no_regular_expression_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sums(5))
    assert "answer_pattern = '(': not a regular expression" in refused(path, answer_pattern="(")
