"""Supervised fine-tuning with the learner of RL: the same packing, passes, optimiser and ranks.

tokens     p0 p1 a0 a1 u0 u1 a2 a3      a prompt, an answer, another question, another answer
learned     .  .  1  1  .  .  1  1      the loss is the mean of -log pi over these, in the whole batch
"""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.learning.batch import MicroBatch, TrainingSequence
from paceline.learning.learner import Learner
from paceline.learning.totals import UpdateTotals


def supervised_sequence(
    tokens: Sequence[int] | np.ndarray, learned: Sequence[bool] | np.ndarray
) -> TrainingSequence:
    """Returns an example; `learned` says of each token whether it is imitated, which the first cannot be.

    Arrays, which pack much faster than tuples: the same example is packed in every epoch.
    """
    learned_T = np.asarray(learned, np.bool_)
    assert learned_T.any() and not learned_T[0], "nothing to imitate, or nothing that predicts it"
    first = int(learned_T.argmax())
    count = len(learned_T) - first
    return TrainingSequence(
        tokens=np.asarray(tokens, np.int32),
        prompt_length=first,
        loss_mask=learned_T[first:],
        rollout_logprobs=np.broadcast_to(0.0, count),
        advantage=1.0,
        temperature=1.0,
    )


def imitate(learner: Learner, sequences: list[TrainingSequence]) -> dict[str, float]:
    """Makes one optimiser step on the sequences' loss; returns its metrics under `policy/`."""
    totals = UpdateTotals()
    learner.optimiser_step(sequences, 1.0, totals)
    metrics = totals.metrics()
    kept = ("loss", "entropy", "gradient_norm", "learning_rate", "nonfinite_updates")
    return {
        **{f"policy/{name}": metrics[f"policy/{name}"] for name in kept},
        "memory/micro_batch_tokens": float(learner.token_budget),
    }


@torch.no_grad()
def mean_loss(learner: Learner, sequences: list[TrainingSequence]) -> float:
    """Returns the loss of the policy as it is."""

    def compute(batch: MicroBatch) -> torch.Tensor:
        logprobs_R = learner.forward(learner.token_logprobs, batch)[0]
        return -torch.where(batch.mask_R, logprobs_R.double(), 0.0).sum()[None]

    passes = learner.over_micro_batches(sequences, compute, UpdateTotals())
    return sum(values[0] for _, values in passes) / sum(s.loss_tokens for s in sequences)
