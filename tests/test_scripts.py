"""Every script beside the package can be imported: what it takes from the package is still there."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    str(file.relative_to(ROOT))
    for folder in ("benchmarks", "scripts")
    for file in sorted((ROOT / folder).glob("*.py"))
]
# What a script may need beside the package and the tests' own dependencies.
OPTIONAL = ("mkdocs", "vllm")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_can_be_imported(script):
    tree = ast.parse((ROOT / script).read_text())
    imports = [node.names[0].name for node in tree.body if isinstance(node, ast.Import)]
    imports += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    for package in {name.partition(".")[0] for name in imports}.intersection(OPTIONAL):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(f"script_{Path(script).stem}", ROOT / script)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
