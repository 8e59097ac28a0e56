"""An eagle head that follows the policy while it learns: after an update, a few optimiser steps of its own on
what was just written.

    rollout ──responses──▶ the longest of this step and the last ──▶ updated policy as teacher ──▶ the head, where the engine reads it

The policy that teaches is the one the next rollout samples from. Long responses come first: the tail is where
speculation pays. Under shared noise nothing of it can change a completion, and gradients end at the head. It
learns at every step, or when acceptance has drifted.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from paceline.config import Config, ConfigError, OnlineDrafterConfig
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import save_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.training import HeadStep, HeadTrainer, HeadTraining, teacher_states
from paceline.learning.batch import TrainingSequence, pack, training_sequence
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Group

# of a response with its prompt, whose beginning teaches as well as all of it: an unrolled draft holds the
# scores of all pairs
MAX_TOKENS = 1024
MICRO_BATCH_TOKENS = {
    "cpu": 2048,
    "cuda": 4096,
    "meta": 4096,
}  # padding included; on meta the plan is made for a GPU
TOLERANCE = 0.01  # of the share of first tokens that are accepted: what falls less than this has not drifted
SIGMAS = 3.0  # nor has what chance explains
# rollouts that make up what others are compared with: one that went on adapting would follow a slow decline
SETTLING = 4
PATIENCE = 8  # steps of learning; what they do not bring back is the policy's own doing, such as more entropy


@dataclass
class Drift:
    """Whether the head must learn, from how often the policy accepts the first token of its drafts."""

    usual: float = 0.0  # share accepted, over the rollouts that settled it
    drafts: float = 0.0  # of those
    rollouts: int = 0
    tried: int = 0  # steps of learning since acceptance fell

    def calls_for_learning(self, share: float, drafts: int) -> bool:
        if self.rollouts:
            both = (self.usual * self.drafts + share * drafts) / (self.drafts + drafts)
            chance = SIGMAS * math.sqrt(both * (1 - both) * (1 / self.drafts + 1 / drafts))
            apart = max(TOLERANCE, chance)
            if share < self.usual - apart and self.tried < PATIENCE:
                self.tried += 1
                return True
            if share > self.usual + apart or self.tried == PATIENCE:
                self.rollouts = 0
        if self.rollouts < SETTLING:
            before = self.drafts if self.rollouts else 0.0
            self.usual, self.drafts = (
                (self.usual * before + share * drafts) / (before + drafts),
                before + drafts,
            )
            self.rollouts += 1
        self.tried = 0
        return False


class OnlineDrafter:
    name = EagleDrafter.name

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: OnlineDrafterConfig,
        seed: int,
        warn: Callable[[str], None],
    ) -> None:
        self.policy, self.config, self.seed, self.warn = policy, config, seed, warn
        training = HeadTraining(
            lr=config.lr, schedule="constant", unroll=config.unroll, batch_sequences=config.batch
        )
        self.trainer = HeadTrainer(policy, head, training)
        self.drift = Drift()
        self.due = config.when == "always"
        self.recent: list[TrainingSequence] = []  # the longest of the last step
        self.token_budget = MICRO_BATCH_TOKENS[policy.device.type]

    def observe(self, share: float, drafts: int) -> None:
        """The share of a rollout's drafts whose first token was accepted. Without drafts nothing is known,
        and nothing changes.
        """
        if self.config.when == "drift" and drafts:
            self.due = self.drift.calls_for_learning(share, drafts)

    def follow(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics under `drafter/`."""
        written = longest(
            [training_sequence(completion) for completion in _longest_texts(groups, self.config.tokens)],
            self.config.tokens,
        )
        chosen, self.recent = longest([*written, *self.recent], self.config.tokens), written
        if not self.due or not chosen:
            return {"drafter/updates": 0.0}
        random.Random(f"{self.seed}/{step}").shuffle(chosen)
        batches = [chosen[i : i + self.config.batch] for i in range(0, len(chosen), self.config.batch)]
        reports = list(self._updates(batches))
        if len(reports) < len(
            batches
        ):  # not where the error is caught: it holds on to the tensors that must go
            self._halve_budget()
        if not reports:
            return {"drafter/updates": 0.0}
        return {
            "drafter/updates": float(len(reports)),
            "drafter/tokens": float(
                sum(sequence.loss_tokens for batch in batches[: len(reports)] for sequence in batch)
            ),
            "drafter/kl": statistics.mean(report.divergence[0] for report in reports),
            "drafter/overlap": statistics.mean(report.overlap[0] for report in reports),
            "drafter/grad_norm": statistics.mean(report.grad_norm for report in reports),
        }

    def _updates(self, batches: list[list[TrainingSequence]]) -> Iterator[HeadStep]:
        """One for each batch, or as many as there is memory for."""
        layers = self.trainer.head.config.captured_layers
        try:
            for sequences in batches:
                for part in cut_padded(sequences, self.token_budget):
                    batch = pack(part, self.policy.device)
                    self.trainer.accumulate(batch, *teacher_states(self.policy, batch, layers))
                yield self.trainer.update()
        except torch.OutOfMemoryError:
            return

    def _halve_budget(self) -> None:
        """A drafter that learns less costs time; a run that ends costs everything."""
        self.trainer.discard()
        torch.cuda.empty_cache()
        self.token_budget //= 2
        self.warn(
            f"no memory for the eagle head to learn in: the rest of this step is left out, from now on {self.token_budget} tokens at a time"
        )

    def save(self, folder: Path) -> None:
        """As a drafter of its own, for whoever serves the policy."""
        save_eagle(self.trainer.head, folder)

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps beside the head itself, so that a resumed run goes on as it would have."""
        optimiser = self.trainer.optimiser
        counters = torch.tensor(
            [optimiser.steps, self.due, self.token_budget, *astuple(self.drift)], dtype=torch.float64
        )
        own = {**optimiser.state(), **_as_tensors(self.recent), "counters": counters}
        return {f"online.{name}": tensor for name, tensor in own.items()}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        own = {
            name.removeprefix("online."): tensor
            for name, tensor in tensors.items()
            if name.startswith("online.")
        }
        if own:
            steps, due, budget, usual, drafts, rollouts, tried = own["counters"].tolist()
            self.due, self.token_budget, self.drift = (
                bool(due),
                int(budget),
                Drift(usual, drafts, int(rollouts), int(tried)),
            )
            self.trainer.optimiser.load_state(own, int(steps))
            self.recent = _as_sequences(own)


def make_online(
    policy: Decoder, head: nn.Module | None, config: Config, warn: Callable[[str], None]
) -> OnlineDrafter | None:
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
    """As many as `tokens` response tokens hold, and at least one; those without a sampled token teach
    nothing.
    """
    chosen: list[TrainingSequence] = []
    for sequence in sorted(map(_beginning, sequences), key=lambda sequence: -sequence.loss_tokens):
        tokens -= sequence.loss_tokens
        if sequence.loss_tokens == 0 or (chosen and tokens < 0):
            break
        chosen.append(sequence)
    return chosen


def _longest_texts(groups: Sequence[Group], tokens: int) -> list[Completion]:
    """As many as hold `tokens`, by their lengths alone: the others, most of a step, need not be looked at."""

    def kept(completion: Completion) -> int:
        return _kept(len(completion.request.prompt), len(completion.tokens))

    chosen: list[Completion] = []
    for completion in sorted(
        (sample.completion for group in groups for sample in group.samples), key=kept, reverse=True
    ):
        if tokens <= 0 or kept(completion) == 0:
            break
        tokens -= kept(completion)
        chosen.append(completion)
    return chosen


def _kept(prompt: int, response: int) -> int:
    """How many tokens of a response are learned from."""
    return min(response, max(0, MAX_TOKENS - prompt))


def cut_padded(sequences: Sequence[TrainingSequence], token_budget: int) -> list[list[TrainingSequence]]:
    """Longest first, as many as fit the budget when all are padded to the first: that is what an unrolled
    draft holds.
    """
    parts: list[list[TrainingSequence]] = []
    for sequence in sorted(sequences, key=lambda s: len(s.tokens), reverse=True):
        if not parts or (len(parts[-1]) + 1) * len(parts[-1][0].tokens) > token_budget:
            parts.append([])
        parts[-1].append(sequence)
    return parts


def _beginning(sequence: TrainingSequence) -> TrainingSequence:
    if len(sequence.tokens) <= MAX_TOKENS:
        return sequence
    kept = _kept(sequence.prompt_length, len(sequence.loss_mask))
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
        "lengths": torch.tensor(
            [(s.prompt_length, len(s.loss_mask)) for s in sequences], dtype=torch.int64
        ).view(-1, 2),
        "temperatures": torch.tensor([s.temperature for s in sequences], dtype=torch.float64),
    }


def _as_sequences(tensors: dict[str, torch.Tensor]) -> list[TrainingSequence]:
    prompts, responses = tensors["lengths"].unbind(1)
    texts, masks = (
        tensors["tokens"].split((prompts + responses).tolist()),
        tensors["mask"].split(responses.tolist()),
    )
    return [
        TrainingSequence(
            tuple(text.tolist()),
            prompt,
            tuple(mask.tolist()),
            (0.0,) * len(mask),
            advantage=0.0,
            temperature=temperature,
        )
        for text, mask, prompt, temperature in zip(
            texts, masks, prompts.tolist(), tensors["temperatures"].tolist(), strict=True
        )
    ]
