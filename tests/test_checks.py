"""The checks themselves: versions that must agree, GPU tests that must all be in some share."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from scripts.gpu_tests import gpu_test_files, split

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
def test_every_gpu_test_file_is_in_exactly_one_share(parts, request):
    shares = split(gpu_test_files(), parts)
    listed = [file for share in shares for file in share]
    assert len(shares) == parts and all(shares) and len(listed) == len(set(listed))
    collected = {
        str(item.path.relative_to(ROOT)) for item in request.session.items if item.get_closest_marker("gpu")
    }
    assert collected <= set(listed), "scripts/gpu_tests.py does not find these"
