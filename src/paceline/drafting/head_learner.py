"""A copy of a drafting head and its updates, wherever the time for them comes from.

    examples ──▶ passages, shuffled ──▶ slices ──▶ updates ──▶ running mean of the newest weights

The learner's process makes a number of updates after the policy's own; an idle replica makes them until it
is stopped, between two slices or midway through one, which is then rerun. The mean takes out the noise that
single updates at a constant rate leave in the weights (polynomial-decay averaging, arXiv 1212.1824).
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from paceline.config import OnlineDrafterConfig
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.examples import Example, passages
from paceline.drafting.slices import Slice, Slicing
from paceline.drafting.training import HeadStep, HeadTrainer, HeadTraining
from paceline.policy.decoder import Decoder

# Tokens of a draft that are trained.
UNROLL = 5
# The mean is over about one update in so many, the newest, and over no more than
PART = 8
# these, since the policy that they follow moves.
LONGEST = 32


class HeadLearner:
    """Trains a copy of a head."""

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: OnlineDrafterConfig,
        seed: int,
        warn: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self.head = copy.deepcopy(head)
        self.seed = seed
        self.warn = warn
        self.trainer = HeadTrainer(
            policy,
            self.head,
            HeadTraining(lr=config.lr, schedule="constant", unroll=UNROLL, warmup=0),
        )
        self.slicing = Slicing(policy, len(self.head.rope_table), shortest_prompt=2 + UNROLL)
        self.work: deque[Slice] = deque()
        self.averaged = 0  # updates
        masters = self.trainer.optimiser.masters()
        self.mean = {name: master.detach().clone() for name, master in masters.items()}

    def plan(self, order: str, examples: Sequence[Example], updates: int = 1 << 30) -> None:
        """Adds at most so many updates from these texts, each passage once, in an order of their own."""
        chosen = [p for example in examples for p in passages(example, self.slicing.passage_rows)]
        random.Random(f"{self.seed}/{order}").shuffle(chosen)
        self.work.extend(self.slicing.updates(chosen, updates))

    def learn(self, should_stop: Callable[[], bool] | None = None) -> Iterator[HeadStep]:
        """Does the planned work, and yields what each update saw; what is left when it stops stays planned.

        Out of memory, the rest is dropped.
        """
        out_of_memory = False
        while self.work and not (should_stop and should_stop()):
            try:
                report = self._slice(self.work[0], should_stop)
            except torch.OutOfMemoryError:
                out_of_memory = True
                break
            if report is not None:
                yield report
        if out_of_memory:
            # Not where the error is caught: the traceback keeps the tensors that must be released alive.
            self._halve()

    def _slice(self, part: Slice, should_stop: Callable[[], bool] | None) -> HeadStep | None:
        batch = self.slicing.packed(part.passages)
        if should_stop is None:
            self.trainer.accumulate_rows(*batch)
        elif not self.trainer.try_rows(*batch, should_stop):
            return None
        self.work.popleft()
        report = None
        if part.ends_update:
            report = self.trainer.update()
            self._average()
        if self.policy.device.type == "cuda":  # the next synchronisation waits for this slice alone
            torch.cuda.current_stream(self.policy.device).synchronize()
        return report

    @torch.no_grad()
    def _average(self) -> None:
        self.averaged += 1
        share = max(PART / (self.averaged + PART - 1), 1 / LONGEST)
        masters = self.trainer.optimiser.masters()
        torch._foreach_lerp_(list(self.mean.values()), [masters[name] for name in self.mean], share)

    def _halve(self) -> None:
        """A drafter that learns less costs time; a run that ends costs everything."""
        self.abandon()
        torch.cuda.empty_cache()
        self.slicing.halve()
        self.warn(
            "no memory for the eagle head to learn in: the rest of this step is left out, from now on "
            f"{self.slicing.slice_rows} tokens at a time"
        )

    def abandon(self) -> None:
        """Drops what was accumulated and what is left."""
        self.trainer.discard()
        self.work.clear()

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the mean of the newest weights in the head's type, where the head is."""
        dtype = self.head.fc.weight.dtype
        return {name: mean.to(dtype, copy=True) for name, mean in self.mean.items()}

    def restart(self, weights: Mapping[str, torch.Tensor], moments: bool = False) -> None:
        """Continues from these weights, with a new optimiser or the `moments` that there are."""
        self.abandon()
        self.trainer.optimiser.load_masters(weights)
        if not moments:
            self.trainer.restart()
        self.averaged = 0
        for name, mean in self.mean.items():
            mean.copy_(weights[name])

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        optimiser = self.trainer.optimiser
        return {
            **{f"master.{name}": master for name, master in optimiser.masters().items()},
            **{f"mean.{name}": tensor for name, tensor in self.mean.items()},
            **optimiser.state(),
            "averaged": torch.tensor([self.averaged, optimiser.steps]),
        }

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state` returned; a head alone, `mean.`, continues with a new optimiser."""
        self.restart({name: tensors[f"mean.{name}"] for name in self.mean})
        if "averaged" not in tensors:
            return
        averaged, steps = tensors["averaged"].tolist()
        self.averaged = averaged
        self.trainer.optimiser.load_masters({name: tensors[f"master.{name}"] for name in self.mean})
        self.trainer.optimiser.load_state(tensors, steps)
