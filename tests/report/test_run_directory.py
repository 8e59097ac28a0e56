"""The folder of a run survives a crash at any moment, and says so where something else has damaged it."""

import os

import pytest

from paceline.config import ConfigError, load_config
from paceline.report.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(load_config(None, [f"run.root={tmp_path}", "run.name=run", "learning.algorithm=gspo"]), "default")


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
