"""The peaks that `paceline plan` promises of a recipe beside those of a GPU.

    python -m benchmarks.memory default policy.path=qwen3-8b policy.lora.rank=32

Steps of rollout and learning run as in training, with random weights in the policy's shape and with every
prompt and response as long as the recipe allows. What counts is the run's tensors: torch's peak of
allocated bytes, and the KV pool while it is awake. An eagle head that learns during the run does not learn
here.
"""

import random
from dataclasses import dataclass

import torch

from benchmarks.probe import add_recipe, make_parser, write_json
from benchmarks.timing import timed
from paceline.backend import Backend
from paceline.config import Config, ConfigError, load_config
from paceline.device import best_device
from paceline.engine.engine import Engine
from paceline.engine.factory import make_engine
from paceline.engine.lengths import Lengths
from paceline.learning.learner import Learner
from paceline.models.source import policy_dtype, policy_folder
from paceline.plan.machine import LIBRARY_BYTES, Machine, gpu_at_hand
from paceline.plan.plan import make_plan
from paceline.plan.suggestions import refusal, suggestions
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder
from paceline.policy.lora import add_adapters
from paceline.policy.shapes import SHAPES
from paceline.types import Group, Request, Sample, SamplingParams, Score


@dataclass(frozen=True)
class PhasePeaks:
    """The most that each phase of a step held, in bytes."""

    rollout: int
    learning: int


@dataclass(frozen=True)
class MemoryPoint:
    """A plan and what came of it; sizes in bytes."""

    planned: PhasePeaks
    measured: PhasePeaks
    kv_tokens: int
    kv_pool_sleeps: bool
    reserved: int  # what torch held of the device at most, beside the KV pool
    outside_torch: int  # what libraries took meanwhile; the plan reckons with `plan.machine.LIBRARY_BYTES`
    graphs: int
    micro_batch_halvings: int  # because memory ran out: more than 0 means that the plan was wrong
    update_seconds: float  # of the last update


def bench_memory(config: Config, shape: DecoderConfig, dtype: torch.dtype, steps: int) -> MemoryPoint:
    machine = gpu_at_hand()
    if machine is None:
        raise ConfigError(
            "a GPU is needed, and torch sees none here; `paceline plan --gpu NAME` plans without one"
        )
    plan = make_plan(config, shape, dtype, machine)
    if plan.problem:
        raise refusal(plan, suggestions(config, shape, dtype, machine))
    policy = Decoder(shape, dtype, "cuda").initialise(0)
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora, config.run.seed)
    policy.recompute = plan.recompute
    engine = make_engine(policy, config.rollout, plan.kv_tokens, tokenizer=None)
    learner = Learner(policy, config)
    peaks, halvings, seconds = _run_steps(engine, learner, config, plan.sleeps, steps)
    return MemoryPoint(
        planned=PhasePeaks(plan.rollout_peak, plan.learning_peak),
        measured=peaks,
        kv_tokens=plan.kv_tokens,
        kv_pool_sleeps=plan.sleeps,
        reserved=torch.cuda.max_memory_reserved(),
        outside_torch=_outside_torch(engine, plan.machine),
        graphs=len(engine.runner.captured),
        micro_batch_halvings=halvings,
        update_seconds=seconds,
    )


def _run_steps(
    engine: Engine, learner: Learner, config: Config, sleeps: bool, steps: int
) -> tuple[PhasePeaks, int, float]:
    rollout_peak = learning_peak = 0
    for step in range(1, steps + 1):
        torch.cuda.reset_peak_memory_stats()
        groups = longest_groups(engine, config, engine.policy.config, step)
        rollout_peak = max(rollout_peak, torch.cuda.max_memory_allocated() + engine.cache.num_bytes)
        pool_bytes = 0 if sleeps else engine.cache.num_bytes
        if sleeps:
            engine.sleep()
        torch.cuda.reset_peak_memory_stats()
        seconds, metrics = timed(lambda groups=groups: learner.update(groups), engine.policy.device)
        learning_peak = max(learning_peak, torch.cuda.max_memory_allocated() + pool_bytes)
        if sleeps:
            torch.cuda.empty_cache()
            engine.wake()
        engine.update_weights(step)
    halvings = int(metrics["memory/micro_batch_halvings"])
    return PhasePeaks(rollout_peak, learning_peak), halvings, seconds


def longest_groups(backend: Backend, config: Config, shape: DecoderConfig, step: int) -> list[Group]:
    """Samples a step's groups with random prompts and rewards, all as long as the recipe allows."""
    rng = random.Random(step)
    rollout = config.rollout
    longest_response = max(rollout.max_tokens, config.eval.max_tokens)
    prompt_tokens = max(1, Lengths.of(config, shape).request - longest_response)
    sampling = SamplingParams(max_tokens=rollout.max_tokens, ignore_eos=True)
    requests = []
    for group in range(rollout.prompts_per_step):
        prompt = tuple(rng.randrange(shape.vocab_size) for _ in range(prompt_tokens))
        requests += [
            Request(f"{group}/{sample}", prompt, rng.getrandbits(62), sampling, group=str(group))
            for sample in range(rollout.samples_per_prompt)
        ]
    backend.submit(requests)
    samples: dict[str, list[Sample]] = {}
    for completion in backend.completions():
        scored = Sample(completion, Score(rng.random(), correct=False))
        samples.setdefault(completion.request.group, []).append(scored)
    return [Group(name, tuple(members)) for name, members in samples.items()]


def _outside_torch(engine: Engine, machine: Machine) -> int:
    free, total = torch.cuda.mem_get_info()
    taken_before = machine.taken_bytes - LIBRARY_BYTES
    return total - free - torch.cuda.memory_reserved() - engine.cache.num_bytes - taken_before


def recipe_shape(config: Config, device: torch.device) -> tuple[DecoderConfig, torch.dtype]:
    """Returns shape and type of a recipe's policy, whose path may name a shape instead of a folder."""
    dtype = policy_dtype(config.policy, device)
    path = config.policy.path
    return (SHAPES[path] if path in SHAPES else read_config(policy_folder(path))), dtype


def main() -> None:
    parser = make_parser(__doc__)
    add_recipe(parser, "default")
    parser.add_argument("--steps", type=int, default=2, help="of rollout and learning")
    options = parser.parse_intermixed_args()
    device = best_device()
    config = load_config(options.recipe, options.overrides)
    p = bench_memory(config, *recipe_shape(config, device), options.steps)
    print(f"{'phase':<10}{'planned GB':>12}{'measured GB':>13}{'plan / measured':>17}")
    for phase in ("rollout", "learning"):
        planned, measured = getattr(p.planned, phase), getattr(p.measured, phase)
        print(f"{phase:<10}{planned / 1e9:>12.2f}{measured / 1e9:>13.2f}{planned / measured:>17.3f}")
    asleep = ", asleep while learning" if p.kv_pool_sleeps else ""
    print(
        f"KV pool {p.kv_tokens} tokens{asleep}; torch reserved {p.reserved / 1e9:.2f} GB at most, "
        f"{p.outside_torch / 1e9:.2f} outside torch; {p.graphs} graphs"
    )
    print(f"last update {p.update_seconds:.2f} s; micro-batches halved {p.micro_batch_halvings} times")
    write_json(options.json, {"recipe": options.recipe, "overrides": options.overrides}, device, [p])


if __name__ == "__main__":
    main()
