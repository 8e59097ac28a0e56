"""The memory of learning: the learner's own objects and one pass, tracked on the meta device.

Nothing here is a formula that could diverge from the code: parameters, masters and moments are summed over
the tensors that the run's own classes make, and a micro-batch of the largest size runs through the run's own
forward and backward on shapes alone.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from paceline.config import Config
from paceline.learning.batch import MicroBatch, TrainingSequence, pack
from paceline.learning.correction import apply_correction, compute_correction
from paceline.learning.learner import Learner
from paceline.learning.logprobs import token_logprobs
from paceline.learning.optimiser import MasterAdamW
from paceline.learning.optimiser_state import PIECE_ELEMENTS, STREAMS, HostState
from paceline.learning.teacher import LocalTeacher
from paceline.plan.memory_tracker import MemoryTracker
from paceline.plan.recompute import choose_recompute
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.fused import Recompute
from paceline.policy.lora import adapters_off, add_adapters

META = torch.device("meta")


@dataclass(frozen=True)
class PolicyBytes:
    """Bytes that a policy holds for the whole run."""

    weights: int
    adapters: int  # LoRA's factors
    base_copies: int  # LoRA: the projections as they were, from which every merge starts


@dataclass(frozen=True)
class LearnerBytes:
    """Bytes that a learner takes beside its policy."""

    masters: int = 0
    moments: int = 0
    reference: int = 0
    teacher: int = 0
    gradients: int = 0
    staging: int = 0  # pieces of a state in host memory while a step runs, when activations are gone
    activations: int = 0  # saved by the forward pass for the backward pass
    backward: int = 0  # taken by the backward pass on top: logits, the gradients in flight
    recompute: Recompute = Recompute()  # what the backward pass recomputes

    @property
    def held(self) -> int:
        """Bytes held from one update to the next."""
        return self.masters + self.moments + self.reference + self.teacher

    @property
    def update(self) -> int:
        """Bytes beyond activations that the backward pass takes, or the step, when these are freed."""
        return max(self.backward, self.staging - self.activations)


def meta_policy(shape: DecoderConfig, config: Config, dtype: torch.dtype) -> Decoder:
    policy = Decoder(shape, dtype, META)
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora.model_copy(update={"path": ""}), seed=0)
    return policy


def policy_bytes(policy: Decoder) -> PolicyBytes:
    parameters = dict(policy.named_parameters())
    adapters = [p for name, p in parameters.items() if ".adapters." in name]
    weights = [p for name, p in parameters.items() if ".adapters." not in name]
    return PolicyBytes(
        total_bytes([*weights, policy.rope_table]), total_bytes(adapters), total_bytes(policy.buffers())
    )


def learner_bytes(
    policy: Decoder, config: Config, micro_batch_tokens: int, room_bytes: int | None = None
) -> LearnerBytes:
    """Returns the bytes of learning with micro-batches of `micro_batch_tokens`.

    `room_bytes` is the memory available for all of it; where the recipe leaves recomputation to the plan, it
    decides how much is recomputed.
    """
    learner = Learner(policy, config)
    state = _state_bytes(learner)
    if config.policy.activation_checkpointing == "auto" and room_bytes is not None:
        room = room_bytes - state.held - state.gradients

        def pass_bytes(recompute: Recompute) -> int:
            # Exact numerics keep the activations between products.
            between = recompute.between and config.learning.numerics == "fast"
            policy.recompute = replace(recompute, between=between)
            return _watch_micro_batch(learner, micro_batch_tokens)[1]

        policy.recompute = choose_recompute(policy.config.num_layers, room, functools.cache(pass_bytes))
    activations, peak = _watch_micro_batch(learner, micro_batch_tokens)
    return replace(state, activations=activations, backward=peak - activations, recompute=policy.recompute)


def _state_bytes(learner: Learner) -> LearnerBytes:
    optimiser, parameters = learner.optimiser, list(learner.policy.parameters())
    teacher = learner.teacher
    own_reference = learner.reference is not None and learner.reference is not learner.policy
    return LearnerBytes(
        **vars(optimiser_bytes(optimiser, parameters)),
        reference=total_bytes(learner.reference.parameters()) if own_reference else 0,
        teacher=total_bytes(teacher.policy.parameters()) if isinstance(teacher, LocalTeacher) else 0,
        gradients=total_bytes(parameter for _, parameter in optimiser.named),
    )


@dataclass(frozen=True)
class OptimiserBytes:
    """Bytes that an optimiser takes on the device."""

    masters: int
    moments: int
    staging: int  # while it steps, of states in host memory


def optimiser_bytes(optimiser: MasterAdamW, parameters: Iterable[torch.Tensor]) -> OptimiserBytes:
    own = [state for state in optimiser.states if not isinstance(state, HostState)]
    hosted = [state for state in optimiser.states if isinstance(state, HostState)]
    largest = max((min(PIECE_ELEMENTS, state.first.numel()) for state in hosted), default=0)
    return OptimiserBytes(
        masters=total_bytes((state.master for state in own), besides=parameters),
        moments=total_bytes(tensor for state in own for tensor in state.moments().values()),
        staging=3 * torch.float32.itemsize * STREAMS * largest,
    )


def total_bytes(tensors: Iterable[torch.Tensor], besides: Iterable[torch.Tensor] = ()) -> int:
    """Returns the bytes of the tensors' distinct storages, except those of `besides`."""
    apart = {tensor.untyped_storage()._cdata for tensor in besides}
    return sum(
        {
            s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors) if s._cdata not in apart
        }.values()
    )


def _watch_micro_batch(learner: Learner, tokens: int) -> tuple[int, int]:
    """Returns the bytes alive between forward and backward, and the peak, for one response.

    The micro-batch is not the step's first: gradients are there already, and every new one exists until it
    has been added.
    """
    policy, batch = learner.policy, one_response(tokens, META)
    for _, parameter in learner.optimiser.named:
        parameter.grad = torch.empty_like(parameter)
    known = [
        *policy.parameters(),
        *policy.buffers(),
        policy.rope_table,
        *(p.grad for _, p in learner.optimiser.named),
    ]
    others = [learner.teacher.policy] if isinstance(learner.teacher, LocalTeacher) else []
    others += [learner.reference] if learner.reference is not None else []
    for other in others:
        known += [*other.parameters(), other.rope_table]
    with MemoryTracker(known) as memory:
        reference_R = None
        if learner.reference is not None and not learner.algorithm.kl_in_reward:
            with torch.no_grad(), adapters_off(learner.reference):
                reference_R = token_logprobs(learner.reference, batch)[0]
        compute = token_logprobs
        if isinstance(learner.teacher, LocalTeacher):
            compute = learner.teacher.comparison(batch)
        logprobs_R, _, *divergence_R = compute(policy, batch)
        activations = memory.live
        correction = learner.config.correction
        seen = apply_correction(
            correction, batch, compute_correction(correction, batch, logprobs_R), logprobs_R, mean_weight=1.0
        )
        seen = replace(seen, divergence_R=divergence_R[0] if divergence_R else None)
        learner.algorithm.token_loss(seen, logprobs_R, reference_R).loss_R.sum().backward()
    learner.optimiser.discard_gradients()
    return activations, memory.peak


def one_response(tokens: int, device: torch.device) -> MicroBatch:
    """Returns a micro-batch of one sequence whose prompt is one token.

    No other split of as many tokens holds more logits or attention.
    """
    return pack([one_response_sequence(tokens)], device)


def one_response_sequence(tokens: int) -> TrainingSequence:
    """Returns a sequence of `tokens` tokens, one of which is the prompt."""
    response = tokens - 1
    return TrainingSequence((0,) * tokens, 1, (True,) * response, (0.0,) * response, 1.0, 1.0)
