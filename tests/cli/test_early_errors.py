"""A mistyped key is answered before anything heavy is imported."""

import subprocess
import sys

import pytest

# Importing torch, or anything that needs it, would end this with another error.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["tokenizers"] = None
sys.argv = ["paceline", *sys.argv[1:]]
from paceline.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ["train", "default", "learning.lrr=1"],
        ["train", "learning.lrr=1"],
        ["train", "learning.lrr=1", "--resume", "nowhere"],
        ["rollout", "learning.lrr=1"],
        ["eval", "builtin", "learning.lrr=1"],
        ["plan", "learning.lrr=1"],
        ["warmup", "nowhere", "--recipe", "countdown", "learning.lrr=1"],
        ["drafter", "train", "builtin", "learning.lrr=1"],
        ["drafter", "eval", "builtin", "auto", "learning.lrr=1"],
        ["bench", "rollout", "default", "learning.lrr=1"],
        ["bench", "step", "default", "learning.lrr=1"],
        ["certify", "builtin", "learning.lrr=1"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_mistyped_key_needs_no_torch(command):
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, text=True)
    assert ran.returncode == 2, ran.stderr
    error = ran.stderr[ran.stderr.index("error:") :]  # `bench` says first what it is about to do
    assert error.startswith("error: learning.lrr: there is no such key. Did you mean 'learning.lr'?")
