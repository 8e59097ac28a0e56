"""Training an eagle head on what the policy wrote, with the policy's own distribution as the teacher.

    policy, no gradient   tokens ──▶ captured states ──▶ head, `unroll` steps ──▶ its logits ─┐
                                └──▶ last states ──▶ logits of the draft vocabulary ──────────┴▶ cross-entropy

The teacher's temperature is the one it sampled at. For the token at place p the teacher is the policy's state
at p - 1, and the student is the head's entry p - 2 (see `unroll.py`). Only tokens that the policy sampled
count, and at step j only where the j tokens before were sampled too: other drafts do not happen.

`HeadTrainer` takes states from any source; `train_offline` computes them from saved responses.
Nothing flows back into the policy: its states, its embedding and its logits are detached, and the head's
gradients are clipped by themselves.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.config import ConfigError, LearningConfig
from paceline.drafting.comparison import Comparison, teacher_probabilities
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.head_pass import HeadPass
from paceline.drafting.unroll import unroll
from paceline.learning.batch import MicroBatch, TrainingSequence, micro_batches
from paceline.learning.muon import MuonState
from paceline.learning.optimiser import MasterAdamW
from paceline.learning.optimiser_state import ParameterState
from paceline.policy.decoder import Capture, Decoder

# Logits per chunk, by device: 64 MiB of float32, and 512 MiB where small launches cost more.
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27, "meta": 1 << 27}
# Steps of drafts whose logits are compared together, by device: launches take longer on a GPU than what they
# compute; on a CPU the check for others comes after each.
STEPS_AT_ONCE = {"cpu": 1, "cuda": 16, "meta": 16}
# Tokens of a micro-batch, by device.
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
# The head's parameter over the vocabulary, whose rows are tokens: no matrix that Muon is meant for.
VOCABULARY = "head.weight"
# Learning rate of the layer's matrices, to that of all else.
MATRIX_RATE = 3.0
# Steps over which the learning rate rises at most.
MAX_WARMUP_STEPS = 20


@dataclass(frozen=True)
class HeadTraining:
    """How a head is trained."""

    # Optimiser steps.
    steps: int = 400
    lr: float = 1e-3
    # Cosine over `steps`, or constant, for as long as training continues.
    schedule: str = "cosine"
    # Steps of a draft that are trained. 1: one pass, which knows only a draft's first token; each further one
    # continues from the head's own states.
    unroll: int = 5
    # Weight of each further step over the one before: a later token counts only if those before were right.
    step_decay: float = 0.8
    # Sequences per optimiser step.
    batch_sequences: int = 64
    # Tokens per forward pass; 0: MICRO_BATCH_TOKENS of the device.
    micro_batch_tokens: int = 0
    max_grad_norm: float = 1.0
    seed: int = 0
    # Steps over which the learning rate rises. None: a tenth of `steps`, at most MAX_WARMUP_STEPS.
    warmup: int | None = None

    def optimiser(self) -> LearningConfig:
        warmup = min(MAX_WARMUP_STEPS, self.steps // 10) if self.warmup is None else self.warmup
        return LearningConfig(
            lr=self.lr,
            lr_schedule=self.schedule,
            warmup_steps=warmup,
            beta2=0.98,
            weight_decay=0.01,
            max_grad_norm=self.max_grad_norm,
        )


@dataclass(frozen=True)
class HeadStep:
    """What one optimiser step saw, by step of the unroll."""

    # Mean KL from the policy to the head, within the draft vocabulary.
    divergence: tuple[float, ...]
    # Mean 1 - TV between the two, over the whole vocabulary: what rejection sampling would accept.
    overlap: tuple[float, ...]
    # The same over all steps together, each as often as a draft got there.
    mean_overlap: float
    grad_norm: float
    tokens: float = 0.0  # that a draft's first step learned from


class HeadOptimiser(MasterAdamW):
    """Muon for the matrices of a head's layer, AdamW for its vocabulary and its norms."""

    def make_state(self, name: str, parameter: torch.Tensor) -> ParameterState:
        if parameter.ndim == 2 and name != VOCABULARY:
            return MuonState(parameter, MATRIX_RATE)
        return super().make_state(name, parameter)


class _Stopped(Exception):
    """Ends a pass whose time is needed elsewhere."""


class HeadTrainer:
    """Trains a head: `accumulate` adds up gradients, any number of times, and `update` uses them."""

    def __init__(self, policy: Decoder, head: EagleHead, settings: HeadTraining) -> None:
        self.policy = policy
        self.head = head
        self.settings = settings
        self.optimiser = HeadOptimiser(head.named_parameters(), settings.optimiser(), settings.steps)
        self._clear()

    def accumulate(self, batch: MicroBatch, hidden_TE: torch.Tensor, captured: list[torch.Tensor]) -> None:
        """Adds the gradients of a micro-batch.

        `hidden_TE` are the policy's last states and `captured` those that enter the captured layers, for the
        batch's tokens.
        """
        self.accumulate_rows(batch, hidden_TE[batch.predictors_R], captured)

    def accumulate_rows(
        self,
        batch: MicroBatch,
        hidden_RE: torch.Tensor,
        captured: list[torch.Tensor],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Adds the gradients of a micro-batch, of whose last states there are those that predict.

        `check` is called every few launches, forward and backward; what it raises ends the pass midway.
        """
        self.accumulated = True
        steps = self.settings.unroll
        run = HeadPass(self.head, captured, self.policy.embedding.weight, batch, steps, check)
        gradients_URE = torch.empty_like(run.states_URE)
        # The unused are computed for nothing: they are few, and counting them would wait for the device.
        used_UR = drafted_in_steps(batch, steps)
        decays_U = self.settings.step_decay ** torch.arange(steps, dtype=torch.float64, device=used_UR.device)
        weights_UR = decays_U[:, None] * used_UR
        at_once, num_rows = self._chunk_shape(steps)
        sums_U3 = torch.zeros_like(self.sums_U3, dtype=torch.float64)
        for rows in _chunks(len(hidden_RE), num_rows):
            temperatures_R = batch.temperatures_R[rows]
            teacher_RD = teacher_probabilities(self.policy, self.head, hidden_RE[rows], temperatures_R)
            for part in _chunks(steps, at_once):
                # Logits fill the memory, so each chunk goes back as far as the states before the next one.
                compared = Comparison(self.head, run.states_URE[part, rows], teacher_RD, temperatures_R)
                sums_U3[part] += compared.sums(used_UR[part, rows])
                gradients_URE[part, rows] = compared.backward(weights_UR[part, rows])
                check()
        run.backward(gradients_URE)
        self.sums_U3 = self.sums_U3 + sums_U3

    def _chunk_shape(self, steps: int) -> tuple[int, int]:
        """Returns of how many steps of drafts, and of how many rows, logits are held at once."""
        device = self.policy.device.type
        at_once = min(steps, STEPS_AT_ONCE[device])
        elements = max(self.policy.config.vocab_size, at_once * self.head.config.draft_vocab)
        return at_once, max(1, CHUNK_ELEMENTS[device] // elements)

    def try_rows(
        self,
        batch: MicroBatch,
        hidden_RE: torch.Tensor,
        captured: list[torch.Tensor],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Does as `accumulate_rows`, or nothing at all: returns False where `should_stop` ended it.

        Meanwhile there are two sets of gradients: those from before, and the micro-batch's.
        """

        def check() -> None:
            if should_stop():
                raise _Stopped

        parameters = [parameter for _, parameter in self.optimiser.named]
        before = [parameter.grad for parameter in parameters]
        accumulated, sums_U3 = self.accumulated, self.sums_U3
        self.optimiser.discard_gradients()
        try:
            self.accumulate_rows(batch, hidden_RE, captured, check)
        except _Stopped:
            self.accumulated, self.sums_U3 = accumulated, sums_U3
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            return False
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return True

    def update(self) -> HeadStep:
        """Makes one optimiser step with the mean over starts of what was accumulated."""
        sums = self.sums_U3.tolist()
        norm = self.optimiser.step(1.0 / max(1.0, sums[0][0]))
        self._clear()
        divergence = tuple(divergence / max(1.0, count) for count, divergence, _ in sums)
        overlap = tuple(overlap / max(1.0, count) for count, _, overlap in sums)
        mean_overlap = sum(overlap for *_, overlap in sums) / max(1.0, sum(count for count, *_ in sums))
        return HeadStep(divergence, overlap, mean_overlap, norm, sums[0][0])

    def discard(self) -> None:
        self.optimiser.discard_gradients()
        self._clear()

    def restart(self) -> None:
        """Resets the optimiser after the head's weights were replaced: the moments belong to the old ones."""
        self.discard()
        self.optimiser = HeadOptimiser(
            self.head.named_parameters(), self.settings.optimiser(), self.settings.steps
        )

    def _clear(self) -> None:
        # Of each step of the unroll: tokens, their divergence and their overlap.
        self.sums_U3 = torch.zeros(self.settings.unroll, 3, device=self.policy.device)
        self.accumulated = False  # whether gradients wait for `update`


def drafted_in_steps(batch: MicroBatch, steps: int) -> torch.Tensor:
    """Returns which response tokens a draft can reach in each of its steps, as a mask `[U, R]`.

    Such a token and those before it, one for each step before, are sampled ones.
    """
    # The start needs an entry, which takes two tokens.
    reached_R = batch.mask_R & (batch.attention.positions_T[batch.predictors_R] > 0)
    continues_R = batch.mask_R & (batch.sequence_R == batch.sequence_R.roll(1))
    continues_R[:1] = False
    reached = [reached_R]
    for _ in range(1, steps):
        reached.append(continues_R & reached[-1].roll(1))
    return torch.stack(reached)


def drafted_tokens(batch: MicroBatch, step: int) -> torch.Tensor:
    """Returns which response tokens a draft can reach in its step `step`, as a mask `[R]`."""
    return drafted_in_steps(batch, step + 1)[-1]


def rows_per_chunk(policy: Decoder) -> int:
    return max(1, CHUNK_ELEMENTS[policy.device.type] // policy.config.vocab_size)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


@torch.no_grad()
def compare_rows(
    policy: Decoder, head: EagleHead, batch: MicroBatch, hidden_RE: torch.Tensor, captured: list[torch.Tensor]
) -> tuple[float, int]:
    """Returns the overlap of drafts' first tokens with the policy, summed over a batch's sampled tokens.

    And how many these are.
    """
    x_RE = next(unroll(head, captured, policy.embedding.weight, batch, 1))
    used_R = drafted_tokens(batch, 0)
    total = torch.zeros((), dtype=torch.float64, device=x_RE.device)
    for rows in _chunks(len(hidden_RE), rows_per_chunk(policy)):
        temperatures_R = batch.temperatures_R[rows]
        teacher_RD = teacher_probabilities(policy, head, hidden_RE[rows], temperatures_R)
        compared = Comparison(head, x_RE[None, rows], teacher_RD, temperatures_R)
        total += torch.where(used_R[rows], compared.overlap_UR, 0.0).sum()
    return float(total), int(used_R.sum())


@torch.no_grad()
def teacher_states(
    policy: Decoder, batch: MicroBatch, layers: tuple[int, ...]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the policy's last hidden states and those that enter `layers`."""
    capture = Capture(layers)
    return policy(batch.tokens_T, batch.attention.positions_T, batch.attention, capture), capture.states_TE


def train_offline(
    policy: Decoder,
    head: EagleHead,
    sequences: Sequence[TrainingSequence],
    settings: HeadTraining,
    progress: Callable[[int, HeadStep], None] = lambda step, report: None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Makes `settings.steps` optimiser steps over the sequences, epoch after epoch in a new order.

    Returns how many it made: fewer where `stopped` returned True after one.
    """
    if not any(sequence.loss_tokens for sequence in sequences):
        raise ValueError(f"none of the {len(sequences)} responses holds a sampled token to learn from")
    trainer = HeadTrainer(policy, head, settings)
    batches = _batches(sequences, settings)
    token_budget = settings.micro_batch_tokens or MICRO_BATCH_TOKENS[policy.device.type]
    for step in range(1, settings.steps + 1):
        for batch in micro_batches(next(batches), token_budget, policy.device):
            trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
        report = trainer.update()
        if not math.isfinite(report.grad_norm):
            raise ConfigError(
                f"the head's gradients are not finite in step {step} of {settings.steps}: with --lr "
                f"{settings.lr:g} it diverged; try a lower one ({HeadTraining.lr:g} is the default)"
            )
        progress(step, report)
        if stopped():
            return step
    return settings.steps


def _batches(
    sequences: Sequence[TrainingSequence], settings: HeadTraining
) -> Iterator[list[TrainingSequence]]:
    epoch = 0
    while True:
        order = list(sequences)
        random.Random(f"{settings.seed}/{epoch}").shuffle(order)
        yield from (
            order[i : i + settings.batch_sequences] for i in range(0, len(order), settings.batch_sequences)
        )
        epoch += 1


def choose_vocabulary(
    sequences: Sequence[TrainingSequence], vocab_size: int, eos_token_ids: tuple[int, ...], size: int
) -> list[int]:
    """Returns a draft vocabulary of `size` tokens, in ascending order.

    It holds the end tokens, then what the responses use most, then the lowest ids.
    """
    counts = Counter(
        token
        for s in sequences
        for token, sampled in zip(s.tokens[s.prompt_length :], s.loss_mask, strict=True)
        if sampled
    )
    ranked = [*eos_token_ids, *(token for token, _ in counts.most_common()), *range(vocab_size)]
    return sorted(list(dict.fromkeys(ranked))[:size])
