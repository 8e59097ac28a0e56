"""Workers in processes that Ray starts: the same protocol, over a connection that the worker opens.

    head: Listener ◀────────── connect ────────── actor: serve(...) until the connection ends
            │ ray: place, start, end                │

An actor runs one worker and is never restarted by Ray: the client notices that it is gone and places a
replacement, which Ray may put elsewhere.
"""

import os
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cluster.placing import Places
from paceline.cluster.ray_cluster import Versions, check_room
from paceline.config import ClusterConfig, ConfigError
from paceline.worker.dial import Listener, NobodyConnected, connect
from paceline.worker.process import QUIET, Launch, WorkerFailed, WorkerKilled
from paceline.worker.readers import Weights
from paceline.worker.receive import WeightsReceiver
from paceline.worker.serve import serve
from paceline.worker.wire import Message

# How long Ray may take to find room for a process and start it, in seconds.
START_SECONDS = 300.0


class WorkerActor:
    """The process of one worker; its name stands before each of its lines and in lists of processes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def facts(self) -> dict[str, Any]:
        node = ray.util.get_node_ip_address()
        return {"process": os.getpid(), "node": node, "versions": asdict(Versions.here())}

    def serve(self, address: tuple[str, int], secret: str, factory: str) -> None:
        """Serves the client at `address` until it closes."""
        serve(connect(address, secret), WeightsReceiver(), factory)


class RayWorker:
    """A `Worker` (worker/process.py) in a Ray actor."""

    def __init__(self, launch: Launch, weights: Weights, name: str, options: dict[str, Any]) -> None:
        environment = {key: os.environ.get(key, value) for key, value in QUIET.items()}
        self.actor = (
            ray.remote(WorkerActor)
            .options(max_restarts=0, runtime_env={"env_vars": environment}, **options)
            .remote(name)
        )
        facts = self._wait_for_facts(options)
        self.id: int = facts["process"]
        self.node: str = facts["node"]
        Versions.here().check(Versions(**facts["versions"]), self.node)
        listener = Listener(ray.util.get_node_ip_address())
        self.served = self.actor.serve.options(name=name).remote(
            listener.address, listener.secret, launch.factory
        )
        try:
            self.connection = listener.accept(START_SECONDS, still_expected=lambda: not self.wait(0.0))
        except NobodyConnected as problem:
            killed = self.wait(0.0) and not self._raised()
            self.kill()
            raise (WorkerKilled if killed else WorkerFailed)(
                f"the process {self.id} on {self.node} did not connect: {problem}"
            ) from None
        self.connection.send(Message("open", {"settings": launch.settings}))

    def kill(self) -> None:
        ray.kill(self.actor)

    def wait(self, seconds: float) -> bool:
        return bool(ray.wait([self.served], timeout=seconds)[0])

    def end(self, seconds: float = 2.0) -> int:
        """Ends the process; Ray reports no exit code, only whether it raised an error."""
        self.connection.close()
        raised = self.wait(seconds) and self._raised()
        self.kill()
        return 1 if raised else -1

    def _raised(self) -> bool:
        try:
            ray.get(self.served, timeout=0)
        except ray.exceptions.RayTaskError:
            return True
        except ray.exceptions.RayError:  # it was killed, or still runs
            return False
        return False

    def _wait_for_facts(self, options: dict[str, Any]) -> dict[str, Any]:
        try:
            return ray.get(self.actor.facts.remote(), timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            ray.kill(self.actor)
            asked = {key: value for key, value in options.items() if key.startswith("num_")}
            raise WorkerFailed(
                f"Ray has not started a process with {asked} within {START_SECONDS:.0f} s; "
                f"the cluster has {ray.available_resources()} to give"
            ) from None
        except ray.exceptions.RayActorError as problem:
            raise WorkerKilled(f"Ray could not start a process: {problem}") from None


class Bundles:
    """The places of a run's processes in the cluster, reserved all at once or not at all."""

    def __init__(self, cluster: ClusterConfig, device: torch.device) -> None:
        if not ray.is_initialized():
            raise ConfigError(
                "cluster.runtime = 'ray': this process is connected to no Ray cluster; start the run with "
                "`paceline launch`"
            )
        self.cluster = cluster
        self.gpus = 1.0 if device.type == "cuda" else 0.0
        check_room(cluster, needs_gpus=bool(self.gpus))
        shared = cluster.placement == "colocated" and cluster.learners > 0
        count = cluster.replicas if shared else cluster.replicas + cluster.learners
        self.share = 0.5 if shared else 1.0
        bundle = {"CPU": 2.0 if shared else 1.0} | ({"GPU": self.gpus} if self.gpus else {})
        self.group: PlacementGroup = placement_group([bundle] * count, strategy="PACK")
        self._wait()

    def learner(self, rank: int) -> dict[str, Any]:
        return self._options(rank)

    def replica(self, number: int) -> dict[str, Any]:
        return self._options(number if self.share < 1 else self.cluster.learners + number)

    def release(self) -> None:
        """Releases the places, for another run or this one's next attempt."""
        ray.util.remove_placement_group(self.group)

    def _options(self, index: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        return {"num_cpus": 1, "num_gpus": self.gpus * self.share, "scheduling_strategy": strategy}

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.group.wait(5):
            if time.monotonic() > deadline:
                self.release()
                raise ConfigError(
                    f"the Ray cluster has had no room for cluster.replicas = {self.cluster.replicas} and "
                    f"cluster.learners = {self.cluster.learners} for {START_SECONDS:.0f} s; it has "
                    f"{ray.available_resources()} to give: other jobs may hold the rest"
                )


def ray_places(cluster: ClusterConfig, device: torch.device) -> Places:
    bundles = Bundles(cluster, device)
    return Places(
        [partial(RayWorker, name=f"rank {n}", options=bundles.learner(n)) for n in range(cluster.learners)],
        [
            partial(RayWorker, name=f"replica {n}", options=bundles.replica(n))
            for n in range(cluster.replicas)
        ],
        one_machine=len([node for node in ray.nodes() if node["Alive"]]) == 1,
        host=ray.util.get_node_ip_address(),
        release=bundles.release,
    )
