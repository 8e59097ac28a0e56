"""Seconds of what follows generation: logprobs, training, sending weights. Counted operations over an assumed
utilisation.
"""

from paceline.simulate.deployment import Deployment
from paceline.simulate.hardware import Hardware
from paceline.simulate.model_shape import ModelShape
from paceline.simulate.speculation import Drafter


def forward_flops(model: ModelShape, tokens: float, pairs: float) -> float:
    """2 per parameter and token, 4 per (query, key) pair and attention channel (Kaplan et al. 2020, section
    2.1, causal pairs only).
    """
    return 2 * model.active_parameters * tokens + 4 * pairs * model.layers * model.heads * model.head_dim


def logprob_seconds(
    hardware: Hardware, model: ModelShape, devices: int, tokens: float, pairs: float
) -> float:
    return forward_flops(model, tokens, pairs) / (
        devices * hardware.data_sheet.bf16_flops * hardware.training.logprob_utilisation
    )


def train_seconds(hardware: Hardware, model: ModelShape, devices: int, tokens: float, pairs: float) -> float:
    """Backward is twice forward."""
    work = (
        3
        * forward_flops(model, tokens, pairs)
        / (devices * hardware.data_sheet.bf16_flops * hardware.training.utilisation)
    )
    return work + hardware.training.fixed_seconds


def sync_seconds(deployment: Deployment, replicas: int) -> float:
    """Each replica's devices receive their shard over the network (or the link, where all devices share
    one).
    """
    links, devices = deployment.hardware.links, deployment.parallelism.devices * replicas
    bandwidth = links.link_bandwidth if devices <= links.domain else links.network_bandwidth
    moved = (
        deployment.sync_bytes_per_device if devices > 1 else 0.0
    )  # one device: the learner writes what the engine reads
    return deployment.hardware.training.sync_seconds * (devices > 1) + moved / bandwidth


def drafter_train_seconds(hardware: Hardware, model: ModelShape, drafter: Drafter, tokens: float) -> float:
    """Device seconds to train the drafter once on a step's tokens."""
    return (
        6
        * drafter.parameters(model)
        * tokens
        / (hardware.data_sheet.bf16_flops * hardware.training.utilisation)
    )
