"""Where replicas stand: as processes of this machine, or wherever a Ray cluster has room."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from paceline.cluster.pool import ReplicaPool
from paceline.cluster.ranks import LearnerRanks, RankLaunch, RankWeights
from paceline.cluster.transport import choose_transport, make_weights
from paceline.config import ClusterConfig, Config, ConfigError
from paceline.worker.client import Patience
from paceline.worker.process import Launch, Place, WorkerProcess


@dataclass(frozen=True)
class Places:
    """What starts each process of a run."""

    learners: list[Place]
    replicas: list[Place]
    one_machine: bool
    host: str = "127.0.0.1"  # how the others reach this process
    release: Callable[[], None] = lambda: None  # releases the places, once nothing runs there


@dataclass(frozen=True)
class Processes:
    """The processes of a run: replicas behind one queue, and ranks where this process does not learn."""

    pool: ReplicaPool
    ranks: LearnerRanks | None
    places: Places

    def close(self) -> None:
        self.pool.close()
        if self.ranks is not None:
            self.ranks.close()
        self.places.release()


def start_processes(
    launch: Launch,
    rank_launch: RankLaunch,
    config: Config,
    device: torch.device,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    warn: Callable[[str], None],
) -> Processes:
    """Starts a recipe's ranks and replicas; `weights` are this process's own where it learns."""
    cluster = config.cluster
    places = find_places(cluster, device)
    transport = choose_transport(cluster.transport, device, places.one_machine)
    ranks = None
    try:
        if cluster.learners:
            ranks = LearnerRanks(rank_launch, places.learners, warn, cluster.heartbeat_seconds)
        pool = ReplicaPool(
            launch,
            places.replicas,
            capacity=config.rollout.max_running,
            weights=weights,
            warn=warn,
            patience=Patience(answer=cluster.heartbeat_seconds, restarts=cluster.restarts),
            retries=cluster.retries,
            memory=RankWeights(ranks, transport) if ranks else make_weights(transport, places.host, device),
        )
    except BaseException:
        if ranks is not None:
            ranks.close()
        places.release()
        raise
    pool.gives_memory = cluster.placement == "colocated"
    return Processes(pool, ranks, places)


def find_places(cluster: ClusterConfig, device: torch.device) -> Places:
    """Returns what starts each process; raises if there are fewer GPUs than the recipe asks for."""
    if cluster.runtime == "ray":
        from paceline.cluster.ray_workers import ray_places  # an extra: only where it is asked for

        return ray_places(cluster, device)
    if device.type != "cuda":
        here: Place = WorkerProcess
        return Places([here] * cluster.learners, [here] * cluster.replicas, one_machine=True)
    learners, replicas = local_gpus(cluster, torch.cuda.device_count())
    return Places(
        [partial(WorkerProcess, environment=gpu) for gpu in learners],
        [partial(WorkerProcess, environment=gpu) for gpu in replicas],
        one_machine=True,
    )


def local_gpus(cluster: ClusterConfig, present: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Returns the environments of learner ranks and replicas, which name their GPUs."""
    if cluster.gpus > present:
        raise ConfigError(
            f"cluster.replicas = {cluster.replicas} and {max(1, cluster.learners)} learners "
            f"({cluster.placement}) need {cluster.gpus} GPUs, this machine has {present}: lower them, use "
            "cluster.placement=colocated, or `paceline launch` on a Ray cluster"
        )
    first = 0 if cluster.placement == "colocated" else max(1, cluster.learners)

    def gpus(start: int, count: int) -> list[dict[str, str]]:
        return [{"CUDA_VISIBLE_DEVICES": str(number)} for number in range(start, start + count)]

    return gpus(0, cluster.learners), gpus(first, cluster.replicas)
