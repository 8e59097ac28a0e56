"""An eagle head that follows the policy while it learns: after an update, a few optimiser steps of its own on what was just written.

    rollout ──responses──▶ the longest of this step and the last ──▶ updated policy as teacher ──▶ the head, where the engine reads it

The policy that teaches is the one the next rollout samples from. Long responses come first: the tail is where speculation pays.
Nothing of it can change a completion, and gradients end at the head. It learns at every step, or when acceptance has drifted.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from paceline.config import Config, ConfigError, OnlineDrafterConfig
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import save_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.training import HeadStep, HeadTrainer, HeadTraining, teacher_states
from paceline.learning.batch import TrainingSequence, micro_batches, training_sequence
from paceline.policy.decoder import Decoder
from paceline.types import Group

TOLERANCE = 0.01  # of the share of first tokens that are accepted: what falls less than this below the best has not drifted
MAX_TOKENS = 1024  # of a response with its prompt, whose beginning teaches as well as all of it: an unrolled draft holds the scores of all pairs
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 4096, "meta": 4096}  # on meta the plan is made for a GPU
PATIENCE = 8  # steps of learning; what they do not bring back is the policy's own doing, such as more entropy


@dataclass
class Drift:
    """Whether the head must learn, from how often the policy accepts the first token of its drafts."""

    best: float = 0.0
    tried: int = 0

    def calls_for_learning(self, accepted: float | None) -> bool:
        """None: nobody drafted, so nothing is known."""
        if accepted is None:
            return False
        if accepted >= self.best - TOLERANCE or self.tried == PATIENCE:
            self.best = accepted if self.tried == PATIENCE else max(self.best, accepted)
            self.tried = 0
            return False
        self.tried += 1
        return True


class OnlineDrafter:
    name = EagleDrafter.name

    def __init__(self, policy: Decoder, head: EagleHead, config: OnlineDrafterConfig, seed: int, warn: Callable[[str], None]) -> None:
        self.policy, self.config, self.seed, self.warn = policy, config, seed, warn
        training = HeadTraining(lr=config.lr, schedule="constant", unroll=config.unroll, batch_sequences=config.batch)
        self.trainer = HeadTrainer(policy, head, training)
        self.drift = Drift()
        self.due = config.when == "always"
        self.recent: list[TrainingSequence] = []  # the longest of the last step
        self.token_budget = MICRO_BATCH_TOKENS[policy.device.type]

    def observe(self, accepted: float | None) -> None:
        """The share of first tokens that a rollout accepted; None where the head did not draft."""
        if self.config.when == "drift":
            self.due = self.drift.calls_for_learning(accepted)

    def follow(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics under `drafter/`."""
        written = [training_sequence(sample.completion) for group in groups for sample in group.samples if sample.completion.tokens]
        chosen, self.recent = longest([*written, *self.recent], self.config.tokens), longest(written, self.config.tokens)
        if not self.due or not chosen:
            return {"drafter/updates": 0.0}
        random.Random(f"{self.seed}/{step}").shuffle(chosen)
        try:
            reports = [self._update(chosen[i : i + self.config.batch]) for i in range(0, len(chosen), self.config.batch)]
        except torch.OutOfMemoryError:
            reports = []
        if not reports:  # not in the except clause: the error holds on to the tensors that must go
            self._halve_budget()
            return {"drafter/updates": 0.0}
        return {
            "drafter/updates": float(len(reports)),
            "drafter/tokens": float(sum(sequence.loss_tokens for sequence in chosen)),
            "drafter/kl": statistics.mean(report.divergence[0] for report in reports),
            "drafter/overlap": statistics.mean(report.overlap[0] for report in reports),
            "drafter/grad_norm": statistics.mean(report.grad_norm for report in reports),
        }

    def _update(self, sequences: list[TrainingSequence]) -> HeadStep:
        for batch in micro_batches(sequences, self.token_budget, self.policy.device):
            self.trainer.accumulate(batch, *teacher_states(self.policy, batch, self.trainer.head.config.captured_layers))
        return self.trainer.update()

    def _halve_budget(self) -> None:
        """A drafter that learns less costs time; a run that ends costs everything."""
        self.trainer.discard()
        torch.cuda.empty_cache()
        self.token_budget //= 2
        self.warn(f"no memory for the eagle head to learn in: left out in this step, from now on {self.token_budget} tokens at a time")

    def save(self, folder: Path) -> None:
        """As a drafter of its own, for whoever serves the policy."""
        save_eagle(self.trainer.head, folder)

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps beside the head itself, so that a resumed run goes on as it would have."""
        optimiser = self.trainer.optimiser
        counters = torch.tensor([optimiser.steps, self.drift.best, self.drift.tried, self.due], dtype=torch.float64)
        own = {**optimiser.state(), **_as_tensors(self.recent), "counters": counters}
        return {f"online.{name}": tensor for name, tensor in own.items()}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        own = {name.removeprefix("online."): tensor for name, tensor in tensors.items() if name.startswith("online.")}
        if own:
            steps, self.drift.best, tried, due = own["counters"].tolist()
            self.drift.tried, self.due = int(tried), bool(due)
            self.trainer.optimiser.load_state(own, int(steps))
            self.recent = _as_sequences(own)


def make_online(policy: Decoder, head: nn.Module | None, config: Config, warn: Callable[[str], None]) -> OnlineDrafter | None:
    """None where the recipe does not ask for it. `head`: the one the backend drafts with."""
    speculation = config.rollout.speculation
    if speculation.online.when == "never":
        return None
    if head is None:
        raise ConfigError(
            f"rollout.speculation.online.when = {speculation.online.when!r}: no eagle head drafts for this policy "
            f"(rollout.speculation.eagle_path = {speculation.eagle_path!r}); make one with `paceline drafter train` and name its folder there"
        )
    return OnlineDrafter(policy, head, speculation.online, config.run.seed, warn)


def longest(sequences: Sequence[TrainingSequence], tokens: int) -> list[TrainingSequence]:
    """As many as `tokens` response tokens hold, and at least one; those without a sampled token teach nothing."""
    chosen: list[TrainingSequence] = []
    for sequence in sorted(map(_beginning, sequences), key=lambda sequence: -sequence.loss_tokens):
        tokens -= sequence.loss_tokens
        if sequence.loss_tokens == 0 or (chosen and tokens < 0):
            break
        chosen.append(sequence)
    return chosen


def _beginning(sequence: TrainingSequence) -> TrainingSequence:
    if len(sequence.tokens) <= MAX_TOKENS:
        return sequence
    kept = max(0, MAX_TOKENS - sequence.prompt_length)  # of the response
    return replace(
        sequence,
        tokens=sequence.tokens[: sequence.prompt_length + kept],
        loss_mask=sequence.loss_mask[:kept],
        rollout_logprobs=sequence.rollout_logprobs[:kept],
        routing=None,
    )


def _as_tensors(sequences: Sequence[TrainingSequence]) -> dict[str, torch.Tensor]:
    """All that a head learns from."""
    return {
        "tokens": torch.tensor([token for s in sequences for token in s.tokens], dtype=torch.int64),
        "mask": torch.tensor([sampled for s in sequences for sampled in s.loss_mask], dtype=torch.bool),
        "lengths": torch.tensor([(s.prompt_length, len(s.loss_mask)) for s in sequences], dtype=torch.int64).view(-1, 2),
        "temperatures": torch.tensor([s.temperature for s in sequences], dtype=torch.float64),
    }


def _as_sequences(tensors: dict[str, torch.Tensor]) -> list[TrainingSequence]:
    prompts, responses = tensors["lengths"].unbind(1)
    texts, masks = tensors["tokens"].split((prompts + responses).tolist()), tensors["mask"].split(responses.tolist())
    return [
        TrainingSequence(tuple(text.tolist()), prompt, tuple(mask.tolist()), (0.0,) * len(mask), advantage=0.0, temperature=temperature)
        for text, mask, prompt, temperature in zip(texts, masks, prompts.tolist(), tensors["temperatures"].tolist(), strict=True)
    ]
