"""Trains an eagle head on existing responses, from its creation to a head that can be saved.

`training.py` has the loss and the optimiser steps; here the head gets its shape, its vocabulary and its
starting weights.
"""

from collections.abc import Callable, Sequence

from paceline.config import Config
from paceline.drafting.acceptance import measure_acceptance
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.model_card import MeasuredAcceptance
from paceline.drafting.training import HeadStep, HeadTraining, choose_vocabulary, train_offline
from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Decoder
from paceline.types import Completion

# Held-out responses, at most.
MOST_HELD_OUT = 64


def open_head(policy: Decoder, start: str, layers: tuple[int, ...], draft_vocab: int) -> EagleHead:
    """Returns the head in the folder `start`, or an empty one where `start` is empty.

    `layers` are those to capture (empty: the usual ones) and `draft_vocab` the number of tokens that a fresh
    head can propose (0: all).
    """
    if start:
        return load_eagle(start, policy, policy.dtype, policy.device)
    return EagleHead(config_for(policy.config, layers, draft_vocab), policy.dtype, policy.device)


def initialise_head(
    head: EagleHead, policy: Decoder, sequences: Sequence[TrainingSequence], seed: int
) -> None:
    """Gives a fresh head the tokens that the responses use most, and its starting weights."""
    config = policy.config
    ids = choose_vocabulary(sequences, config.vocab_size, config.eos_token_ids, head.config.draft_vocab)
    head.draft_to_target.copy_(head.draft_to_target.new_tensor(ids))
    head.initialise(policy, seed)


def train_head(
    policy: Decoder,
    head: EagleHead,
    fresh: bool,
    sequences: Sequence[TrainingSequence],
    settings: HeadTraining,
    progress: Callable[[int, HeadStep], None],
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Trains the head in place, after giving a fresh one its start; returns the optimiser steps made."""
    if fresh:
        initialise_head(head, policy, sequences, settings.seed)
    return train_offline(policy, head, sequences, settings, progress, stopped)


def held_out(completions: Sequence[Completion]) -> tuple[list[Completion], list[Completion]]:
    """Splits responses into those to learn from and the last tenth, held out; few are all learned from."""
    count = min(MOST_HELD_OUT, len(completions) // 10)
    return list(completions[: len(completions) - count]), list(completions[len(completions) - count :])


def measured_on(
    policy: Decoder, head: EagleHead, completions: Sequence[Completion], config: Config, depth: int
) -> MeasuredAcceptance | None:
    """Returns what the policy accepts of the head's drafts along responses; None where there are none."""
    if not completions:
        return None
    acceptance = measure_acceptance(policy, head, completions, depth).shared_noise
    reached = [accepted / max(1e-9, acceptance.tried_at[0]) for accepted in acceptance.accepted_at]
    return MeasuredAcceptance(
        config.policy.path,
        config.task.name,
        config.rollout.temperature,
        0,
        round(acceptance.steps),
        acceptance.accept_length,
        acceptance.rate_at(0),
        tuple(reached),
    )
