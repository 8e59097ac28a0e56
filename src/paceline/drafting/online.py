"""An eagle head that follows the policy while it learns: a few optimiser steps of its own after each update.

    rollout ──responses──▶ the longest of this step and the last ──▶ updated policy as teacher ──▶ the head

The policy that teaches is the one the next rollout samples from. Long responses come first: the tail is where
speculation pays. Under shared noise nothing of it can change a completion, and gradients end at the head. It
learns at every step, or when acceptance has drifted.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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

# Tokens of a response with its prompt that are learned from; an unrolled draft holds the scores of all pairs.
MAX_TOKENS = 1024
# Tokens per pass by device, padding included; on the meta device the plan is made for a GPU.
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 4096, "meta": 4096}
# A share of accepted first tokens that falls by less than this has not drifted,
TOLERANCE = 0.01
# nor has one whose fall chance explains: standard deviations of the difference of two shares.
SIGMAS = 3.0
# Rollouts that make up the baseline; one that went on adapting would follow a slow decline.
BASELINE_ROLLOUTS = 4
# Steps of learning after a fall; what they do not bring back is the policy's own doing, such as more entropy.
PATIENCE = 8


@dataclass
class DriftMonitor:
    """Decides whether the head must learn, from how often the first token of its drafts is accepted."""

    baseline: float = 0.0  # share accepted, over the rollouts that make it up
    baseline_drafts: float = 0.0
    rollouts: int = 0  # that make up the baseline so far
    tried: int = 0  # steps of learning since acceptance fell

    def update(self, share: float, drafts: int) -> bool:
        """Takes in a rollout's share of accepted first tokens; returns whether the head should learn now."""
        if self.rollouts:
            margin = self._margin(share, drafts)
            if share < self.baseline - margin and self.tried < PATIENCE:
                self.tried += 1
                return True
            if share > self.baseline + margin or self.tried == PATIENCE:
                self.rollouts = 0  # a new level: the baseline starts over
        if self.rollouts < BASELINE_ROLLOUTS:
            before = self.baseline_drafts if self.rollouts else 0.0
            self.baseline = (self.baseline * before + share * drafts) / (before + drafts)
            self.baseline_drafts = before + drafts
            self.rollouts += 1
        self.tried = 0
        return False

    def _margin(self, share: float, drafts: int) -> float:
        """Returns how far a share may lie from the baseline by chance, and no less than TOLERANCE."""
        pooled = (self.baseline * self.baseline_drafts + share * drafts) / (self.baseline_drafts + drafts)
        chance = SIGMAS * math.sqrt(pooled * (1 - pooled) * (1 / self.baseline_drafts + 1 / drafts))
        return max(TOLERANCE, chance)


class OnlineDrafter:
    """Trains an eagle head during a run, in the storage that the engine drafts from."""

    name = EagleDrafter.name

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: OnlineDrafterConfig,
        seed: int,
        warn: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self.config = config
        self.seed = seed
        self.warn = warn
        training = HeadTraining(
            lr=config.lr, schedule="constant", unroll=config.unroll, batch_sequences=config.batch
        )
        self.trainer = HeadTrainer(policy, head, training)
        self.drift = DriftMonitor()
        self.due = config.when == "always"
        self.recent: list[TrainingSequence] = []  # the longest of the last step
        self.token_budget = MICRO_BATCH_TOKENS[policy.device.type]

    def observe(self, share: float, drafts: int) -> None:
        """Takes in the share of a rollout's drafts whose first token was accepted; nothing without drafts."""
        if self.config.when == "drift" and drafts:
            self.due = self.drift.update(share, drafts)

    def follow(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Lets the head learn from this step and the last if it is due; returns metrics under `drafter/`."""
        budget = self.config.tokens
        written = longest([training_sequence(c) for c in _longest_texts(groups, budget)], budget)
        chosen = longest([*written, *self.recent], budget)
        self.recent = written
        if not self.due or not chosen:
            return {"drafter/updates": 0.0}
        random.Random(f"{self.seed}/{step}").shuffle(chosen)
        batches = [chosen[i : i + self.config.batch] for i in range(0, len(chosen), self.config.batch)]
        reports = list(self._updates(batches))
        if len(reports) < len(batches):
            # Not where the error is caught: the traceback holds on to the tensors that must go.
            self._halve_budget()
        if not reports:
            return {"drafter/updates": 0.0}
        learned = [sequence for batch in batches[: len(reports)] for sequence in batch]
        return {
            "drafter/updates": float(len(reports)),
            "drafter/tokens": float(sum(sequence.loss_tokens for sequence in learned)),
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
            "no memory for the eagle head to learn in: the rest of this step is left out, from now on "
            f"{self.token_budget} tokens at a time"
        )

    def save(self, folder: Path) -> None:
        """Writes the head as a drafter's folder, for whoever serves the policy."""
        save_eagle(self.trainer.head, folder)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns what a checkpoint keeps beside the head, so that a resumed run goes on as it would."""
        counters = {
            "steps": self.trainer.optimiser.steps,
            "due": self.due,
            "token_budget": self.token_budget,
            **asdict(self.drift),
        }
        own = {
            **self.trainer.optimiser.state(),
            **_as_tensors(self.recent),
            **{
                f"counter.{name}": torch.tensor(value, dtype=torch.float64)
                for name, value in counters.items()
            },
        }
        return {f"online.{name}": tensor for name, tensor in own.items()}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state` returned; nothing where the checkpoint has none."""
        own = {
            name.removeprefix("online."): tensor
            for name, tensor in tensors.items()
            if name.startswith("online.")
        }
        if not own:
            return
        counters = _counters(own)
        self.due = bool(counters["due"])
        self.token_budget = int(counters["token_budget"])
        self.drift = DriftMonitor(
            counters["baseline"],
            counters["baseline_drafts"],
            int(counters["rollouts"]),
            int(counters["tried"]),
        )
        self.trainer.optimiser.load_state(own, int(counters["steps"]))
        self.recent = _as_sequences(own)


def make_online(
    policy: Decoder, head: nn.Module | None, config: Config, warn: Callable[[str], None]
) -> OnlineDrafter | None:
    """Returns the trainer of the head that the backend drafts with; None where the recipe asks for none."""
    speculation = config.rollout.speculation
    if speculation.online.when == "never":
        return None
    if head is None:
        raise ConfigError(
            f"rollout.speculation.online.when = {speculation.online.when!r}: no eagle head drafts for this "
            f"policy (rollout.speculation.eagle_path = {speculation.eagle_path!r}); make one with "
            "`paceline drafter train` and name its folder there"
        )
    return OnlineDrafter(policy, head, speculation.online, config.run.seed, warn)


def longest(sequences: Sequence[TrainingSequence], tokens: int) -> list[TrainingSequence]:
    """Returns the longest sequences within `tokens` response tokens, and at least one that was sampled."""
    chosen: list[TrainingSequence] = []
    for sequence in sorted(map(_beginning, sequences), key=lambda sequence: -sequence.loss_tokens):
        tokens -= sequence.loss_tokens
        if sequence.loss_tokens == 0 or (chosen and tokens < 0):
            break
        chosen.append(sequence)
    return chosen


def _longest_texts(groups: Sequence[Group], tokens: int) -> list[Completion]:
    """Returns the longest completions that make up `tokens`; the others need not be looked at."""

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
    """Returns how many tokens of a response are learned from."""
    return min(response, max(0, MAX_TOKENS - prompt))


def cut_padded(sequences: Sequence[TrainingSequence], token_budget: int) -> list[list[TrainingSequence]]:
    """Cuts sequences, longest first, into parts that fit the budget when all are padded to the first."""
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
    """Returns all of the sequences that a head learns from."""
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
    texts = tensors["tokens"].split((prompts + responses).tolist())
    masks = tensors["mask"].split(responses.tolist())
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


def _counters(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Returns the counters by name; early checkpoints kept them as one list."""
    if "counters" in tensors:
        names = ("steps", "due", "token_budget", "baseline", "baseline_drafts", "rollouts", "tried")
        return dict(zip(names, tensors["counters"].tolist(), strict=True))
    prefix = "counter."
    return {
        name.removeprefix(prefix): tensor.item()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
