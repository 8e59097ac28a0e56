"""The plan of supervised fine-tuning: what learning takes of a GPU, with nothing that generates beside it."""

from dataclasses import replace

import torch

from paceline.config import Config, ConfigError
from paceline.plan.learning import learner_bytes, meta_policy, policy_bytes
from paceline.plan.machine import Machine
from paceline.plan.plan import Plan, learning_parts, too_large, usable_bytes
from paceline.plan.suggestions import LORA_RANK, Change, changed
from paceline.policy.config import DecoderConfig

# What may make room, each planned before it is offered.
CANDIDATES: tuple[tuple[Change, ...], ...] = (
    (("learning.micro_batch_tokens", 2048),),
    (("learning.optimiser_state", "8bit"),),
    (("learning.optimiser_state", "host"),),
    (("policy.lora.rank", LORA_RANK),),
)


def make_supervised_plan(
    config: Config, shape: DecoderConfig, dtype: torch.dtype, machine: Machine, longest: int = 0
) -> Plan:
    """Returns the plan; `longest` is the longest example's tokens, which pass together."""
    policy = meta_policy(shape, config, dtype)
    held = policy_bytes(policy)
    always = held.weights + held.base_copies + held.adapters
    together = max(config.learning.micro_batch_tokens, longest)
    learner = learner_bytes(policy, config, together, usable_bytes(machine) - always)
    parts = learning_parts(held, learner)
    plan = Plan(machine, parts, 0, sleeps=False, problem="", recompute=learner.recompute)
    return plan if plan.learning_peak <= plan.usable_bytes else replace(plan, problem=too_large(plan))


def supervised_suggestions(
    config: Config, shape: DecoderConfig, dtype: torch.dtype, machine: Machine, longest: int = 0
) -> list[str]:
    """Returns changes with which it would fit."""
    found = []
    for changes in CANDIDATES:
        plan = make_supervised_plan(changed(config, changes), shape, dtype, machine, longest)
        if not plan.problem:
            keys = " ".join(f"{key}={value}" for key, value in changes)
            found.append(f"{keys} ({plan.peak_bytes / 1e9:.1f} GB)")
    return found


def supervised_refusal(plan: Plan, fitting: list[str]) -> ConfigError:
    offered = "; or ".join(fitting) or "a smaller policy, a smaller sft.max_tokens or a larger GPU"
    return ConfigError(f"{plan.problem}\nwhat would fit: {offered}")
