"""Checks and measurements of the learner on a GPU, part by part; a part that fails leaves the others alone.

PYTHONPATH=src python benchmarks/learner_gpu.py checks 4b 1.7b 8b-lora
"""

import argparse
import gc
import time
import traceback
from contextlib import contextmanager

import torch

from paceline.bench.learn import LearnWorkload, bench_learn, make_learner
from paceline.bench.lengths import Lengths
from paceline.cli.bench_tables import learn_lines
from paceline.config import load_config
from paceline.policy.decoder import Decoder
from paceline.policy.shapes import SHAPES

WORKLOAD = LearnWorkload(192, 8, Lengths.parse("lognormal:1196,1.0,16,6000", 64).values)
RUNS = {
    "4b": ("qwen3-4b", []),
    "4b-between": ("qwen3-4b", ["policy.activation_checkpointing=false"]),
    "4b-all": ("qwen3-4b", ["policy.activation_checkpointing=true"]),
    "4b-free": ("qwen3-4b", ["learning.deterministic=false"]),
    "4b-fp8": ("qwen3-4b", ["learning.precision=fp8"]),
    "1.7b": ("qwen3-1.7b", []),
    "1.7b-exact": ("qwen3-1.7b", ["learning.numerics=exact", "rollout.deterministic=true"]),
    "8b-lora": ("qwen3-8b", ["policy.lora.rank=32"]),
    "8b-lora-fp8": ("qwen3-8b", ["policy.lora.rank=32", "learning.precision=fp8"]),
    "8b-8bit": ("qwen3-8b", ["learning.optimiser_state=8bit"]),
    "4b-host": ("qwen3-4b", ["learning.optimiser_state=host"]),
}


@contextmanager
def part(name):
    start = time.perf_counter()
    print(f"== {name}", flush=True)
    try:
        yield
    except Exception:
        print("\n".join(traceback.format_exc().strip().splitlines()[-6:])[-1500:])
    print(f"   ({time.perf_counter() - start:.1f} s)", flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def checks():
    from tests.learning import test_learner_gpu as t

    cases = [(family, None) for family in t.SHAPES] + [("qwen3", t.LORA), ("qwen3_moe", t.DENSE_LORA)]
    for family, lora in cases:
        with part(f"gradients {family}{' LoRA' if lora else ''}"):
            t.test_gradients_are_the_cpus(family, lora)
    with part("recomputation"):
        t.test_recomputation_changes_no_gradient("qwen3")
    for family in ("llama", "qwen3", "qwen3_moe"):
        with part(f"exact numerics {family}"):
            t.test_exact_numerics_give_the_rollouts_logprobs(family)
    for kind in ("8bit", "host"):
        with part(f"optimiser state: {kind}"):
            t.test_optimiser_states_on_the_gpu(kind)
    for family in ("qwen3", "qwen3_moe"):
        with part(f"FP8 learning {family}"):
            t.test_fp8_gradients_are_near(family)
    with part("repeatable update"):
        t.test_updates_repeat()


def measure(name, repeats):
    model, overrides = RUNS[name]
    config = load_config(None, ["learning.micro_batch_tokens=16384", *overrides])
    policy = Decoder(SHAPES[model], torch.bfloat16, "cuda").initialise(0)
    learner = make_learner(policy, config)
    point = bench_learn(learner, WORKLOAD.groups(policy.config.vocab_size), repeats)
    for line in learn_lines(point):
        print("  ", line)
    for kernel, launches, seconds in point.profile.kernels if name in ("4b", "8b-lora") else ():
        print(f"      {seconds:7.3f} s {launches:>6} x {kernel[:90]}")
    print("    halvings:", config.learning.micro_batch_tokens // learner.token_budget - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", help=f"checks, or of {', '.join(RUNS)}")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name == "checks":
            checks()
            continue
        with part(name):
            measure(name, arguments.repeats)


if __name__ == "__main__":
    main()
