"""`paceline plan`: the plan of a recipe as a table, or as JSON."""

import json
from dataclasses import asdict

import rich.console
import torch
from rich.console import JustifyMethod
from rich.table import Table

from paceline.config import Config, ConfigError
from paceline.models.source import policy_folder
from paceline.plan.cluster import ClusterPlan, cluster_refusal, make_cluster_plan
from paceline.plan.head_room import NO_ROOM, settle_learning
from paceline.plan.machine import Machine, gpu_at_hand, gpu_of_size, named_gpu
from paceline.plan.plan import Plan, make_plan
from paceline.plan.suggestions import refusal, suggestions
from paceline.plan.supervised import make_supervised_plan, supervised_refusal, supervised_suggestions
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.huggingface import DTYPES
from paceline.policy.shapes import SHAPES
from paceline.sft.setup import settle


def show_plan(config: Config, gpu: str, memory_gb: float | None, as_json: bool) -> None:
    """Prints the plan; raises where it does not fit."""
    machine = _machine(gpu, memory_gb)
    shape = _shape(config)
    dtype = DTYPES["bfloat16" if config.policy.dtype == "auto" else config.policy.dtype]
    if config.learning.algorithm == "sft":
        _show_supervised_plan(config, shape, dtype, machine, as_json)
        return
    if config.cluster.replicas:
        _show_cluster_plan(config, shape, dtype, machine, as_json)
        return
    asked = config
    config, plans = settle_learning(config, lambda one: {"run": make_plan(one, shape, dtype, machine)})
    plan = plans["run"]
    notes = [NO_ROOM] if config is not asked else []
    fitting = suggestions(config, shape, dtype, machine) if plan.problem else []
    if as_json:
        print(json.dumps(as_tree(plan, [str(suggestion) for suggestion in fitting], notes), indent=2))
    else:
        rich.console.Console(highlight=False).print(table(plan, shape))
        print(*notes, sep="\n", end="\n" if notes else "")
    if plan.problem:
        raise refusal(plan, fitting)


def _show_supervised_plan(
    config: Config, shape: DecoderConfig, dtype: torch.dtype, machine: Machine, as_json: bool
) -> None:
    """Prints the plan of `paceline sft` with examples of sft.max_tokens; raises where it does not fit."""
    config, longest = settle(config, examples=1, on_gpu=True), config.sft.max_tokens
    plan = make_supervised_plan(config, shape, dtype, machine, longest)
    fitting = supervised_suggestions(config, shape, dtype, machine, longest) if plan.problem else []
    if as_json:
        print(json.dumps(as_tree(plan, fitting, []), indent=2))
    else:
        rich.console.Console(highlight=False).print(table(plan, shape))
    if plan.problem:
        raise supervised_refusal(plan, fitting)


def _show_cluster_plan(
    config: Config, shape: DecoderConfig, dtype: torch.dtype, machine: Machine, as_json: bool
) -> None:
    """Prints the plan of each kind of GPU; raises where one does not fit."""
    asked = config
    config, plans = settle_learning(config, lambda one: make_cluster_plan(one, shape, dtype, machine).plans)
    plan = ClusterPlan(plans)
    notes = [NO_ROOM] if config is not asked else []
    if as_json:
        trees = {role: as_tree(own, [], notes) for role, own in plan.plans.items()}
        print(json.dumps(trees, indent=2))
    else:
        out = rich.console.Console(highlight=False)
        for role, own in plan.plans.items():
            out.print(table(own, shape, f"{role}: "))
        out.print(f"{config.cluster.gpus} GPUs, {config.cluster.placement}")
        print(*notes, sep="\n", end="\n" if notes else "")
    if plan.problem:
        raise cluster_refusal(plan, config, shape, dtype, machine)


def table(plan: Plan, shape: DecoderConfig, role: str = "") -> Table:
    """Returns the plan as a table of parts, in gigabytes."""
    title = f"{role}{shape.num_parameters / 1e9:.2f} B parameters on {plan.machine.name}, GB"
    out = Table(title=title, title_justify="left", header_style="bold")
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        ("part", "left"),
        ("always", "right"),
        ("rollout", "right"),
        ("learning", "right"),
        ("key", "left"),
    )
    for column, justify in columns:
        out.add_column(column, justify=justify)

    def row(
        name: str,
        always: int | None = None,
        rollout: int | None = None,
        learning: int | None = None,
        note: str = "",
    ) -> None:
        out.add_row(name, *("" if x is None else f"{x / 1e9:.2f}" for x in (always, rollout, learning)), note)

    for part in plan.parts:
        row(part.name, **{part.phase: part.num_bytes}, note=part.key)
    out.add_section()
    pool = f"KV pool: {plan.kv_tokens} tokens{', asleep while learning' if plan.sleeps else ''}"
    pool = pool if plan.kv_tokens else ""
    row("peak", None, plan.rollout_peak, plan.learning_peak, pool)
    row(
        "usable",
        None,
        plan.usable_bytes,
        plan.usable_bytes,
        f"of {plan.machine.total_bytes / 1e9:.1f}, {plan.machine.taken_bytes / 1e9:.1f} taken",
    )
    return out


def as_tree(plan: Plan, fitting: list[str], notes: list[str]) -> dict:
    """Returns the plan in JSON's types; `fitting` are the changes with which it would fit."""
    return {
        "machine": asdict(plan.machine),
        "parts": [asdict(part) for part in plan.parts],
        "rollout_peak_bytes": plan.rollout_peak,
        "learning_peak_bytes": plan.learning_peak,
        "usable_bytes": plan.usable_bytes,
        "kv_tokens": plan.kv_tokens,
        "kv_pool_sleeps": plan.sleeps,
        "fits": not plan.problem,
        "problem": plan.problem,
        "what_would_fit": fitting,
        "notes": notes,
    }


def _machine(gpu: str, memory_gb: float | None) -> Machine:
    if gpu and memory_gb is not None:
        raise ConfigError(
            f"--gpu {gpu} and --memory-gb {memory_gb:g} say the same thing twice; give one of them"
        )
    if gpu:
        return named_gpu(gpu)
    machine = gpu_of_size(memory_gb) if memory_gb is not None else gpu_at_hand()
    if machine is None:
        raise ConfigError(
            "there is no GPU here to plan for; name one, such as --gpu H200, or give --memory-gb"
        )
    return machine


def _shape(config: Config) -> DecoderConfig:
    """Returns the policy's shape; a well-known one can be planned for without its weights."""
    path = config.policy.path
    if path in SHAPES:
        return SHAPES[path]
    try:
        return read_config(policy_folder(path))
    except ConfigError as error:
        raise ConfigError(f"{error}; shapes that can be planned for by name: {', '.join(SHAPES)}") from None
