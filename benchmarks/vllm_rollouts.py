"""A recipe's rollouts in vLLM, for vLLM's lines beside those of `benchmarks.pacing` with the same recipe.

    python benchmarks/vllm_rollouts.py --requests 64,256 countdown policy.path=POLICY_8B run.device=cuda \
        rollout.kv_tokens=150000 rollout.vllm.python=VLLM_PYTHON \
        "rollout.speculation.drafters=[eagle]" rollout.speculation.eagle_path=HEAD \
        rollout.speculation.tokens=7

The prompts are those of `benchmarks/pacing.py`, in its order. vLLM samples with noise of its own, so
responses and their lengths are others than ours: compare tokens a second, and mind the longest response. A
small rollout comes first, so that nothing is compiled while it is measured; with `--gate FILE` vLLM then
sleeps until that file is there, so that several can start at once and be measured one by one.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from paceline.backend import Backend
from paceline.bench.setup import recipe_policy, recipe_requests, recipe_tokenizer
from paceline.config import load_config
from paceline.types import Request
from paceline.vllm_backend.start import start_vllm

NEEDED = ("rollout.backend=vllm", "rollout.speculation.pacing=fixed", "rollout.speculation.verify=rejection")
WARM_UP_TOKENS = 64


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--requests", default="64", help="of a rollout; several with commas between")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--gate", type=Path, help="wait for this file between starting and measuring")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def roll_out(backend: Backend, requests: list[Request]) -> dict:
    backend.take_stats()
    start = time.perf_counter()
    backend.submit(requests)
    lengths = [len(completion.tokens) for completion in backend.completions()]
    seconds = time.perf_counter() - start
    assert len(lengths) == len(requests), f"{len(lengths)} of {len(requests)} responses came back"
    stats = backend.take_stats()
    drafts = list(stats.drafts.values())
    return dict(
        requests=len(requests),
        seconds=seconds,
        tokens=sum(lengths),
        tokens_per_second=sum(lengths) / seconds,
        longest=max(lengths),
        decode_steps=len(stats.running),
        accept_length=1 + sum(d.accepted for d in drafts) / max(1, sum(d.drafts for d in drafts)),
    )


def main() -> None:
    options = parse_options()
    config = load_config(options.recipe, [*NEEDED, *options.overrides])
    policy, prompts = recipe_policy(config)
    backend = start_vllm(policy, recipe_tokenizer(config), config, lambda text: print(text, file=sys.stderr))
    counts = [int(word) for word in options.requests.split(",")]
    short = [
        replace(request, sampling=replace(request.sampling, max_tokens=WARM_UP_TOKENS))
        for request in recipe_requests(config, prompts, max(counts))
    ]
    roll_out(backend, short)
    print("warm", flush=True)
    if options.gate is not None:
        backend.sleep()
        while not options.gate.exists():
            time.sleep(0.2)
        backend.wake()
        backend.update_weights(0)
    points = []
    for count in counts:
        for _ in range(options.repeats):
            points.append(roll_out(backend, recipe_requests(config, prompts, count)))
            print(json.dumps(points[-1]), flush=True)
            if options.json:
                figures = dict(recipe=options.recipe, overrides=options.overrides, points=points)
                options.json.write_text(json.dumps(figures, indent=2) + "\n")
    backend.close()


if __name__ == "__main__":
    main()
