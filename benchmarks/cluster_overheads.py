"""What several processes cost: CPU seconds of the queue, of sending weights, and of Ray.

    python benchmarks/cluster_overheads.py [--ray] [--requests 1024] [--megabytes 512]

CPU time, since a wall clock on a busy machine says nothing. "Head" is the launching process, "replicas" are
all workers together. The generator is a stand-in that answers at once, so that everything else is overhead.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from paceline.backend import Backend
from paceline.cluster.placing import find_places
from paceline.cluster.pool import ReplicaPool
from paceline.cluster.transport import make_weights
from paceline.config import ClusterConfig
from paceline.stats import RolloutStats
from paceline.types import Completion, FinishReason, Precision, Request, SamplingParams, Segment
from paceline.worker.process import Launch

CPU = torch.device("cpu")
PROMPT, RESPONSE = 512, 2048


class Instant(Backend):
    """Answers every request at once with as many tokens as it may have, and copies weights that it gets."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.paused = False
        self.kept: dict[str, torch.Tensor] = {}

    precision = Precision.BASE

    def submit(self, requests):
        self.waiting += requests

    def completions(self):
        while self.waiting and not self.paused:
            request = self.waiting.pop()
            count = request.sampling.max_tokens
            segments = (Segment(0, count, 0),)
            yield Completion(request, (7,) * count, (-0.5,) * count, FinishReason.LENGTH, segments)

    def abort(self, request_ids):
        pass

    def update_weights(self, version, weights=None):
        for name, tensor in weights or ():
            self.kept.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False

    def take_stats(self):
        return RolloutStats()

    def close(self):
        pass


def make(settings: str) -> Backend:
    """Returns the stand-in, for the process that hosts it."""
    torch.set_num_threads(1)
    return Instant()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU seconds of the head and of the replicas since it was made."""

    def __init__(self, pool: ReplicaPool) -> None:
        self.pids = [replica.worker.id for replica in pool.replicas]
        self.head = time.process_time()
        self.workers = sum(map(cpu_seconds, self.pids))
        self.wall = time.perf_counter()

    def read(self) -> dict[str, float]:
        return {
            "head_cpu_s": time.process_time() - self.head,
            "replicas_cpu_s": sum(map(cpu_seconds, self.pids)) - self.workers,
            "wall_s": time.perf_counter() - self.wall,
        }


def measure(runtime: str, transport: str, requests: int, megabytes: int, repeats: int, idle: float) -> dict:
    """Returns the best of several repeats of each part, with two replicas."""
    cluster = ClusterConfig(replicas=2, runtime=runtime)
    places = find_places(cluster, CPU)
    weights = [(f"w{i}", torch.randn(megabytes * 2**18 // 16)) for i in range(16)]
    memory = make_weights(transport, places.host, CPU)
    launch = Launch("benchmarks.cluster_overheads:make", "")
    pool = ReplicaPool(launch, places.replicas, 64, lambda: weights, memory=memory)
    try:
        pool.update_weights(0)
        found: dict[str, list[dict[str, float]]] = {"queue": [], "transfer": [], "idle": []}
        for repeat in range(repeats):
            sampling = SamplingParams(max_tokens=RESPONSE)
            batch = [Request(f"{repeat}/{i}", (i % 100,) * PROMPT, i, sampling) for i in range(requests)]
            meter = Meter(pool)
            pool.submit(batch)
            assert sum(1 for _ in pool.completions()) == requests
            found["queue"].append(meter.read())
            meter = Meter(pool)
            pool.update_weights(repeat + 1)
            found["transfer"].append(meter.read())
            meter = Meter(pool)
            time.sleep(idle)
            found["idle"].append(meter.read())
    finally:
        pool.close()
        places.release()
    return {part: min(runs, key=lambda run: run["head_cpu_s"]) for part, runs in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", action="store_true", help="also with Ray")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--idle", type=float, default=5.0, help="seconds in which nothing is asked for")
    given = parser.parse_args()
    print(json.dumps({"load": os.getloadavg(), "torch": torch.__version__, **vars(given)}))
    for runtime in ("processes", *(("ray",) if given.ray else ())):
        context = nullcontext()
        if runtime == "ray":
            from paceline.cluster.ray_cluster import ray_cluster

            context = ray_cluster("", ClusterConfig(replicas=2))
        with context:
            for transport in ("memory", "broadcast"):
                sizes = (given.requests, given.megabytes, given.repeats, given.idle)
                result = measure(runtime, transport, *sizes)
                print(json.dumps({"runtime": runtime, "transport": transport, **result}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Workers, Ray's as well, import this file by its name.
    paths = (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    main()
