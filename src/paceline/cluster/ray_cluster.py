"""The Ray cluster that a run uses: one that is there, or a local one that ends with the run.

Ray starts processes on machines that have room for them, gives them their GPUs and ends them with the run.
It carries no data: replicas and ranks speak the worker's protocol over sockets of their own.
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from paceline.config import ClusterConfig, ConfigError
from paceline.config.extras import needs_package

# Nothing of ours goes through Ray's object store; this is the least that it takes.
OBJECT_STORE_BYTES = 80 * 2**20
LOCAL_TRIES = 3
LOCAL_SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's own default lets workers wait for everything else on the machine
    "RAY_prestart_worker_first_driver": "0",  # a run starts the processes it needs
    "RAY_agent_register_timeout_ms": "120000",
}


@dataclass(frozen=True)
class Versions:
    """What must be the same on every machine of a run."""

    python: str
    paceline: str
    torch: str

    @classmethod
    def here(cls) -> "Versions":
        import torch

        paceline = importlib.metadata.version("paceline")
        return cls(platform.python_version(), paceline, torch.__version__.partition("+")[0])

    def check(self, other: "Versions", node: str) -> None:
        """Raises if another machine has other versions; names them and the node."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if theirs != mine:
                raise ConfigError(
                    f"{name} is {theirs} on node {node} and {mine} on the machine that runs the loop: "
                    f"install the same version on both ({sys.executable} is used here)"
                )


@contextmanager
def ray_cluster(address: str, cluster: ClusterConfig, local_gpus: int = 0) -> Iterator[None]:
    """Connects to the cluster at `address`, or starts a local one; both end with the context."""
    try:
        import ray
    except ImportError:
        raise ConfigError(f"cluster.runtime = 'ray' {needs_package('ray', 'cluster')}") from None
    if address:
        try:
            ray.init(address=address, log_to_driver=True)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            raise ConfigError(
                f"--address {address}: no Ray cluster answers there ({problem}); start one with "
                "`ray start --head`, or leave --address out for a local one"
            ) from None
    else:
        _start_local(cluster, local_gpus)
    try:
        yield
    finally:
        ray.shutdown()


def _start_local(cluster: ClusterConfig, gpus: int) -> None:
    """Starts a cluster on this machine; retried, since Ray gives its own processes half a minute."""
    import ray

    for name, value in LOCAL_SETTINGS.items():
        os.environ.setdefault(name, value)
    problem: Exception | None = None
    for _ in range(LOCAL_TRIES):
        try:
            # On one machine Ray's CPUs only count processes: the recipe decides what they compute on.
            ray.init(
                address="local",
                num_cpus=cluster.replicas + cluster.learners + 1,
                num_gpus=gpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
            )
            return
        except OSError as error:
            ray.shutdown()
            raise ConfigError(
                f"a local Ray cluster did not start: {error}. Ray keeps a token in ~/.ray and its files in "
                "/tmp/ray: set HOME and RAY_TMPDIR to folders that can be written and have room, or use "
                "`paceline train`, which needs no Ray"
            ) from None
        except Exception as error:  # Ray raises nothing more particular
            problem = error
            ray.shutdown()
    raise ConfigError(
        f"a local Ray cluster did not start in {LOCAL_TRIES} tries ({problem}): the machine may be too busy; "
        "start one with `ray start --head` and pass --address auto, or use `paceline train`, which needs none"
    )


def check_room(cluster: ClusterConfig, needs_gpus: bool) -> None:
    """Raises if the connected cluster has fewer GPUs or CPUs than are needed."""
    import ray

    there = ray.cluster_resources()
    processes = cluster.replicas + cluster.learners
    needed = {"CPU": processes} | ({"GPU": cluster.gpus} if needs_gpus else {})
    for resource, count in needed.items():
        if there.get(resource, 0) < count:
            nodes = len([node for node in ray.nodes() if node["Alive"]])
            raise ConfigError(
                f"cluster.replicas = {cluster.replicas} and cluster.learners = {cluster.learners} "
                f"({cluster.placement}) need {count} {resource}s, the Ray cluster has "
                f"{there.get(resource, 0):g} on {nodes} nodes: lower them, or add nodes"
            )
