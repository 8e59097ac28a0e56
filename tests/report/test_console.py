"""What a person sees on a terminal, and what a file gets where there is none."""

import io
import os
import pty
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import rich.console
import torch

from paceline.certify.closing_check import SpeculationCheck
from paceline.cli.progress import announce, step_progress, working
from paceline.report.clock import StageClock
from paceline.report.console import Console
from paceline.report.live import LiveView, duration, sparkline
from paceline.rollout.progress import RolloutProgress
from paceline.stats import RolloutStats
from tests.report.made_run import train_record


def stand_ins():
    stats = RolloutStats(running=[128, 37], strategies=["plain", "history:5"])
    backend = SimpleNamespace(live_stats=lambda: stats)
    sampler = SimpleNamespace(progress=RolloutProgress(128), backend=backend)
    for tokens in (30, 110, 12):
        sampler.progress.add(tokens)
    return sampler, StageClock(torch.device("cpu"))


def shown(console):
    return console.out.file.getvalue()


def console_with(width=100, terminal=True, quiet=False):
    console = Console(quiet)
    console.out = rich.console.Console(
        file=io.StringIO(), force_terminal=terminal, width=width, quiet=quiet, highlight=False, soft_wrap=True
    )
    return console


def test_live_view_shows_where_the_run_is():
    sampler, clock = stand_ins()
    view = LiveView(sampler, clock)
    view.total_steps = 25
    view.held_out = "92.2% ± 2.3"
    for step in (1, 2, 3):
        view.note_step(step, train_record(step))
    console = rich.console.Console(file=io.StringIO(), width=200)
    with clock("rollout"):
        console.print(view)
    text = console.file.getvalue()
    assert "step 3/25  reward 0.308 ▁▅█  accuracy 31% ▁▅█  held-out 92.2% ± 2.3  1:24 left" in text
    assert "rollout  running 37  finished 3/128" in text and "longest 110  history:5" in text
    assert "last step: rollout 2.6 s (68%)  learn 1.2 s (31%)" in text


@pytest.mark.parametrize("width", [20, 40, 80])
def test_live_view_never_wraps(width):
    sampler, clock = stand_ins()
    view = LiveView(sampler, clock)
    view.note_step(1, train_record(1))
    console = rich.console.Console(file=io.StringIO(), width=width)
    with clock("rollout"):
        console.print(view)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3 and all(len(line) <= width for line in lines)


def test_step_lines_fit_a_narrow_terminal_and_are_whole_in_a_file():
    for width, terminal, longest in ((50, True, 50), (50, False, 75)):
        console = console_with(width, terminal)
        console.start(25)
        console.step(1, train_record(1))
        lines = shown(console).replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines()
        assert len(lines) == 2 and max(map(len, lines)) <= longest
        assert ("entropy" in lines[0]) != terminal


def test_quiet_console_prints_nothing():
    console = console_with(quiet=True)
    sampler, clock = stand_ins()
    with console.watching(sampler, clock):
        console.start(2)
        console.step(1, train_record(1))
        console.speculation(SpeculationCheck((2.0,) * 5, (1.0,) * 5, 288, 172, 2.0, True))
    assert shown(console) == "" and console.view is None


def test_closing_comparison_names_steps_saved_and_spread():
    console = console_with(terminal=False)
    console.speculation(SpeculationCheck((2.0, 2.2, 2.1, 2.0, 2.4), (1.0,) * 5, 288, 172, 2.5, True))
    text = shown(console)
    assert "plain              2.10 [2.00, 2.40] s in 288 policy steps" in text
    assert "in 172 policy steps (116 saved, 40%)" in text
    assert "speed: 2.10x, between 2.00 and 2.40 in 5 pairs" in text and "tokens identical: yes" in text


def test_live_view_is_gone_after_the_run_and_after_an_error():
    console = console_with()
    with pytest.raises(RuntimeError), console.watching(*stand_ins()):
        assert console.view is not None
        raise RuntimeError
    assert console.view is None


def test_console_prints_names_in_brackets_unchanged():
    console = console_with(terminal=False)
    console.start_of_run("[red]policy[/]", "[bold]", "cpu", "runs/[x]")
    assert shown(console) == "training [red]policy[/] on [bold]; cpu; run directory runs/[x]\n"


def test_step_progress_without_a_terminal_is_a_line_every_few_seconds(capsys, monkeypatch):
    clock = iter(range(0, 1000))  # a second for each look at it
    monkeypatch.setattr("paceline.cli.progress.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    announce("training on [data]; written to out")
    with step_progress("head") as show:
        for step in range(1, 61):
            show(step, 60, "loss 1.0")
    with step_progress("head", quiet=True) as show:
        show(1, 1, "hidden")
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "training on [data]; written to out"
    assert [line.split()[0] for line in error[1:]] == [
        "1/60",
        "11/60",
        "21/60",
        "31/60",
        "41/60",
        "51/60",
        "60/60",
    ]


def test_working_without_a_terminal_prints_the_seconds_so_far(capsys, monkeypatch):
    monkeypatch.setattr("paceline.cli.progress.LINE_SECONDS", 0.01)
    with working("certify"):
        time.sleep(0.5)
    assert "certify: 0 s" in capsys.readouterr().err


def test_sparkline_and_duration_are_short():
    assert sparkline([]) == "" and sparkline([1, 1]) == "▄▄" and sparkline([0, 1, 2]) == "▁▅█"
    assert [duration(s) for s in (0, 42.4, 187, 7387)] == ["0 s", "42 s", "3:07", "2:03:07"]


@pytest.mark.slow
def test_console_on_a_terminal_shows_the_live_view_and_respects_no_color(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    environment |= {"TERM": "xterm-256color", "NO_COLOR": "1"}
    command = [
        "train",
        "run.steps=2",
        "task.eval_problems=16",
        "report.closing_pairs=1",
        f"run.root={tmp_path}",
    ]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *command], stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    said = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        said += block
        if not block:
            break
    assert process.wait() == 0, said.decode()
    text = said.decode()
    assert text.startswith("training builtin on running-sums") or "training builtin" in text[:200]
    assert "finished" in text and "running" in text and "tokens/s" in text, "the rollout was shown live"
    assert not any(f"\x1b[{code}m" in text for code in (31, 32, 33, 34, 36))
