"""What a few updates of an eagle head are worth, by optimiser: accept length along responses held out.

    python benchmarks/head_updates.py HEAD IN_DOMAIN countdown policy.path=POLICY run.device=cuda

HEAD is where each case starts, of another task say; IN_DOMAIN is what it could become. The policy answers
the recipe's prompts once; a fifth of the answers is kept apart, the passages of the others are drawn at
random, 4,096 tokens an update. What is measured is the mean of the newest weights, as a run publishes it.
Milliseconds are those of an update, its inputs included.
"""

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

from paceline.bench.recipe_rollout import rollout_engine
from paceline.bench.setup import recipe_policy, recipe_requests
from paceline.config import load_config
from paceline.drafting.acceptance import measure_acceptance
from paceline.drafting.averaging import WeightAverage
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.examples import Example, Passage, passages
from paceline.drafting.publishing import restore
from paceline.drafting.slices import SlicedLearning
from paceline.drafting.training import HeadOptimiser, HeadTrainer, HeadTraining
from paceline.learning.batch import training_sequence
from paceline.learning.optimiser import MasterAdamW
from paceline.policy.decoder import Decoder

RESPONSES, MEASURED, TOKENS, DEPTH = 96, 10, 4096, 5
MARKS = (12, 24, 48)  # updates
CASES = {
    "AdamW, 3e-4": (MasterAdamW, 3e-4),
    "AdamW, 1e-3": (MasterAdamW, 1e-3),
    "Muon for the layer, 3e-4": (HeadOptimiser, 3e-4),
    "Muon for the layer, 1e-3": (HeadOptimiser, 1e-3),
    "Muon for the layer, 3e-3": (HeadOptimiser, 3e-3),
}


def learn(
    policy: Decoder, head: EagleHead, pool: list[Passage], how: tuple, tell: Callable[[EagleHead], float]
) -> tuple[list[float], float]:
    """Returns the accept lengths at MARKS, and an update's milliseconds."""
    make, rate = how
    settings = HeadTraining(lr=rate, schedule="constant", warmup=0)
    trainer = HeadTrainer(policy, head.requires_grad_(), settings)
    trainer.optimiser = make(head.named_parameters(), settings.optimiser(), settings.steps)
    average = WeightAverage(trainer.optimiser.masters())
    learning = SlicedLearning(policy, trainer, batch=len(pool))
    rng, lengths, times = random.Random(0), [], []
    for update in range(1, MARKS[-1] + 1):
        drawn: list[Passage] = []
        while sum(passage.stop - passage.start for passage in drawn) < TOKENS:
            drawn.append(rng.choice(pool))
        learning.plan(drawn)
        began, rebuilt = time.perf_counter(), learning.rebuilt
        for _ in learning.slices(lambda: False):
            pass
        if rebuilt == learning.rebuilt:  # no states were missing
            times.append(time.perf_counter() - began)
        average.update(trainer.optimiser.masters())
        if update in MARKS:
            shown = copy.deepcopy(head).requires_grad_(False)
            restore(shown, average.mean)
            lengths.append(tell(shown))
    return lengths, 1e3 * statistics.median(times or [float("nan")])


def main() -> None:
    """Prints a line for each case."""
    start, in_domain, recipe, *overrides = sys.argv[1:]
    config = load_config(recipe, ["rollout.speculation.drafters=[]", *overrides])
    policy, prompts = recipe_policy(config)
    requests = recipe_requests(config, prompts, RESPONSES)
    engine = rollout_engine(config, policy, requests)
    engine.submit(requests)
    done = sorted(engine.completions(), key=lambda completion: int(completion.request.id))
    del engine
    longest = sorted(done[::5], key=lambda completion: -len(completion.tokens))[:MEASURED]
    learned = [completion for index, completion in enumerate(done) if index % 5 and completion.tokens]

    def load(folder: str) -> EagleHead:
        return load_eagle(folder, policy, policy.dtype, policy.device)

    def tell(head: EagleHead) -> float:
        return measure_acceptance(policy, head, longest, DEPTH).shared_noise.accept_length

    print(f"{len(done)} responses, {sum(len(completion.tokens) for completion in done)} tokens")
    print(
        f"accept length at k = {DEPTH}: start {tell(load(start)):.2f}, in-domain {tell(load(in_domain)):.2f}"
    )
    examples = [Example(training_sequence(completion), 1, 1) for completion in learned]
    rows = SlicedLearning(policy, HeadTrainer(policy, load(start), HeadTraining()), 1).passage_rows
    pool = [passage for example in examples for passage in passages(example, rows)]
    for name, how in CASES.items():
        lengths, milliseconds = learn(policy, load(start), pool, how, tell)
        shown = ", ".join(f"{length:.2f} after {mark}" for mark, length in zip(MARKS, lengths, strict=True))
        print(f"{name:<26} {shown} updates; {milliseconds:.1f} ms", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
