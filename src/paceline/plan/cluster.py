"""The plan of each GPU of a run with several: of a learner rank, of a replica, or of both on one GPU.

A rank holds its share of weights, masters, moments, reference and gradients. Around its share FSDP2 gathers
whole layers: the current one and the next, beside embeddings and head, which stay gathered over a pass.
Activations are those of a single GPU with the same micro-batch. Where replicas read weights from a GPU (CUDA
IPC, NCCL), the first rank also keeps a whole copy; the plan is the first rank's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from paceline.config import Config, ConfigError
from paceline.engine.lengths import Lengths
from paceline.plan.learning import PolicyBytes, learner_bytes, meta_policy, policy_bytes
from paceline.plan.machine import CONTEXT_BYTES, LIBRARY_BYTES, Machine
from paceline.plan.online import online_bytes
from paceline.plan.plan import Part, Plan, make_plan, too_large, usable_bytes, with_pool
from paceline.plan.rollout import rollout_bytes
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.fused import Recompute

# Bytes of NCCL's channels: assumed, not measured here.
NCCL_BYTES = 1_000_000_000
MOST_LEARNERS = 512


@dataclass(frozen=True)
class ClusterPlan:
    """The plans of a run's GPUs, by role."""

    plans: Mapping[str, Plan]  # "learner" and "replica", or "learner and replica"

    @property
    def problem(self) -> str:
        """Why it does not fit; empty if it does."""
        problems = [
            f"a GPU with a {role}: {plan.problem}" for role, plan in self.plans.items() if plan.problem
        ]
        return "\n".join(problems)


def make_cluster_plan(
    config: Config, shape: DecoderConfig, dtype: torch.dtype, machine: Machine
) -> ClusterPlan:
    """Returns the plan of every kind of GPU in a run with `cluster.replicas`."""
    cluster = config.cluster
    replica = make_plan(config, shape, dtype, machine, learns=False, replica=True)
    ranks = max(1, cluster.learners)
    if cluster.placement == "apart":
        learner = _learner_plan(config, shape, dtype, machine, ranks)
        return ClusterPlan({"learner": learner, "replica": replica})
    both = _colocated_plan(config, shape, dtype, machine, ranks)
    return ClusterPlan({"learner and replica": both})


def cluster_refusal(
    plan: ClusterPlan, config: Config, shape: DecoderConfig, dtype: torch.dtype, machine: Machine
) -> ConfigError:
    """Returns the error of a run that does not fit, with the number of learners that would."""
    fitting = ""
    count = max(1, config.cluster.learners)
    while not fitting and count < MOST_LEARNERS:
        count *= 2
        changed = {"learners": count}
        if config.cluster.placement == "colocated":
            changed["replicas"] = count
        larger = config.model_copy(update={"cluster": config.cluster.model_copy(update=changed)})
        if not make_cluster_plan(larger, shape, dtype, machine).problem:
            fitting = " ".join(f"cluster.{key}={value}" for key, value in sorted(changed.items()))
    offered = fitting or "no number of learners on this GPU: see `paceline plan` with cluster.replicas=0"
    return ConfigError(f"{plan.problem}\nwhat would fit: {offered}")


def _learner_plan(
    config: Config, shape: DecoderConfig, dtype: torch.dtype, machine: Machine, ranks: int
) -> Plan:
    policy = meta_policy(shape, config, dtype)
    parts, recompute = _learner_parts(policy, config, machine, ranks)
    plan = Plan(machine, tuple(parts), 0, sleeps=False, problem="", recompute=recompute)
    return replace(plan, problem=too_large(plan)) if plan.peak_bytes > plan.usable_bytes else plan


def _colocated_plan(
    config: Config, shape: DecoderConfig, dtype: torch.dtype, machine: Machine, ranks: int
) -> Plan:
    """Returns the plan of a GPU with a rank and a replica, whose cache sleeps while the rank learns."""
    two_processes = replace(machine, taken_bytes=machine.taken_bytes + CONTEXT_BYTES + LIBRARY_BYTES)
    policy = meta_policy(shape, config, dtype)
    held = policy_bytes(policy)
    parts, recompute = _learner_parts(policy, config, two_processes, ranks)
    generating = meta_policy(shape, config, dtype)
    rollout = rollout_bytes(generating, config)
    online = online_bytes(generating, config)
    parts += [
        Part("replica's weights", held.weights, "always", "policy.path"),
        Part("resident rows", rollout.rows, "always", "rollout.max_running"),
        Part("drafter", rollout.drafter, "always", "rollout.speculation.drafters"),
        Part("drafter's optimiser", online.optimiser, "always", "rollout.speculation.online.share"),
        Part("graphs", rollout.graphs, "always", "rollout.max_running"),
        Part("drafter's training", online.training, "rollout", "rollout.speculation.online.share"),
        Part("prefill", rollout.workspace, "rollout", "rollout.prefill_tokens"),
    ]
    parts = [part for part in parts if part.num_bytes]
    without_pool = Plan(two_processes, tuple(parts), 0, sleeps=False, problem="", recompute=recompute)
    return with_pool(without_pool, config, Lengths.of(config, shape), rollout.kv_token)


def _learner_parts(
    policy: Decoder, config: Config, machine: Machine, ranks: int
) -> tuple[list[Part], Recompute]:
    """Returns the parts of one rank, and what its backward pass recomputes."""
    held = policy_bytes(policy)
    gathered = gathered_bytes(policy) if ranks > 1 else 0
    share = _shares(held, ranks)
    room = usable_bytes(machine) - share.weights - share.base_copies - share.adapters - gathered
    micro_batch = Lengths.of(config, policy.config).micro_batch
    whole_state = learner_bytes(policy, config, micro_batch)
    sharded = whole_state.held - whole_state.teacher + whole_state.gradients
    elsewhere = sharded * (ranks - 1) // ranks
    learner = learner_bytes(policy, config, micro_batch, room + elsewhere)
    whole = held.weights if config.cluster.transport in ("auto", "ipc", "broadcast") and ranks > 1 else 0
    update = max(learner.backward, learner.staging - learner.activations)
    parts = [
        Part("weights, its share", share.weights, "always", "cluster.learners"),
        Part("LoRA base copy, its share", share.base_copies, "always", "cluster.learners"),
        Part("LoRA adapters, its share", share.adapters, "always", "policy.lora.rank"),
        Part("float32 masters, its share", _share(learner.masters, ranks), "always", "cluster.learners"),
        Part("Adam moments, its share", _share(learner.moments, ranks), "always", "cluster.learners"),
        Part("KL reference, its share", _share(learner.reference, ranks), "always", "learning.kl_coef"),
        Part("teacher", learner.teacher, "always", "learning.distill.teacher"),
        Part("weights for replicas", whole, "always", "cluster.transport"),
        Part("NCCL (assumed)", NCCL_BYTES if ranks > 1 else 0, "always", "cluster.learners"),
        Part("gathered layers", gathered, "learning", "policy.path"),
        Part("gradients, its share", _share(learner.gradients, ranks), "learning", "cluster.learners"),
        Part("activations", learner.activations, "learning", "learning.micro_batch_tokens"),
        Part("backward pass", update, "learning", "learning.micro_batch_tokens"),
    ]
    return [part for part in parts if part.num_bytes], learner.recompute


def gathered_bytes(policy: Decoder) -> int:
    """Returns the bytes that FSDP2 gathers at a time: two layers, one's gradients, embeddings and head."""
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in policy.layers]
    rest = sum(p.nbytes for p in policy.parameters()) - sum(layers)
    return 3 * max(layers) + rest


def _shares(held: PolicyBytes, ranks: int) -> PolicyBytes:
    return replace(
        held,
        weights=_share(held.weights, ranks),
        base_copies=_share(held.base_copies, ranks),
        adapters=_share(held.adapters, ranks),
    )


def _share(num_bytes: int, ranks: int) -> int:
    return -(-num_bytes // ranks)
