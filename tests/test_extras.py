"""Errors about optional packages name extras that exist, with a command that works in a clone."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from paceline.config.extras import Extra, install_command, needs_package

ROOT = Path(__file__).parents[1]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@pytest.mark.parametrize("extra", get_args(Extra))
def test_extras_that_errors_name_exist(extra):
    assert extra in EXTRAS
    assert shlex.split(install_command(extra)) == ["pip", "install", "-e", f".[{extra}]"]
    assert install_command(extra) in needs_package("anything", extra)


def test_source_names_extras_only_through_the_helper():
    """A literal `paceline[...]` is on no package index, and a literal extra may not exist."""
    literal = re.compile(r"""paceline\[|pip install|['"]?\.\[[\w,]+\]""")
    homes = {"config/extras.py"}
    source = ROOT / "src" / "paceline"
    found = [
        f"{file.relative_to(source)}:{number}: {line.strip()}"
        for file in sorted(source.rglob("*.py"))
        if str(file.relative_to(source)) not in homes
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if literal.search(line)
    ]
    assert not found, "\n".join(found)
