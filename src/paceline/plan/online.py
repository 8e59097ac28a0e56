"""The memory of a drafter that learns online: its optimiser always, one of its passes while learning.

As in `learning.py`: the run's own objects on the meta device, and a pass of the largest size tracked there.
It runs after the policy's update, so only the bytes beyond the update's count; in a replica it runs while
nothing is generated, beside the cache.
"""

from dataclasses import dataclass, replace

import torch

from paceline.config import Config
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.factory import make_head
from paceline.drafting.online import OnlineDrafter, make_online
from paceline.drafting.recorder import RecorderShape
from paceline.drafting.run_drafter import record_bytes
from paceline.drafting.slices import SlicedLearning
from paceline.drafting.training import teacher_states
from paceline.engine.lengths import Lengths
from paceline.learning.batch import MicroBatch, pack
from paceline.plan.learning import META, one_response_sequence, optimiser_bytes, total_bytes
from paceline.plan.memory_tracker import MemoryTracker
from paceline.policy.decoder import Decoder


@dataclass(frozen=True)
class OnlineBytes:
    """Bytes that training a drafter takes on the device."""

    optimiser: int = 0  # the trained copy of the head, masters and moments, recorded states
    training: int = 0  # gradients and the peak of a pass


def online_bytes(policy: Decoder, config: Config) -> OnlineBytes:
    """Returns the bytes of a head that learns during the run; zeros where none does."""
    head = make_head(config.rollout.speculation, policy) if config.rollout.head_may_learn else None
    if head is None:  # the run itself may refuse
        return OnlineBytes()
    online = make_online(policy, head, config, lambda message: None)
    optimiser, parameters = online.trainer.optimiser, list(online.head.parameters())
    copies = total_bytes(parameters)
    # A replica accumulates a slice's gradients apart from earlier ones: it may have to drop the slice.
    gradients = total_bytes(parameters) * (2 if config.cluster.replicas else 1)
    state = optimiser_bytes(optimiser, parameters)
    length = Lengths.of(config, policy.config).request
    return OnlineBytes(
        optimiser=copies
        + state.masters
        + state.moments
        + total_bytes(online.average.mean.values())
        + _recorded(policy, online, config, length),
        training=gradients + _watch_pass(policy, online, length),
    )


def _recorded(policy: Decoder, online: OnlineDrafter, config: Config, length: int) -> int:
    layers = online.head.config.captured_layers
    return RecorderShape.within(
        record_bytes(config), layers, length, policy.config.hidden_size, policy.dtype
    ).bytes


def _watch_pass(policy: Decoder, online: OnlineDrafter, length: int) -> int:
    """Returns the peak of the largest slice, whose texts are rerun for their states."""
    head: EagleHead = online.head
    for parameter in head.parameters():
        parameter.grad = torch.empty_like(parameter)
    known = [
        *policy.parameters(),
        *policy.buffers(),
        policy.rope_table,
        *head.parameters(),
        *head.buffers(),
        head.rope_table,
    ]
    known += [parameter.grad for parameter in head.parameters()]
    peaks = []
    for texts, text_length in _largest_slices(online.learning, length):
        batch = _batch(online.learning, texts, text_length)
        with MemoryTracker(known) as memory:
            online.trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
        peaks.append(memory.peak)
    online.trainer.discard()
    return max(peaks)


def _largest_slices(learning: SlicedLearning, length: int) -> list[tuple[int, int]]:
    """Returns (texts, length) of the largest slices: of whole requests, and of the most passages."""
    texts = max(1, learning.token_budget // length)
    passages = max(1, learning.slice_rows // learning.passage_rows)
    return [(texts, length), (passages, max(2, min(length, learning.token_budget // passages)))]


def _batch(learning: SlicedLearning, texts: int, length: int) -> MicroBatch:
    """Returns a slice of texts of one length whose last tokens are trained on."""
    rows = max(1, min(length - 1, learning.passage_rows, learning.slice_rows // texts))
    whole = one_response_sequence(length)
    end = replace(
        whole,
        prompt_length=length - rows,
        loss_mask=whole.loss_mask[-rows:],
        rollout_logprobs=whole.rollout_logprobs[-rows:],
    )
    return pack([end] * texts, META)
