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
from paceline.drafting.head_learner import HeadLearner
from paceline.drafting.online import STATE_BYTES
from paceline.drafting.recorder import RecorderShape
from paceline.drafting.replica_trainer import record_bytes
from paceline.drafting.slices import Slicing
from paceline.drafting.training import teacher_states
from paceline.engine.lengths import Lengths
from paceline.learning.batch import MicroBatch, pack
from paceline.plan.learning import META, one_response_sequence, optimiser_bytes, total_bytes
from paceline.plan.memory_tracker import MemoryTracker
from paceline.policy.decoder import Decoder


@dataclass(frozen=True)
class OnlineBytes:
    """Bytes that training a drafter takes on the device."""

    optimiser: int = 0  # the trained copy of the head, masters and moments, the policy's states
    training: int = 0  # gradients and the peak of a pass


def online_bytes(policy: Decoder, config: Config) -> OnlineBytes:
    """Returns the bytes of a head that learns during the run; zeros where none does."""
    head = make_head(config.rollout.speculation, policy) if config.rollout.head_may_learn else None
    if head is None:  # the run itself may refuse
        return OnlineBytes()
    learner = HeadLearner(policy, head, config.rollout.speculation.online, config.run.seed, lambda text: None)
    optimiser, parameters = learner.trainer.optimiser, list(learner.head.parameters())
    copies = total_bytes(parameters)
    # A replica accumulates a slice's gradients apart from earlier ones: it may have to drop the slice.
    gradients = total_bytes(parameters) * (2 if config.cluster.replicas else 1)
    state = optimiser_bytes(optimiser, parameters)
    length = Lengths.of(config, policy.config).request
    layers, size = head.config.captured_layers, policy.config.hidden_size
    if config.cluster.replicas:
        states = RecorderShape.within(record_bytes(config), layers, length, size, policy.dtype).bytes
    else:
        responses = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        states = min(STATE_BYTES, responses * length * (len(layers) + 1) * size * policy.dtype.itemsize)
    return OnlineBytes(
        optimiser=copies + state.masters + state.moments + total_bytes(learner.mean.values()) + states,
        training=gradients + _watch_pass(policy, learner, length),
    )


def _watch_pass(policy: Decoder, learner: HeadLearner, length: int) -> int:
    """Returns the peak of the largest slice, beside the states that it takes."""
    head: EagleHead = learner.head
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
    for texts, text_length in _largest_slices(learner.slicing, length):
        batch = _batch(learner.slicing, texts, text_length)
        with MemoryTracker(known) as memory:
            learner.trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
        peaks.append(memory.peak)
    learner.trainer.discard()
    return max(peaks)


def _largest_slices(slicing: Slicing, length: int) -> list[tuple[int, int]]:
    """Returns (texts, length) of the largest slices: of whole requests, and of the most passages."""
    texts = max(1, slicing.token_budget // length)
    passages = max(1, slicing.slice_rows // slicing.passage_rows)
    return [(texts, length), (passages, max(2, min(length, slicing.token_budget // passages)))]


def _batch(slicing: Slicing, texts: int, length: int) -> MicroBatch:
    """Returns a slice of texts of one length whose last tokens are trained on."""
    rows = max(1, min(length - 1, slicing.passage_rows, slicing.slice_rows // texts))
    whole = one_response_sequence(length)
    end = replace(
        whole,
        prompt_length=length - rows,
        loss_mask=whole.loss_mask[-rows:],
        rollout_logprobs=whole.rollout_logprobs[-rows:],
    )
    return pack([end] * texts, META)
