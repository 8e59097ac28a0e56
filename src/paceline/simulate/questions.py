"""Scenarios from flags, recipes and sweeps: text in, typed scenarios out, errors that name the way out."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config import Config
from paceline.simulate.deployment import Parallelism, Precision
from paceline.simulate.hardware import load_hardware
from paceline.simulate.model_shape import load_model
from paceline.simulate.report import Answer
from paceline.simulate.scenario import Scenario, simulate
from paceline.simulate.speculation import Acceptance, Speculation, make_drafter
from paceline.simulate.workload import Lengths, Workload


@dataclass(frozen=True)
class Flags:
    """The command line's flags, as text where a value has a small language of its own."""

    model: str = "qwen3-8b"
    hardware: str = "h200"
    gpus: int = 8
    tp: int = 1
    ep: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    engine: str = "paceline"
    prompts: int = 64
    samples: int = 16
    prompt_tokens: int = 256
    lengths: str = "lognormal:4096,1.0,16,32768"
    k: str = "paced"
    accept: str = "0.75"
    drafter: str = "eagle"
    spec_max_running: int = 0
    mode: str = "sync"
    lag: int | None = None  # the mode's own
    train_share: float = 0.25
    max_running: int = 256
    kv_tokens: int = 0
    reward_seconds: float = 0.0
    train_drafter: bool = False
    steps: int = 0
    seed: int = 0

    def changed(self, changes: dict[str, Any]) -> "Flags":
        """Returns the flags with these changes; another mode has its own lag unless one is among them."""
        if changes.get("mode", self.mode) != self.mode:
            changes = {"lag": None} | changes
        return dataclasses.replace(self, **changes)


# The least value of each flag that is a number.
LEAST = {
    **dict.fromkeys(("gpus", "tp", "ep", "prompts", "samples", "max_running"), 1),
    **dict.fromkeys(("prompt_tokens", "spec_max_running", "lag", "kv_tokens"), 0),
    **dict.fromkeys(("reward_seconds", "steps", "seed"), 0),
}


def check_ranges(flags: Flags) -> None:
    """Raises where a number is too small, or no number at all."""
    for name, least in LEAST.items():
        value = getattr(flags, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if not 0 < flags.train_share < 1:
        raise ValueError(f"--train-share {flags.train_share}: must be between 0 and 1, such as 0.25")
    for name, precision in (("--weights", flags.weights), ("--kv", flags.kv)):
        if precision not in ("bf16", "fp8"):
            raise ValueError(f"{name} {precision!r}: must be bf16 or fp8")


def build(flags: Flags) -> Scenario:
    """Returns the scenario that the flags describe."""
    check_ranges(flags)
    model = load_model(flags.model)
    return Scenario(
        hardware=load_hardware(flags.hardware),
        model=model,
        gpus=flags.gpus,
        parallelism=Parallelism(flags.tp, flags.ep),
        precision=Precision(flags.weights, flags.kv),
        engine=flags.engine,
        workload=Workload(flags.prompts, flags.samples, flags.prompt_tokens, Lengths.parse(flags.lengths)),
        speculation=Speculation.parse(flags.k, Acceptance.parse(flags.accept), flags.spec_max_running),
        drafter=make_drafter(flags.drafter, model),
        mode=flags.mode,
        lag=flags.lag,
        train_share=flags.train_share,
        max_running=flags.max_running,
        kv_tokens=flags.kv_tokens,
        reward_seconds=flags.reward_seconds,
        train_drafter=flags.train_drafter,
        steps=flags.steps,
        seed=flags.seed,
    )


# Drafters that look tokens up.
WITHOUT_NETWORK = ("history", "ngram", "suffix")


def flags_from_recipe(config: Config) -> Flags:
    """Returns what a recipe says about a run; lengths, acceptance and hardware stay at their defaults.

    Of a cluster the GPUs that generate count.
    """
    from paceline.models.source import BUILTIN_POLICIES

    rollout = config.rollout
    speculation = rollout.speculation
    k = f"paced:{speculation.tokens}" if speculation.pacing == "adaptive" else str(speculation.tokens)
    drafter = speculation.drafters[0] if speculation.drafters else "none"
    shapes = {"draft_model": speculation.draft_model_path} | dict.fromkeys(WITHOUT_NETWORK, "history")
    vllm = rollout.backend == "vllm"
    quantised = rollout.precision.fp8_weights or rollout.vllm.engine.get("quantization") == "fp8"
    fp8_kv = rollout.precision.fp8_kv or str(rollout.vllm.engine.get("kv_cache_dtype")).startswith("fp8")
    return Flags(
        model=str(BUILTIN_POLICIES.get(config.policy.path, config.policy.path)),
        gpus=rollout.vllm.tensor_parallel if vllm else max(1, config.cluster.replicas),
        tp=rollout.vllm.tensor_parallel if vllm else 1,
        weights="fp8" if quantised else "bf16",
        kv="fp8" if fp8_kv else "bf16",
        engine="vllm" if vllm else "paceline",
        prompts=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        prompt_tokens=config.task.max_prompt_tokens or 128,
        lengths=f"lognormal:{max(16, rollout.max_tokens // 4)},1.0,1,{rollout.max_tokens}",
        k="0" if drafter == "none" else k,
        drafter=shapes.get(drafter, "eagle"),
        spec_max_running=speculation.max_running,
        mode=rollout.mode,
        lag=rollout.max_lag if rollout.mode in ("partial", "async") else None,
        max_running=rollout.max_running,
        kv_tokens=rollout.kv_tokens,
    )


def ask(scenario: Scenario) -> Answer:
    """Simulates the scenario, and the same one without speculation beside it."""
    outcome = simulate(scenario)
    plain = outcome if scenario.speculation.off else simulate(scenario.plain())
    return Answer(scenario, outcome, plain)


NOT_SWEPT = ("lengths", "spec_max_running", "reward_seconds", "train_drafter", "steps", "seed")
# What reads a value of each key. `mean_length` is no flag, but a part of `lengths`.
SWEEPABLE: dict[str, Callable[[str], object]] = {
    **{field.name: field.type for field in dataclasses.fields(Flags) if field.name not in NOT_SWEPT},
    "lag": int,
    "mean_length": float,
}


@dataclass(frozen=True)
class Sweep:
    """Every combination of some values of some flags."""

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, texts: list[str]) -> "Sweep":
        """Reads `k=0,1,3 gpus=64,512`; values of `accept` by depth are joined with `/`."""
        keys, values = [], []
        for text in (part for given in texts for part in given.split()):
            key, equals, listed = text.partition("=")
            if not equals or key not in SWEEPABLE or not listed:
                raise ValueError(
                    f"--sweep {text!r}: use KEY=VALUE,VALUE with a KEY of {', '.join(SWEEPABLE)}"
                )
            if key in keys:
                raise ValueError(f"--sweep {text!r}: {key} is swept already; give all its values at once")
            keys.append(key)
            values.append(tuple(listed.split(",")))
        return cls(tuple(keys), tuple(values))

    def combinations(self) -> list[tuple[str, ...]]:
        """Returns the combinations, each with one value of every key."""
        return list(itertools.product(*self.values))

    def apply(self, flags: Flags, values: tuple[str, ...]) -> Flags:
        """Returns the flags with one combination's values."""
        changes: dict[str, object] = {}
        for key, value in zip(self.keys, values, strict=True):
            try:
                converted = SWEEPABLE[key](value.replace("/", ",") if key == "accept" else value)
            except ValueError:
                raise ValueError(f"--sweep {key}={value}: not a number") from None
            if key == "mean_length":
                changes["lengths"] = _with_mean(flags.lengths, converted)
            else:
                changes[key] = converted
        return flags.changed(changes)


def _with_mean(lengths: str, mean: object) -> str:
    kind, _, numbers = lengths.partition(":")
    if kind != "lognormal":
        raise ValueError(f"--sweep mean_length needs log-normal lengths, not --lengths {lengths!r}")
    return f"lognormal:{mean},{numbers.partition(',')[2]}"
