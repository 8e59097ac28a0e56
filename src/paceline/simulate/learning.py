"""Seconds of what follows generation: logprobs, training and sending weights.

Everything is counted operations over an assumed utilisation.
"""

from paceline.simulate.deployment import Deployment
from paceline.simulate.hardware import Hardware
from paceline.simulate.model_shape import ModelShape
from paceline.simulate.speculation import DrafterShape


def forward_flops(model: ModelShape, tokens: float, pairs: float) -> float:
    """Returns 2 per parameter and token, and 4 per causal (query, key) pair and attention channel.

    Kaplan et al. 2020, section 2.1.
    """
    return 2 * model.active_parameters * tokens + 4 * pairs * model.num_layers * model.query_width


def logprob_seconds(
    hardware: Hardware, model: ModelShape, devices: int, tokens: float, pairs: float
) -> float:
    rate = devices * hardware.data_sheet.bf16_flops * hardware.training.logprob_utilisation
    return forward_flops(model, tokens, pairs) / rate


def train_seconds(hardware: Hardware, model: ModelShape, devices: int, tokens: float, pairs: float) -> float:
    """Returns the seconds of an update; backward is twice forward."""
    rate = devices * hardware.data_sheet.bf16_flops * hardware.training.utilisation
    return 3 * forward_flops(model, tokens, pairs) / rate + hardware.training.fixed_seconds


def sync_seconds(deployment: Deployment, gpus: int) -> float:
    """Returns the seconds in which every device of the replicas receives its shard of the weights.

    `gpus` are all of the run, those that learn included.
    """
    links = deployment.hardware.links
    if gpus <= 1:
        return 0.0  # the learner writes what the engine reads
    bandwidth = links.link_bandwidth if gpus <= links.domain else links.network_bandwidth
    return deployment.hardware.training.sync_seconds + deployment.weight_bytes_per_device / bandwidth


def drafter_train_seconds(
    hardware: Hardware, model: ModelShape, drafter: DrafterShape, tokens: float
) -> float:
    """Returns the device seconds that training the drafter once on a step's tokens takes."""
    rate = hardware.data_sheet.bf16_flops * hardware.training.utilisation
    return 6 * drafter.parameters(model) * tokens / rate
