"""Where a decode step's time goes on a GPU: its kernels by name, with their launches and microseconds a step.

    python benchmarks/step_kernels.py chain-sum policy.path=FOLDER run.device=cuda \
        rollout.speculation.eagle_path=HEAD rollout.speculation.shape=tree --cases 1:0,1:15,16:7

A case is BATCH:TOKENS; 0 tokens is plain decoding. It may also be BATCH:STRATEGY as traces name them, such as
1:eagle:tree15, among those of the recipe's own drafters. With `--context N` prompts are texts of N
tokens, the policy's responses included, and 64 more are sampled: steps of a long tail. Time in which no
kernel runs is told as well. The profiler costs a little itself: times of whole steps are those of
`paceline bench speculation`.
"""

import argparse
from collections import Counter, defaultdict
from dataclasses import replace

import torch
from torch.autograd import DeviceType

from paceline.bench.recipe import rollout_config, speculation_config
from paceline.bench.recipe_rollout import rollout_engine
from paceline.bench.setup import recipe_engine, recipe_policy, recipe_requests
from paceline.bench.speculation import RecordingPacer
from paceline.engine.engine import Engine
from paceline.pacing.strategy import PLAIN, Strategy
from paceline.types import Request

SHOWN = 30
# Sampled behind texts of `--context` tokens.
NEW_TOKENS = 64


def generate(engine: Engine, requests: list[Request], strategy: Strategy) -> int:
    """Generates to the end and returns the number of steps."""
    pacer = RecordingPacer(strategy)
    engine.pacer = pacer
    engine.submit(requests)
    list(engine.completions())
    return len(pacer.observations)


def long_requests(
    engine: Engine, candidates: list[Request], count: int, context: int, strategy: Strategy
) -> list[Request]:
    """Returns the candidates with the longest responses, continued from `context` tokens of text if given."""
    engine.pacer = RecordingPacer(strategy)
    engine.submit(candidates)
    found = sorted(engine.completions(), key=lambda completion: -len(completion.tokens))[:count]
    if not context:
        return [completion.request for completion in found]
    continued = []
    for completion in found:
        request = completion.request
        text = (*request.prompt, *completion.tokens)[:context]
        sampling = replace(request.sampling, max_tokens=NEW_TOKENS)
        continued.append(replace(request, prompt=text, sampling=sampling))
    return continued


def profile(engine: Engine, requests: list[Request], strategy: Strategy) -> None:
    """Prints the kernels of the steps that generate these requests."""
    generate(engine, requests, strategy)  # compiles and captures
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps = generate(engine, requests, strategy)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    launches: Counter[str] = Counter()
    microseconds: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        launches[kernel.name] += 1
        microseconds[kernel.name] += kernel.time_range.elapsed_us()
    busy, reached = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda event: event.time_range.start):
        start, end = kernel.time_range.start, kernel.time_range.end
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    first = min(kernel.time_range.start for kernel in kernels)
    print(
        f"\n{len(requests)} rows, {strategy}: {steps} steps of {(reached - first) / steps:.0f} us, of which "
        f"{busy / steps:.0f} us with a kernel; {len(kernels) / steps:.0f} launches a step"
    )
    for name, total in sorted(microseconds.items(), key=lambda item: -item[1])[:SHOWN]:
        print(f"{total / steps:9.1f} us  {launches[name] / steps:7.1f} x  {name[:90]}")


def main() -> None:
    """Profiles each case."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--drafter", default="eagle")
    parser.add_argument("--cases", default="1:0,1:7")
    parser.add_argument("--context", type=int, default=0)
    arguments = parser.parse_args()
    cases = [(int(batch), what) for batch, _, what in (c.partition(":") for c in arguments.cases.split(","))]
    named = any(not what.isdigit() for _, what in cases)
    if named:
        config = rollout_config(arguments.recipe, arguments.overrides, "rollout")
    else:
        config = speculation_config(arguments.recipe, arguments.overrides, arguments.drafter)
    policy, prompts = recipe_policy(config)
    if policy.device.type != "cuda":
        parser.error(f"run.device = {config.run.device!r}: kernels are those of a GPU (run.device=cuda)")
    most = max(batch for batch, _ in cases)
    candidates = recipe_requests(config, prompts, 4 * most)
    if named:
        engine = rollout_engine(config, policy, candidates)
    else:
        engine = recipe_engine(config, policy, candidates, most, arguments.drafter, "shared-noise")
    tree = config.rollout.speculation.shape == "tree"

    def strategy_of(what: str) -> Strategy:
        if not what.isdigit():
            return Strategy.parse(what)
        return Strategy(arguments.drafter, int(what), tree) if int(what) else PLAIN

    long = long_requests(engine, candidates, most, arguments.context, strategy_of(cases[-1][1]))
    for batch, what in cases:
        profile(engine, long[:batch], strategy_of(what))


if __name__ == "__main__":
    main()
