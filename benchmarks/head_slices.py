"""What a slice of an eagle head's learning takes on a GPU, by rows and by length of passages.

    python benchmarks/head_slices.py [--profile] [SHAPE ...]     such as smollm2-135m (the default) and 8b

Random weights, states and texts of 1,700 to 3,400 tokens; of the policy only what the head looks at. Medians
of five, each part waited for: making the batch and sending its states, the gradients, the update; and how
often memory was asked of the device in them. With
`--profile` follows, for the first case, how long the GPU is busy with the gradients and the update, in how
many launches, and with what.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.examples import Example, passages
from paceline.drafting.slices import SlicedLearning
from paceline.drafting.training import HeadTrainer, HeadTraining
from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Decoder
from paceline.policy.shapes import SHAPES
from paceline.policy.states import TextStates, to_host

DEVICE = torch.device("cuda")
LAYERS = (1, 2, 3)
PROMPT, LONGEST, TEXTS = 120, 3400, 10
CASES = ((256, 4096), (512, 4096), (512, 8192), (1024, 16384))  # tokens of a passage, and of a slice
WARM_UP, TIMED = 10, 5  # slices: the first ones set libraries up, and find out what memory is needed


def asked_for_memory() -> int:
    """Returns how often memory was asked of the device so far."""
    return torch.cuda.memory_stats(DEVICE)["num_device_alloc"]


def make_text(policy: Decoder, rng: random.Random) -> Example:
    """Returns a response with its states, on the host."""
    length = LONGEST - rng.randrange(LONGEST // 2)
    tokens = tuple(rng.randrange(policy.config.vocab_size) for _ in range(PROMPT + length))
    sequence = TrainingSequence(tokens, PROMPT, (True,) * length, (0.0,) * length, 0.0, 1.0)

    def states(rows: int) -> torch.Tensor:
        return to_host(torch.randn(rows, policy.config.hidden_size, dtype=policy.dtype, device=DEVICE))

    captured = tuple(states(PROMPT + length) for _ in LAYERS)
    return Example(sequence, 1, 1, TextStates(states(length), captured))


def timed(run: Callable, *arguments: object) -> tuple[float, Any]:
    """Returns the milliseconds of a call with all that it launches, and what it returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = run(*arguments)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), result


def profile(run: Callable[[], object]) -> None:
    """Prints the kernels of a call that has been made before."""
    with torch.profiler.profile() as profiler:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 1e3
    print(f"GPU busy {busy:.1f} ms in {sum(kernel.count for kernel in kernels)} launches:")
    for kernel in sorted(kernels, key=lambda kernel: -kernel.self_device_time_total)[:12]:
        print(f"  {kernel.self_device_time_total / 1e3:7.2f} ms {kernel.count:5} x {kernel.key[:90]}")


def main() -> None:
    """Prints a line for each shape and case."""
    names = [name for name in sys.argv[1:] if name != "--profile"]
    for name in names or ["smollm2-135m"]:
        shape = replace(SHAPES[name], num_layers=LAYERS[-1] + 1)
        policy = Decoder(shape, torch.bfloat16, DEVICE).initialise(0)
        head = EagleHead(config_for(shape, LAYERS, 2048), torch.bfloat16, DEVICE).initialise(policy, 0)
        rng = random.Random(0)
        texts = [make_text(policy, rng) for _ in range(TEXTS)]
        for passage_rows, rows in CASES:
            trainer = HeadTrainer(policy, head, HeadTraining(lr=1e-5, schedule="constant", warmup=4))
            learning = SlicedLearning(policy, trainer, batch=16)
            every = [p for text in texts for p in passages(text, passage_rows)]
            times: list[tuple[float, ...]] = []
            for turn in range(WARM_UP + TIMED):
                if turn == WARM_UP:
                    before = asked_for_memory()
                make, inputs = timed(learning.inputs, rng.sample(every, rows // passage_rows))
                gradients, _ = timed(trainer.accumulate_rows, *inputs)
                times.append((make, gradients, timed(trainer.update)[0]))
            make, gradients, update = map(statistics.median, zip(*times[WARM_UP:], strict=True))
            print(
                f"{name}: {rows} tokens in passages of {passage_rows}: inputs {make:.1f} ms, "
                f"gradients {gradients:.1f} ms, update {update:.1f} ms, "
                f"{(asked_for_memory() - before) / TIMED:.1f} allocations",
                flush=True,
            )
            if "--profile" in sys.argv and (passage_rows, rows) == CASES[0]:
                profile(lambda run=trainer, given=inputs: (run.accumulate_rows(*given), run.update()))


if __name__ == "__main__":
    main()
