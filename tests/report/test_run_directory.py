"""The folder of a run survives a crash at any moment, and says so where something else has damaged it."""

import logging
import os

import pytest

from paceline.config import ConfigError, load_config
from paceline.report.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(
        load_config(None, [f"run.root={tmp_path}", "run.name=run", "learning.algorithm=gspo"]), "default"
    )


def test_the_recipe_is_replaced_as_a_whole(run, monkeypatch):
    """A crash while it is written leaves the old one."""
    changed = load_config(str(run.config_path), ["run.steps=7"])

    def crash(*_):
        raise KeyboardInterrupt

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, crash)
            with pytest.raises(KeyboardInterrupt):
                run.write_config(changed)
        assert run.config().run.steps != 7 and run.config().learning.algorithm == "gspo"
    run.write_config(changed)
    assert run.config() == changed


def test_an_unchanged_recipe_is_not_written(run):
    before = run.config_path.stat()
    run.write_config(run.config())
    after = run.config_path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("content", ["", "\n", "# nothing\n", "{}\n"])
def test_an_empty_recipe_is_not_the_default_one(run, content):
    run.config_path.write_text(content)
    with pytest.raises(ConfigError, match="config.yaml is empty: the recipe of this run is lost"):
        run.config()


@pytest.mark.parametrize(
    "harm",
    [b'{"step": 1, "ki', b"\xff\xfe", b"\x00" * 20, b"5", b"{}", b""],
    ids=["torn", "bytes", "nulls", "number", "empty", "blank"],
)
def test_one_damaged_line_costs_one_record_and_is_said(run, harm, caplog):
    for step in range(4):
        run.append_metrics({"step": step, "kind": "train"})
    lines = run.metrics_path.read_bytes().split(b"\n")
    lines[1] = harm
    run.metrics_path.write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.WARNING):
        run.cut_back(2)
    assert [record["step"] for record in run.read_metrics()] == [0, 2]
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(run.metrics_path) in said and "line 2 is damaged" in said


@pytest.mark.parametrize("unfinished", [b'{"step": 4, "ki', b"\x00" * 20, b"\xff\xfe"])
def test_a_last_line_that_a_crash_cut_off_is_none(run, unfinished, caplog):
    for step in range(3):
        run.append_metrics({"step": step, "kind": "train"})
    whole = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(whole + unfinished)
    run.cut_back(9)
    assert run.metrics_path.read_bytes() == whole and not caplog.records
