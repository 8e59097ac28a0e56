"""Rows from files and from the folders that `datasets` saves."""

import json

import pytest

from paceline.config import ConfigError
from paceline.tasks.data import read_rows

ROWS = [{"text": "one", "tags": ["a", "b"]}, {"text": "two", "tags": []}, {"text": "three", "tags": ["c"]}]


def rows(path):
    return [row for _, row in read_rows(path, "sft.data")]


def save_arrow(folder, parts):
    """What `Dataset.save_to_disk` writes: shards in Arrow's stream format, and which they are."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        table = pyarrow.Table.from_pylist(part)
        with (
            pyarrow.OSFile(str(folder / name), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def test_rows_of_a_saved_dataset_come_shard_by_shard(tmp_path):
    folder = save_arrow(tmp_path / "set", [ROWS[:2], ROWS[2:]])
    (folder / "dataset_info.json").write_text("{}")
    assert rows(folder) == ROWS
    places = [where for where, _ in read_rows(folder, "sft.data")]
    assert places[2].endswith("data-00001-of-00002.arrow row 1")


def test_dataset_with_splits_names_them(tmp_path):
    for split in ("test", "train"):
        save_arrow(tmp_path / "all" / split, [ROWS])
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"sft.data = .*several splits; name one: .*all/test, .*all/train"):
        rows(tmp_path / "all")
    assert rows(tmp_path / "all/train") == ROWS


def test_folder_of_files_is_read_in_the_order_of_their_names(tmp_path):
    for name, part in (("b", ROWS[2:]), ("a", ROWS[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    assert rows(tmp_path) == ROWS


def test_folder_without_data_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="sft.data = .*holds no data; give a .jsonl or .parquet file"):
        rows(tmp_path)
    pytest.importorskip("pyarrow")
    (tmp_path / "x.arrow").write_text("no arrow")
    with pytest.raises(ConfigError, match="x.arrow is not readable Arrow"):
        rows(tmp_path)
