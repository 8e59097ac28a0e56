"""Steps of rollout and learning on a GPU at real sizes, their peak memory beside the plan's.

    PYTHONPATH=src python3 bench/gpu_plan_check.py [CASE ...]      qwen3-8b-full qwen3-8b-lora qwen3-1.7b-full ...

Random weights of a well-known shape; every case runs in a process of its own. Planned and measured are what
the run's tensors take (torch's peak of allocated bytes, and the KV pool while it is awake); "reserved" is
what torch held of the device at the end.
"""

import random
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from paceline.config import Config, load_config
from paceline.engine.factory import make_engine
from paceline.learning.learner import Learner
from paceline.plan.machine import LIBRARY_BYTES, gpu_at_hand
from paceline.plan.plan import make_plan
from paceline.policy.decoder import Decoder
from paceline.policy.lora import add_adapters
from paceline.policy.shapes import SHAPES
from paceline.types import Group, Request, Sample, SamplingParams, Score

PROMPTS, SAMPLES, PROMPT_TOKENS, STEPS = 8, 8, 192, 2
COMMON = [
    "rollout.max_running=64",
    "rollout.max_tokens=96",
    "eval.max_tokens=96",
    f"task.max_prompt_tokens={PROMPT_TOKENS}",
]
CASES = {
    "qwen3-8b-full": ("qwen3-8b", ["policy.activation_checkpointing=true"]),
    "qwen3-8b-lora": ("qwen3-8b", ["policy.lora.rank=32"]),
    "qwen3-1.7b-full": ("qwen3-1.7b", []),
    "qwen3-1.7b-full-kl": ("qwen3-1.7b", ["learning.kl_coef=0.01", "learning.micro_batch_tokens=4096"]),
}


@dataclass(frozen=True)
class Peaks:
    """In bytes."""

    rollout: int
    learning: int


def main(names: list[str]) -> None:
    if len(names) == 1:
        check(names[0])
        return
    for name in names or CASES:
        subprocess.run([sys.executable, __file__, name])


def check(name: str) -> tuple[Peaks, Peaks]:
    """Planned and measured."""
    shape_name, overrides = CASES[name]
    config, shape, started = load_config(None, [*COMMON, *overrides]), SHAPES[shape_name], time.time()
    machine = gpu_at_hand()
    plan = make_plan(config, shape, torch.bfloat16, machine)
    assert not plan.problem, plan.problem
    planned_in = time.time() - started
    policy = Decoder(shape, torch.bfloat16, "cuda").initialise(0)
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora, seed=0)
    engine = make_engine(policy, config.rollout, plan.kv_tokens, tokenizer=None)
    learner = Learner(policy, config, warn=print)
    rollout_peak = learning_peak = 0
    for step in range(1, STEPS + 1):
        torch.cuda.reset_peak_memory_stats()
        groups = roll_out(engine, config, step)
        rollout_peak = max(rollout_peak, torch.cuda.max_memory_allocated() + engine.cache.num_bytes)
        at_rest = torch.cuda.memory_allocated()
        if plan.sleeps:
            engine.sleep()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.time()
        metrics = learner.update(groups)
        torch.cuda.synchronize()
        learn_seconds = time.time() - start
        learning_peak = max(
            learning_peak, torch.cuda.max_memory_allocated() + (0 if plan.sleeps else engine.cache.num_bytes)
        )
        if plan.sleeps:
            torch.cuda.empty_cache()
            engine.wake()
        engine.update_weights(step)
    free, total = torch.cuda.mem_get_info()
    outside = (
        total
        - free
        - torch.cuda.memory_reserved()
        - engine.cache.num_bytes
        - (machine.taken_bytes - LIBRARY_BYTES)
    )
    print(
        f"== {name}: planned in {planned_in:.1f} s, {time.time() - started:.0f} s in all; an update of "
        f"{sum(len(s.completion.tokens) + PROMPT_TOKENS for g in groups for s in g.samples)} tokens {learn_seconds:.2f} s, "
        f"gradient norm {metrics['policy/gradient_norm']:.3g}, logprob delta {metrics['policy/largest_logprob_delta']:.3g}, "
        f"halvings {metrics['memory/micro_batch_halvings']:.0f}"
    )
    print(f"   {', '.join(f'{part.name} {part.num_bytes / 1e9:.2f}' for part in plan.parts)}")
    print(
        f"   pool {plan.kv_tokens} tokens{', sleeps' if plan.sleeps else ''}; between phases {at_rest / 1e9:.2f} GB of tensors, "
        f"planned {(plan.phase_bytes('always') - (0 if plan.sleeps else engine.cache.num_bytes)) / 1e9:.2f} with graphs"
    )
    compare("rollout", plan.rollout_peak, rollout_peak)
    compare("learning", plan.learning_peak, learning_peak)
    print(
        f"   reserved {torch.cuda.max_memory_reserved() / 1e9:.2f} GB, KV {engine.cache.num_bytes / 1e9:.2f}, "
        f"taken before {(machine.taken_bytes - LIBRARY_BYTES) / 1e9:.2f}, outside torch since {outside / 1e9:.2f}, "
        f"{len(engine.runner.captured)} graphs, total {total / 1e9:.2f}",
        flush=True,
    )
    return Peaks(plan.rollout_peak, plan.learning_peak), Peaks(rollout_peak, learning_peak)


def compare(phase: str, planned: int, measured: int) -> None:
    print(
        f"   {phase:<9} planned {planned / 1e9:7.2f} GB, measured {measured / 1e9:7.2f} GB, plan / measured {planned / measured:.3f}"
    )


def roll_out(engine, config: Config, step: int) -> list[Group]:
    rng = random.Random(step)
    vocabulary, sampling = (
        engine.policy.config.vocab_size,
        SamplingParams(max_tokens=config.rollout.max_tokens),
    )
    requests = []
    for p in range(PROMPTS):
        prompt = tuple(rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS))
        requests += [
            Request(f"{p}/{s}", prompt, rng.getrandbits(62), sampling, group=str(p)) for s in range(SAMPLES)
        ]
    engine.submit(requests)
    done = {completion.request.id: completion for completion in engine.completions()}
    return [
        Group(
            str(p),
            tuple(Sample(done[f"{p}/{s}"], Score(rng.random(), correct=False)) for s in range(SAMPLES)),
        )
        for p in range(PROMPTS)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
