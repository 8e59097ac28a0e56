"""`paceline launch` and its example files: what they would start, and errors that name the way out."""

import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cluster.placing import local_gpus
from paceline.cluster.ray_cluster import Versions, ray_cluster
from paceline.config import ClusterConfig, ConfigError, load_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
RECIPE = str(EXAMPLES / "recipe.yaml")


def launched(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["launch", *arguments, "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_launch_dry_run_prints_what_would_be_started():
    said = launched(RECIPE, "--address", "head:6379")
    assert "8 replicas generate, 8 FSDP2 ranks learn, 16 GPUs (apart)" in said
    assert "at head:6379" in said and "/shared/runs" in said
    assert "2 replicas generate, the launching process learns" in launched("cluster.replicas=2")


def test_launch_dry_run_promises_no_gpus_that_this_machine_lacks(monkeypatch):
    monkeypatch.setattr("paceline.device.best_device", lambda: torch.device("cpu"))
    assert "learn, on CPUs;" in launched("cluster.replicas=2", "cluster.learners=2")
    monkeypatch.setattr("paceline.device.best_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert "learn, 4 GPUs (apart);" in launched("cluster.replicas=2", "cluster.learners=2")
    with pytest.raises(ConfigError, match="need 5 GPUs, this machine has 4"):
        launched("cluster.replicas=3", "cluster.learners=2")


def test_launch_refuses_to_leave_a_clusters_gpus_idle(monkeypatch):
    """The machine that runs the loop decides for all what they compute on."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("paceline.device.best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("paceline.cluster.ray_cluster.ray_cluster", lambda *arguments: nullcontext())
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 16.0})
    with pytest.raises(ConfigError, match="has 16 GPUs, and this machine, which runs the loop, has none"):
        CliRunner().invoke(app, ["launch", "cluster.replicas=2"], catch_exceptions=False)


@pytest.mark.slow
def test_local_cluster_names_a_home_that_cannot_be_written(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with (
        pytest.raises(ConfigError, match="'/proc/nowhere'.*set HOME and RAY_TMPDIR"),
        ray_cluster("", ClusterConfig(replicas=1)),
    ):
        raise AssertionError("it started")


def test_launch_refuses_a_recipe_with_nothing_to_place():
    with pytest.raises(ConfigError, match="cluster.replicas = 0: there is nothing to place"):
        CliRunner().invoke(app, ["launch", "--dry-run"], catch_exceptions=False)


def test_kuberay_example_launches_a_recipe_on_the_gpus_it_requests():
    job = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    assert job["kind"] == "RayJob" and job["spec"]["shutdownAfterJobFinishes"]
    program, command, recipe, *options = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("paceline", "launch") and recipe.startswith("/shared/")
    assert "8 replicas" in launched(RECIPE, *options)
    cluster = job["spec"]["rayClusterSpec"]
    gpus = 0
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        limit = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert limit == int(group["rayStartParams"]["num-gpus"])
        gpus += group["replicas"] * limit
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert gpus == load_config(RECIPE, []).cluster.gpus == 16


STUBS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "ray": 'echo "ray $*" >> "$LOG"; [ "$1" = list ] && printf "node_id\\nnode_id\\n" || true',
    "paceline": 'echo "paceline $*" >> "$LOG"; exit 75',
}


def test_slurm_example_starts_ray_on_every_node_and_returns_the_exit_code(tmp_path):
    """The job itself, with programs in place of SLURM's and Ray's that write down how they were called."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "LOG": str(log), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(EXAMPLES / "slurm.sh"), RECIPE, "run.steps=5"]
    done = subprocess.run(command, env=os.environ | job, timeout=600, capture_output=True, text=True)
    assert done.returncode == 75, done.stderr
    calls = log.read_text().splitlines()
    assert sum(call.startswith("ray start --head --port=6379") for call in calls) == 1
    assert sum(call.startswith("ray start --address=node1:6379") for call in calls) == 1
    (run,) = [shlex.split(call) for call in calls if call.startswith("paceline")]
    assert run[:2] == ["paceline", "launch"]
    assert "at node1:6379" in launched(*run[2:])


def test_local_gpus_refuses_more_gpus_than_the_machine_has_and_names_both_counts():
    with pytest.raises(ConfigError, match=r"need 4 GPUs, this machine has 2: lower them"):
        local_gpus(ClusterConfig(replicas=2, learners=2), present=2)
    learners, replicas = local_gpus(ClusterConfig(replicas=2, learners=2), present=4)
    assert [gpu["CUDA_VISIBLE_DEVICES"] for gpu in learners + replicas] == ["0", "1", "2", "3"]
    shared = ClusterConfig(replicas=2, learners=2, placement="colocated")
    assert local_gpus(shared, present=2)[0] == local_gpus(shared, present=2)[1]


def test_versions_check_names_the_node_with_another_version():
    here = Versions.here()
    here.check(Versions.here(), "10.0.0.7")
    with pytest.raises(ConfigError, match=r"torch is 1\.0 on node 10\.0\.0\.7 and .* on the machine"):
        here.check(replace(here, torch="1.0"), "10.0.0.7")


def test_single_process_run_never_imports_ray_or_collectives():
    """Nor does anything that a user may import first. In a process of its own: this one has all of it."""
    collectives = ("torch.distributed.fsdp", "torch.distributed.tensor", "paceline.learning.distributed")
    program = (
        "import sys; import paceline.loop, paceline.session, paceline.cli.main, paceline.cli.launch;"
        f"print([m for m in sys.modules if m == 'ray' or m.startswith({collectives})])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
