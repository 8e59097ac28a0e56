"""What `pip install` of a built wheel gives: every file that the package reads, and commands that work."""

import fnmatch
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


def test_every_data_file_is_package_data():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = data_files()
    assert "py.typed" in files and "recipes/default.yaml" in files
    left_out = [file for file in files if not any(fnmatch.fnmatch(file, p) for p in patterns["paceline"])]
    assert not left_out, f"pyproject.toml's package-data leaves out {left_out}"


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_a_wheel_installs_and_trains_from_anywhere(tmp_path):
    """In a clean environment that borrows only the dependencies of this one."""
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        tmp_path,
        ROOT,
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("paceline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        missing = {f"paceline/{file}" for file in data_files()} - set(archive.namelist())
    assert not missing

    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        wheel,
        cwd=tmp_path,
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(python, "-c", "import paceline; print(paceline.__file__)", cwd=empty)
    assert where.startswith(str(environment)), "it is the wheel that runs, not the clone"
    command = environment / "bin" / "paceline"
    assert "train" in run(command, "--help", cwd=empty)
    run(command, "train", "run.steps=1", "run.name=once", cwd=empty)
    assert (empty / "runs" / "once" / "metrics.jsonl").read_text().count("\n") == 1
