"""A tiny policy, and commands that are refused."""

import sys

import pytest

from paceline.cli.main import main
from tests.loop_helpers import make_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Runs a command in an empty folder, as its own process would; returns the message it fails with."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run
