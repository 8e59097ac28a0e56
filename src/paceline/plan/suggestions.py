"""Changes to a recipe with which its plan would fit, each of them planned before it is offered."""

from dataclasses import dataclass
from typing import Any

import torch

from paceline.config import Config, ConfigError
from paceline.engine.lengths import Lengths
from paceline.plan.machine import Machine
from paceline.plan.plan import Plan, make_plan
from paceline.policy.config import DecoderConfig

LORA_RANK = 32
# The modules that can have adapters where every feed-forward is a mixture of experts.
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
Change = tuple[str, Any]  # section.key and its value


@dataclass(frozen=True)
class Suggestion:
    """Changes to a recipe, and the plan with them."""

    changes: tuple[Change, ...]
    plan: Plan

    def __str__(self) -> str:
        keys = " ".join(f"{key}={_spelt(value)}" for key, value in self.changes)
        return f"{keys} ({self.plan.peak_bytes / 1e9:.1f} GB with its KV pool)"


def suggestions(
    config: Config,
    shape: DecoderConfig,
    dtype: torch.dtype,
    machine: Machine,
    learns: bool = True,
    replica: bool = False,
) -> list[Suggestion]:
    """Returns changes with which the run would fit, smallest first, each of them planned."""
    found: list[Suggestion] = []
    for changes in _candidates(config, shape, learns):
        if any(set(smaller.changes) <= set(changes) for smaller in found):
            continue
        plan = make_plan(changed(config, changes), shape, dtype, machine, learns, replica)
        if not plan.problem:
            found.append(Suggestion(changes, plan))
    return found


def _spelt(value: Any) -> str:
    """Returns a value as an override on the command line spells it."""
    return f"[{','.join(value)}]" if isinstance(value, tuple) else str(value).lower()


def refusal(plan: Plan, fitting: list[Suggestion]) -> ConfigError:
    """Returns the error of a run that does not fit, with the suggestions that would."""
    offered = (
        "; or ".join(str(suggestion) for suggestion in fitting)
        or "nothing on this GPU: take a smaller policy or a larger GPU"
    )
    return ConfigError(f"{plan.problem}\nwhat would fit: {offered}")


def _candidates(config: Config, shape: DecoderConfig, learns: bool) -> list[tuple[Change, ...]]:
    fewer_rows = ("rollout.max_running", max(1, config.rollout.max_running // 4))
    own_pool = (("rollout.kv_tokens", 0),) if config.rollout.kv_tokens else ()
    if not learns:
        return [changes for changes in (own_pool, (fewer_rows,)) if changes]
    checkpointing = (
        ()
        if config.policy.activation_checkpointing is not False
        else (("policy.activation_checkpointing", True),)
    )
    smallest = max(64, Lengths.of(changed(config, (("learning.micro_batch_tokens", 64),)), shape).micro_batch)
    smaller = (
        () if smallest >= config.learning.micro_batch_tokens else (("learning.micro_batch_tokens", smallest),)
    )
    on_device = config.learning.optimiser_state == "device"
    eight_bit = (("learning.optimiser_state", "8bit"),) if on_device else ()
    host = () if config.learning.optimiser_state == "host" else (("learning.optimiser_state", "host"),)
    lora: tuple[Change, ...] = () if config.policy.lora.rank else (("policy.lora.rank", LORA_RANK),)
    if lora and len(shape.expert_layers) == shape.num_layers:
        lora += (("policy.lora.targets", ATTENTION_TARGETS),)
    tried = [
        own_pool,
        checkpointing,
        smaller,
        (fewer_rows,),
        checkpointing + smaller,
        lora,
        lora + checkpointing,
        eight_bit,
        host,
        lora + checkpointing + smaller,
    ]
    return list(dict.fromkeys(changes for changes in tried if changes))


def changed(config: Config, changes: tuple[Change, ...]) -> Config:
    tree = config.model_dump()
    for key, value in changes:
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[last] = value
    return Config.model_validate(tree)
