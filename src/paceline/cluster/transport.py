"""The choice of a weight transport, and the writer's end of it."""

import torch

from paceline.config import ConfigError
from paceline.worker.readers import Weights
from paceline.worker.weights import SharedWeights


def choose_transport(asked: str, device: torch.device, one_machine: bool) -> str:
    """Resolves a recipe's transport; raises if it does not reach all replicas."""
    gpu = device.type == "cuda"
    if asked == "auto":
        return "broadcast" if not one_machine else ("ipc" if gpu else "memory")
    if asked == "ipc" and not gpu:
        raise ConfigError("cluster.transport = 'ipc' needs GPUs, this run has none; use transport=auto")
    if asked in ("memory", "ipc") and not one_machine:
        raise ConfigError(
            f"cluster.transport = {asked!r} reaches processes of one machine, and replicas stand on several; "
            "use transport=broadcast or auto"
        )
    return asked


def make_weights(transport: str, host: str, device: torch.device) -> Weights:
    """Returns the writer's end of a transport; `host` is how other machines reach this one."""
    if transport == "ipc":
        from paceline.worker.cuda_ipc import IpcWeights

        return IpcWeights()
    if transport == "broadcast":
        from paceline.worker.broadcast import BroadcastWeights

        return BroadcastWeights(host, device)
    return SharedWeights()
