"""The plan: every part in bytes, when it is held, the KV pool that fits, and whether everything fits.

    always      weights, masters, moments, reference, rows, graphs     ┐ on top of `always` comes
    rollout     KV pool, a prefill chunk                               ├ the larger of the two
    learning    gradients, activations, what the backward pass adds    ┘ phases

The KV pool stays allocated while learning if it fits beside it. Where less than half the wanted pool would
fit, it sleeps meanwhile: the engine releases its memory before an update and allocates it again after.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.config import Config
from paceline.engine.lengths import Lengths, pool_too_small
from paceline.plan.learning import LearnerBytes, PolicyBytes, learner_bytes, meta_policy, policy_bytes
from paceline.plan.machine import Machine
from paceline.plan.online import OnlineBytes, online_bytes
from paceline.plan.rollout import kv_pool_bytes, rollout_bytes
from paceline.policy.config import DecoderConfig
from paceline.policy.fused import Recompute

# Share of the memory that is left free: fragments the allocator cannot use, and kernels' own workspaces.
MARGIN = 0.03

Phase = Literal["always", "rollout", "learning"]


@dataclass(frozen=True)
class Part:
    """One part of the plan: what it is, its bytes, and when it is held."""

    name: str
    num_bytes: int
    phase: Phase
    key: str  # the recipe's key that moves it most


@dataclass(frozen=True)
class Plan:
    """Every part in bytes, the KV pool that fits, and the problem where not everything fits."""

    machine: Machine
    parts: tuple[Part, ...]
    kv_tokens: int
    sleeps: bool  # the KV pool releases its memory for learning
    problem: str  # why it does not fit; empty if it does
    recompute: Recompute = Recompute()  # what the learner's backward pass recomputes

    def bytes_of(self, name: str) -> int:
        return sum(part.num_bytes for part in self.parts if part.name == name)

    def phase_bytes(self, phase: Phase) -> int:
        """Returns the bytes that are held in this phase only."""
        return sum(part.num_bytes for part in self.parts if part.phase == phase)

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.machine)

    @property
    def rollout_peak(self) -> int:
        return self.phase_bytes("always") + self.phase_bytes("rollout")

    @property
    def learning_peak(self) -> int:
        return self.phase_bytes("always") + self.phase_bytes("learning")

    @property
    def peak_bytes(self) -> int:
        return max(self.rollout_peak, self.learning_peak)


def learning_parts(held: PolicyBytes, learner: LearnerBytes) -> tuple[Part, ...]:
    """Returns the parts of a policy and its learner that take anything."""
    parts = (
        Part("weights", held.weights, "always", "policy.path"),
        Part("LoRA base copy", held.base_copies, "always", "policy.lora.targets"),
        Part("LoRA adapters", held.adapters, "always", "policy.lora.rank"),
        Part("float32 masters", learner.masters, "always", "learning.optimiser_state"),
        Part("Adam moments", learner.moments, "always", "learning.optimiser_state"),
        Part("KL reference", learner.reference, "always", "learning.kl_coef"),
        Part("teacher", learner.teacher, "always", "learning.distill.teacher"),
        Part("gradients", learner.gradients, "learning", "policy.lora.rank"),
        Part("activations", learner.activations, "learning", "learning.micro_batch_tokens"),
        Part("backward pass", learner.update, "learning", "learning.micro_batch_tokens"),
    )
    return tuple(part for part in parts if part.num_bytes)


def usable_bytes(machine: Machine) -> int:
    """Returns the memory that a run may fill."""
    return int(machine.total_bytes * (1 - MARGIN)) - machine.taken_bytes


def make_plan(
    config: Config,
    shape: DecoderConfig,
    dtype: torch.dtype,
    machine: Machine,
    learns: bool = True,
    replica: bool = False,
) -> Plan:
    """Returns the plan of a run; `learns=False`: generation alone, as in `paceline eval` and `rollout`.

    A `replica` of a run generates, and in idle time trains the drafter if the recipe asks for it.
    """
    lengths = Lengths.of(config, shape)
    policy = meta_policy(shape, config, dtype)
    held = policy_bytes(policy)
    rollout = rollout_bytes(policy, config)
    online = online_bytes(policy, config) if learns or replica else OnlineBytes()
    always = held.weights + held.base_copies + held.adapters
    always += rollout.rows + rollout.drafter + rollout.graphs + online.optimiser
    learner = LearnerBytes()
    if learns:
        learner = learner_bytes(policy, config, lengths.micro_batch, usable_bytes(machine) - always)
    phase: Phase = "rollout" if replica else "learning"
    beyond = max(0, online.training - learner.gradients - learner.activations - learner.update)
    parts = [
        *learning_parts(held, learner),
        Part("resident rows", rollout.rows, "always", "rollout.max_running"),
        Part("drafter", rollout.drafter, "always", "rollout.speculation.drafters"),
        Part("drafter's optimiser", online.optimiser, "always", "rollout.speculation.online.share"),
        Part("graphs", rollout.graphs, "always", "rollout.max_running"),
        Part("drafter's training", beyond, phase, "rollout.speculation.online.share"),
        Part("prefill", rollout.workspace, "rollout", "rollout.prefill_tokens"),
    ]
    parts = [part for part in parts if part.num_bytes]
    without_pool = Plan(machine, tuple(parts), 0, sleeps=False, problem="", recompute=learner.recompute)
    return with_pool(without_pool, config, lengths, rollout.kv_token)


def with_pool(plan: Plan, config: Config, lengths: Lengths, per_token: int) -> Plan:
    """Returns the plan with the KV pool that fits beside the other parts, or why none does."""
    fixed, request_tokens = config.rollout.kv_tokens, lengths.request
    wanted = fixed or config.rollout.max_running * request_tokens
    # The null block, and the rounding up to whole blocks, are subtracted first.
    beside = (plan.usable_bytes - plan.peak_bytes) // per_token - 32
    asleep = (plan.usable_bytes - plan.rollout_peak) // per_token - 32
    sleeps = (
        beside < (wanted if fixed else max(wanted // 2, request_tokens)) and plan.phase_bytes("learning") > 0
    )
    room = asleep if sleeps else beside
    tokens = fixed or max(0, min(wanted, room))
    problem = ""
    if plan.learning_peak > plan.usable_bytes or plan.rollout_peak > plan.usable_bytes:
        problem = too_large(plan)
    elif fixed > room:
        problem = (
            f"rollout.kv_tokens = {fixed}: {room} KV tokens fit beside the other parts; "
            "lower it, or leave it out to take what fits"
        )
    elif fixed:
        problem = pool_too_small(fixed, lengths)
    elif tokens < request_tokens:
        needed = f"{max(0, room)} KV tokens fit beside the other parts, one request may need {request_tokens}"
        problem = f"the KV pool does not fit: {needed}; lower rollout.max_tokens (and eval.max_tokens)"
    pool = Part(
        "KV pool", kv_pool_bytes(per_token, tokens), "rollout" if sleeps else "always", "rollout.kv_tokens"
    )
    return Plan(plan.machine, (*plan.parts, pool), tokens, sleeps, problem, plan.recompute)


def too_large(plan: Plan) -> str:
    """Returns a message with the bytes by which a plan does not fit, and its largest part."""
    phase: Phase = "learning" if plan.learning_peak >= plan.rollout_peak else "rollout"
    largest = max(
        (part for part in plan.parts if part.phase in ("always", phase)), key=lambda part: part.num_bytes
    )
    return (
        f"{phase} needs {plan.peak_bytes / 1e9:.1f} GB before any KV pool, "
        f"{plan.usable_bytes / 1e9:.1f} GB of {plan.machine.name} are usable; "
        f"the largest part is {largest.name}, {largest.num_bytes / 1e9:.1f} GB ({largest.key})"
    )
