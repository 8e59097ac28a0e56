"""A mistyped key is answered before anything heavy is imported."""

import json
import subprocess
import sys

# Importing torch, or anything that needs it, would end this with another error.
WITHOUT_TORCH = """
import contextlib, io, json, sys
sys.modules["torch"] = sys.modules["tokenizers"] = None
from paceline.cli.main import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["paceline", *command]
    status = 0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as exit:
            status = exit.code
    print(json.dumps([status, said.getvalue()]))
"""
COMMANDS = [
    ["train", "default", "learning.lrr=1"],
    ["train", "learning.lrr=1"],
    ["train", "learning.lrr=1", "--resume", "nowhere"],
    ["rollout", "learning.lrr=1"],
    ["eval", "builtin", "learning.lrr=1"],
    ["plan", "learning.lrr=1"],
    ["sft", "countdown", "learning.lrr=1"],
    ["drafter", "train", "builtin", "learning.lrr=1"],
    ["drafter", "eval", "builtin", "auto", "learning.lrr=1"],
    ["bench", "rollout", "default", "learning.lrr=1"],
    ["bench", "step", "default", "learning.lrr=1"],
    ["certify", "builtin", "learning.lrr=1"],
]


def test_mistyped_key_is_refused_without_importing_torch():
    program = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(COMMANDS)]
    ran = subprocess.run(program, capture_output=True, text=True)
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(answers) == len(COMMANDS), ran.stderr
    for command, (status, said) in zip(COMMANDS, answers, strict=True):
        assert status == 2, (command, said)
        error = said[said.index("error:") :]  # `bench` says first what it is about to do
        assert error.startswith("error: learning.lrr: there is no such key. Did you mean 'learning.lr'?")
