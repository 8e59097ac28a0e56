"""One policy update from the groups of a step: advantages, packed forward and backward, optimiser step, metrics."""

import copy
from collections.abc import Sequence

import torch

from paceline.config import Config
from paceline.learning.advantages import group_advantages
from paceline.learning.batch import MicroBatch, TrainingSequence, micro_batches, training_sequences
from paceline.learning.grpo import grpo_loss, token_weights
from paceline.learning.logprobs import token_logprobs
from paceline.learning.optimiser import MasterAdamW
from paceline.policy.decoder import Decoder
from paceline.types import Group


class Learner:
    def __init__(self, policy: Decoder, config: Config) -> None:
        self.policy = policy
        self.config = config.learning
        policy.activation_checkpointing = config.policy.activation_checkpointing
        updates = config.run.steps * self.config.epochs * self.config.minibatches
        self.optimiser = MasterAdamW(policy.named_parameters(), self.config, updates)
        self.reference = copy.deepcopy(policy).requires_grad_(False) if self.config.kl_coef > 0 else None

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics under `policy/`. A step without signal (every advantage zero) leaves the weights alone and says so."""
        advantages = [group_advantages(group.rewards, self.config.normalise_advantages) for group in groups]
        if not any(any(row) for row in advantages):
            return {"policy/skipped": 1.0}
        totals = _Totals()
        for _ in range(self.config.epochs):
            for part in _equal_parts(list(zip(groups, advantages, strict=True)), self.config.minibatches):
                sequences = training_sequences([g for g, _ in part], [a for _, a in part])
                self._optimiser_step(sequences, totals)
        return {"policy/skipped": float(totals.skipped_updates == totals.updates), **totals.metrics()}

    def _optimiser_step(self, sequences: list[TrainingSequence], totals: "_Totals") -> None:
        total_tokens = sum(s.loss_tokens for s in sequences)
        totals.updates += 1
        totals.learning_rate = self.optimiser.learning_rate
        if total_tokens == 0:
            totals.skipped_updates += 1
            return
        for batch in micro_batches(sequences, self.config.micro_batch_tokens, self.policy.device):
            self._accumulate(batch, total_tokens, len(sequences), totals)
        norm = self.optimiser.step()
        totals.gradient_norms.append(norm)
        totals.skipped_updates += not torch.isfinite(torch.tensor(norm)).item()

    def _accumulate(self, batch: MicroBatch, total_tokens: int, total_sequences: int, totals: "_Totals") -> None:
        logprobs_R, entropies_R = token_logprobs(self.policy, batch)
        reference_R = None
        if self.reference is not None:
            with torch.no_grad():
                reference_R, _ = token_logprobs(self.reference, batch)
        token_loss = grpo_loss(self.config, batch, logprobs_R, reference_R)
        weights_R = token_weights(self.config, batch, total_tokens, total_sequences)
        loss = (token_loss.loss_R * weights_R).sum()
        loss.backward()
        delta_R = (logprobs_R.detach() - batch.rollout_logprobs_R)[batch.mask_R]
        totals.add(
            loss=loss.item(),
            tokens=int(batch.mask_R.sum()),
            entropy=float(entropies_R[batch.mask_R].sum()),
            clipped=float(token_loss.clipped_R[batch.mask_R].sum()),
            reference_kl=float(token_loss.reference_kl_R[batch.mask_R].sum()),
            approximate_kl=float((delta_R.exp() - 1 - delta_R).sum()),
            largest_delta=float(delta_R.abs().max()) if len(delta_R) else 0.0,
        )


class _Totals:
    """Sums over micro-batches, turned into per-token means at the end."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.loss = 0.0
        self.tokens = 0
        self.largest_delta = 0.0
        self.updates = 0
        self.skipped_updates = 0
        self.learning_rate = 0.0
        self.gradient_norms: list[float] = []

    def add(self, loss: float, tokens: int, largest_delta: float, **sums: float) -> None:
        self.loss += loss
        self.tokens += tokens
        self.largest_delta = max(self.largest_delta, largest_delta)
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        means = {name: value / max(1, self.tokens) for name, value in self.sums.items()}
        norms = self.gradient_norms
        return {
            "policy/loss": self.loss / max(1, self.updates),
            "policy/entropy": means.get("entropy", 0.0),
            "policy/clip_fraction": means.get("clipped", 0.0),
            "policy/approximate_kl": means.get("approximate_kl", 0.0),
            "policy/reference_kl": means.get("reference_kl", 0.0),
            "policy/largest_logprob_delta": self.largest_delta,
            "policy/gradient_norm": sum(norms) / len(norms) if norms else 0.0,
            "policy/learning_rate": self.learning_rate,
        }


def _equal_parts(items: list, parts: int) -> list[list]:
    size = -(-len(items) // parts)
    return [items[i : i + size] for i in range(0, len(items), size)]
