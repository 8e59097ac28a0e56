"""Where replicas stand: as processes of this machine, or wherever a Ray cluster has room."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from paceline.cluster.pool import ReplicaPool
from paceline.cluster.replica import Place
from paceline.config import ClusterConfig, Config, ConfigError
from paceline.worker.client import Patience
from paceline.worker.process import Launch, WorkerProcess


def start_pool(
    launch: Launch,
    config: Config,
    device: torch.device,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    warn: Callable[[str], None],
) -> ReplicaPool:
    """Starts the replicas that a recipe asks for."""
    cluster = config.cluster
    return ReplicaPool(
        launch,
        replica_places(cluster, device),
        capacity=config.rollout.max_running,
        weights=weights,
        warn=warn,
        patience=Patience(answer=cluster.heartbeat_seconds, restarts=cluster.restarts),
        retries=cluster.retries,
    )


def replica_places(cluster: ClusterConfig, device: torch.device) -> list[Place]:
    """Returns what starts each replica; raises where there are fewer GPUs than the recipe asks for."""
    if cluster.runtime == "ray":
        from paceline.cluster.ray_workers import ray_places  # an extra: only where it is asked for

        return ray_places(cluster, device)
    if device.type != "cuda":
        return [WorkerProcess] * cluster.replicas
    return [partial(WorkerProcess, environment=gpu) for gpu in local_gpus(cluster, torch.cuda.device_count())]


def local_gpus(cluster: ClusterConfig, present: int) -> list[dict[str, str]]:
    """Returns the environment of each replica, which names its GPU."""
    if cluster.gpus > present:
        raise ConfigError(
            f"cluster.replicas = {cluster.replicas} and {max(1, cluster.learners)} learners "
            f"({cluster.placement}) need {cluster.gpus} GPUs, this machine has {present}: lower them, use "
            "cluster.placement=colocated, or `paceline launch` on a Ray cluster"
        )
    first = 0 if cluster.placement == "colocated" else max(1, cluster.learners)
    return [{"CUDA_VISIBLE_DEVICES": str(first + number)} for number in range(cluster.replicas)]
