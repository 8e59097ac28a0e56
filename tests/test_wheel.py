"""What `pip install` of a built wheel gives: every file that the package reads, and commands that work."""

import fnmatch
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "paceline"


def data_files() -> list[str]:
    """Returns the files of the package that are not code, relative to it."""
    files = [file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return sorted(str(file.relative_to(PACKAGE)) for file in files if file.suffix != ".py")


def test_package_data_covers_every_data_file():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = data_files()
    assert "py.typed" in files and "recipes/default.yaml" in files
    left_out = [file for file in files if not any(fnmatch.fnmatch(file, p) for p in patterns["paceline"])]
    assert not left_out, f"pyproject.toml's package-data leaves out {left_out}"


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command that must not find the clone, and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build_wheel(folder: Path) -> Path:
    """Builds from a copy: what an earlier build left in the clone must not get in."""
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("paceline-*.whl")
    return wheel


def install(wheel: Path, environment: Path) -> None:
    """Installs into a new environment that borrows only the dependencies of this one."""
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", wheel, cwd=wheel.parent)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


@pytest.mark.slow
@pytest.mark.ci
def test_wheel_installs_and_trains_from_anywhere(tmp_path):
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert not {f"paceline/{file}" for file in data_files()} - set(archive.namelist())
    environment = tmp_path / "environment"
    install(wheel, environment)
    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(environment / "bin" / "python", "-c", "import paceline; print(paceline.__file__)", cwd=empty)
    assert where.startswith(str(environment)), "it is the wheel that runs, not the clone"
    command = environment / "bin" / "paceline"
    assert "train" in run(command, "--help", cwd=empty)
    run(command, "train", "run.steps=1", "run.name=once", "task.eval_problems=16", cwd=empty)
    assert '"step": 1' in (empty / "runs" / "once" / "metrics.jsonl").read_text()
