"""The checks themselves: versions that agree, shares that hold every test, failures that show."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from scripts.shares import WEIGHTS, split

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_pre_commit_formats_with_the_version_that_lint_checks_with():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (revision,) = [repo["rev"] for repo in hooks if "ruff" in repo["repo"]]
    assert f"ruff=={revision.removeprefix('v')}" in PROJECT["optional-dependencies"]["lint"]


def test_torch_is_pinned_to_one_version_everywhere():
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (of_vllm,) = re.findall(
        r"^TORCH=\$\{TORCH:-(\S+)\}$", (ROOT / "scripts/vllm_env.sh").read_text(), re.MULTILINE
    )
    assert pinned == of_vllm


@pytest.mark.parametrize("parts", [1, 4, 7])
@pytest.mark.parametrize("kind", ["gpu", "slow"])
def test_shares_hold_every_file_exactly_once(kind, parts, request):
    shares = split(kind, parts)
    listed = [file for share in shares for file in share]
    assert len(shares) == parts and all(shares) and len(listed) == len(set(listed))
    marked = [item for item in request.session.items if kind == "slow" or item.get_closest_marker(kind)]
    collected = {str(item.path.relative_to(ROOT)) for item in marked}
    assert collected <= set(listed), "scripts/shares.py does not find these"


def test_share_weights_name_existing_files():
    missing = [file for weights in WEIGHTS.values() for file in weights if not (ROOT / file).is_file()]
    assert not missing, f"scripts/shares.py weighs {missing}"


def test_ci_marked_tests_are_slow(request):
    """Or it would be part of the core suite, too."""
    marked = [item for item in request.session.items if item.get_closest_marker("ci")]
    assert all(item.get_closest_marker("slow") for item in marked)


@pytest.mark.parametrize("bad", ["", "lint", "docs", "peers", "test", "test-slow", "soak"])
def test_ci_script_fails_where_a_part_does_and_prints_all_parts(bad, tmp_path):
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "made $1"\n[ "$1" != "{bad}" ]\n')
    make.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    ran = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True)
    assert ran.returncode == (1 if bad else 0), ran.stdout + ran.stderr
    for part in ("lint", "docs", "peers", "test", "test-slow", "soak"):
        result = "failed with 1" if part == bad else "passed"
        assert f"made {part}\n" in ran.stdout and re.search(
            rf"^== {part}: \d+ s, {result}$", ran.stdout, re.M
        )
    assert not [path for path in tmp_path.iterdir() if path != make], "outputs are left behind"
