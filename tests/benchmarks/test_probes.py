"""Each script of benchmarks/ runs once, tiny, and what the shell scripts call is there."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.kernels import run as kernels
from benchmarks.kernels.limits import DeviceLimits
from paceline.cli.main import app
from paceline.policy.shapes import SHAPES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
SMALL = ["run.device=cpu", "task.train_problems=8", "task.eval_problems=1", "rollout.max_tokens=24"]
RUN = {
    "run": {"name": "plain-seed0", "steps": 2, "device": "cpu", "threads": 1},
    "task": {"train_problems": 8, "eval_problems": 4},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 16},
    "report": {"closing_pairs": 0},
}
# Modules with what they must print, and their arguments.
ONCE = ["--repeats", "1"]
PROBES = {
    "decode": ("tok/s", ["--batches", "1,3", "--prompt", "5", "--new", "4", "--proposals", "0,2", *ONCE]),
    "kernels": ("of limit", ["--only", "linear,attention,sampler", *ONCE]),
    "speculation": (
        "eagle:2",
        ["default", *SMALL, "--batches", "2", "--rounds", "1", "--tokens", "2", *ONCE],
    ),
    "pacing": ("paced 1", ["--requests", "3", "--prompt", "5", "--lengths", "fixed:12", "--rollouts", "1"]),
}
# Scripts that need a GPU or another environment, and those that a test of their own runs.
NOT_HERE = {
    "fp8_learning": "a GPU and a real policy",
    "memory": "a GPU: tests/plan/test_plan_gpu.py",
    "online_vllm": "vLLM",
    "peer_learner": "a GPU",
    "peer_vllm": "vLLM",
    "vllm_rollouts": "vLLM",
    "make_builtin": "minutes of training",
    "widen": "tests/models",
    "lengths": "tests/test_countdown_learns.py",
}
IMPORTED = {"__init__", "oracle", "probe", "timing"}
TABLES = {
    "same_learning": ["RUNS"],
    "online_table": ["runs", "RUNS"],
    "modes_table": ["RUNS", "OUT"],
    "vllm_table": ["RUNS"],
}


def started(script: str, *arguments: str, folder: Path = ROOT) -> str:
    """Runs a script or, with no suffix, a module of the folder, and returns what it printed."""
    called = [str(FOLDER / script)] if script.endswith(".py") else ["-m", f"benchmarks.{script}"]
    done = subprocess.run(
        [sys.executable, *called, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmark_scripts_are_all_run_by_some_test():
    known = {*PROBES, *NOT_HERE, *IMPORTED, *TABLES, "cluster_overheads"}
    assert {file.stem for file in FOLDER.glob("*.py")} <= known


@pytest.mark.slow
@pytest.mark.parametrize("probe", PROBES)
def test_probe_measures_something(probe, tmp_path):
    expected, arguments = PROBES[probe]
    figures = tmp_path / "figures.json"
    assert expected in started(probe, *arguments, "--json", str(figures))
    points = json.loads(figures.read_text())["points"]
    assert points and all(point.get("identical", 1.0) == 1.0 for point in points), "the same tokens"


@pytest.mark.slow
def test_pacing_probe_takes_a_recipe():
    overrides = [*SMALL, "rollout.speculation.shape=tree", "rollout.speculation.drafters=[history,eagle]"]
    arguments = ["--requests", "4", "--tokens", "3", "--rollouts", "1"]
    printed = started("pacing", "default", *overrides, *arguments)
    for name in ("plain", "history:tree3", "eagle:tree3", "paced 1"):
        assert name in printed


@pytest.mark.slow
def test_cluster_overheads_runs_from_any_folder(tmp_path):
    """Its workers import the script by its name, which they found only from the repository's root."""
    small = ["--requests", "2", "--megabytes", "1", "--repeats", "1", "--idle", "0"]
    printed = started("cluster_overheads.py", *small, folder=tmp_path)
    transports = [json.loads(line).get("transport") for line in printed.splitlines()]
    assert transports == [None, "memory", "broadcast"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with one short run."""
    folder = tmp_path_factory.mktemp("tables")
    recipe = folder / "recipe.json"  # JSON is YAML
    recipe.write_text(json.dumps(RUN))
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", str(recipe), f"run.root={folder / 'runs'}"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("script", TABLES)
def test_table_scripts_read_runs(script, runs):
    places = {"RUNS": str(runs / "runs"), "OUT": str(runs)}
    printed = started(f"{script}.py", *(places.get(word, word) for word in TABLES[script]))
    assert "plain" in printed


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.stem)
def test_shell_scripts_call_existing_commands(script):
    subprocess.run(["bash", "-n", script], check=True)
    lines = re.sub(r"\\\n\s*", " ", script.read_text()).splitlines()
    for line in (line.strip() for line in lines if not line.strip().startswith("#")):
        command = re.search(r"(?:-m paceline|\$P) ([a-z].*)", line)
        probe = re.search(r"(?:^probe |-m benchmarks\.)([a-z]+)( .*)", line)
        if command:
            known, rest = options_of_command(command.group(1).split(), f"{script.name}: {line}")
        elif probe:
            known, rest = options_of_probe(probe.group(1)), probe.group(2)
        else:
            continue
        unknown = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)) - known
        assert not unknown, f"{script.name}: {line}: there is no {unknown}"


def options_of_probe(name: str) -> set[str]:
    """Returns the options that a probe's source names."""
    path = FOLDER / f"{name}.py"
    text = (path if path.is_file() else FOLDER / name / "__main__.py").read_text()
    return {"--json", *re.findall(r'"(--[a-z-]+)"', text)}


def options_of_command(words: list[str], line: str) -> tuple[set[str], str]:
    """Returns the options of the command that a line calls, and what stands behind its name."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"{line}: there is no {words[0]}"
        command = command.commands[words.pop(0)]
    return {option for parameter in command.params for option in parameter.opts}, " ".join(words)


def test_time_call_leaves_out_the_first_call():
    timing = importlib.import_module("benchmarks.timing")
    calls = []
    spread = timing.time_call(lambda: calls.append(None), torch.device("cpu"), repeats=3)
    assert len(calls) == 4 and 0 < spread.low <= spread.median <= spread.high
    assert timing.copies_for(1.0, torch.device("cpu")) == timing.MOST_COPIES
    assert timing.copies_for(1e12, torch.device("cpu")) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_kernels_are_right_on_a_gpu(shape):
    device, limits = torch.device("cuda"), DeviceLimits(bytes_per_second=1e9, flops=1e9, fp8_flops=None)
    names = kernels.choose_kernels([], SHAPES[shape], device)
    points = kernels.bench_kernels(SHAPES[shape], device, names, limits, repeats=1)
    assert not [f"{p.kernel} {p.size}: {p.error}" for p in points if not p.correct]
