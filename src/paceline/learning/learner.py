"""One policy update from the groups of a step: advantages, packed forward and backward, optimiser step, metrics.

Which advantages and which loss is the algorithm's business (`algorithms/`). When memory runs out, the micro-batches of the
optimiser step at hand are cut half as large and it starts over: gradients are sums over the step, so it ends where it would
have ended with the smaller size from the beginning.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from paceline.config import Config
from paceline.learning.algorithms import make_algorithm
from paceline.learning.algorithms.base import Advantage, LogRatios, token_weights
from paceline.learning.batch import MicroBatch, TrainingSequence, cut, pack, training_sequence
from paceline.learning.logprobs import token_logprobs
from paceline.learning.optimiser import MasterAdamW
from paceline.learning.totals import MicroBatchSums, UpdateTotals
from paceline.policy.attention import AttentionObserver
from paceline.policy.decoder import Decoder
from paceline.policy.lora import adapters_off, has_adapters, merge_adapters
from paceline.types import Group

T = TypeVar("T")


class Learner:
    def __init__(self, policy: Decoder, config: Config, warn: Callable[[str], None] = lambda message: None) -> None:
        self.policy = policy
        self.config = config.learning
        self.max_tokens = config.rollout.max_tokens
        self.algorithm = make_algorithm(config.learning)
        self.token_budget = self.config.micro_batch_tokens
        self.warn = warn
        self.observe_attention: AttentionObserver | None = None  # sees the q, k and v of every training forward pass
        policy.activation_checkpointing = config.policy.activation_checkpointing
        updates = config.run.steps * self.config.epochs * self.config.minibatches
        self.optimiser = MasterAdamW(policy.named_parameters(), self.config, updates)
        self.reference: Decoder | None = None
        if self.config.kl_coef > 0:  # with adapters, switching them off gives the reference
            self.reference = policy if has_adapters(policy) else copy.deepcopy(policy).requires_grad_(False)

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics under `policy/`. A step without signal (every advantage zero) leaves the weights alone and says so."""
        totals = UpdateTotals()
        log_ratios = None
        if self.reference is not None and self.algorithm.kl_in_reward:
            log_ratios = self._log_ratios(groups, totals)
        advantages = self.algorithm.advantages(groups, log_ratios)
        if not any(advantage.value for row in advantages for advantage in row):
            return {"policy/skipped": 1.0}
        for _ in range(self.config.epochs):
            for part in _equal_parts(list(zip(groups, advantages, strict=True)), self.config.minibatches):
                self._optimiser_step(_sequences(part), totals)
        return totals.metrics() | {"memory/micro_batch_tokens": float(self.token_budget)}

    def _optimiser_step(self, sequences: list[TrainingSequence], totals: UpdateTotals) -> None:
        total_tokens = sum(s.loss_tokens for s in sequences)
        learning_rate = self.optimiser.learning_rate
        if total_tokens == 0:
            totals.add_skipped_update(learning_rate)
            return

        def backward(batch: MicroBatch) -> MicroBatchSums:
            return self._backward(batch, total_tokens, len(sequences))

        sums = [result for _, result in self._over_micro_batches(sequences, backward, totals)]
        norm = self.optimiser.step()
        merge_adapters(self.policy)
        totals.add_update(sums, norm, learning_rate)

    def _backward(self, batch: MicroBatch, total_tokens: int, total_sequences: int) -> MicroBatchSums:
        batch.attention.observe = self.observe_attention
        logprobs_R, entropies_R = token_logprobs(self.policy, batch)
        batch.attention.observe = None
        in_loss = self.reference is not None and not self.algorithm.kl_in_reward
        reference_R = self._reference_logprobs(batch) if in_loss else None
        token_loss = self.algorithm.token_loss(batch, logprobs_R, reference_R)
        weights_R = token_weights(self.config.loss_mean, batch, total_tokens, total_sequences, self.max_tokens)
        loss = (token_loss.loss_R * weights_R.to(logprobs_R.dtype)).sum()
        loss.backward()
        delta_R = (logprobs_R.detach() - batch.rollout_logprobs_R)[batch.mask_R]
        return MicroBatchSums(
            loss=loss.item(),
            tokens=int(batch.mask_R.sum()),
            entropy=float(entropies_R[batch.mask_R].sum()),
            clipped=float(token_loss.clipped_R[batch.mask_R].sum()),
            reference_kl=float(token_loss.reference_kl_R[batch.mask_R].sum()),
            approximate_kl=float((delta_R.exp() - 1 - delta_R).sum()),
            largest_delta=float(delta_R.abs().max()) if len(delta_R) else 0.0,
        )

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad(), adapters_off(self.reference):
            return token_logprobs(self.reference, batch)[0]

    def _log_ratios(self, groups: Sequence[Group], totals: UpdateTotals) -> LogRatios:
        """Of the rollout policy to the reference, at every response token; a sample without tokens has none."""
        rows = [[training_sequence(sample.completion) for sample in group.samples] for group in groups]
        answered = [sequence for row in rows for sequence in row if sequence.loss_mask]
        found: dict[int, list[float]] = {}
        for part, logprobs in self._over_micro_batches(answered, lambda batch: self._reference_logprobs(batch).tolist(), totals):
            start = 0
            for sequence in part:
                stop = start + len(sequence.loss_mask)
                found[id(sequence)] = [old - fixed for old, fixed in zip(sequence.rollout_logprobs, logprobs[start:stop], strict=True)]
                start = stop
        totals.add_log_ratios((found[id(s)], s.loss_mask) for s in answered)
        return [[found.get(id(sequence), []) for sequence in row] for row in rows]

    def _over_micro_batches(
        self, sequences: Sequence[TrainingSequence], compute: Callable[[MicroBatch], T], totals: UpdateTotals
    ) -> list[tuple[list[TrainingSequence], T]]:
        """`compute` on every micro-batch; out of memory, all of them again with half the tokens, gradients included."""
        while True:
            parts = cut(sequences, self.token_budget)
            try:
                return [(part, compute(pack(part, self.policy.device))) for part in parts]
            except torch.OutOfMemoryError as error:
                reason = str(error)  # not the error: its traceback holds on to the tensors that must go
            self.optimiser.discard_gradients()
            torch.cuda.empty_cache()
            self._halve_budget(parts, reason)
            totals.halvings += 1

    def _halve_budget(self, parts: list[list[TrainingSequence]], reason: str) -> None:
        if all(len(part) == 1 for part in parts):
            longest = len(parts[0][0].tokens)
            raise torch.OutOfMemoryError(
                f"learning from a single response (up to {longest} tokens) does not fit in memory: lower rollout.max_tokens, "
                f"set policy.activation_checkpointing=true, or use policy.lora.rank. {reason}"
            )
        before, self.token_budget = self.token_budget, self.token_budget // 2
        self.warn(
            f"learner out of memory: micro-batches of {before} tokens become {self.token_budget}, and the optimiser step starts over; "
            f"set learning.micro_batch_tokens={self.token_budget} to begin there"
        )


def _sequences(part: list[tuple[Group, list[Advantage]]]) -> list[TrainingSequence]:
    """One per sample that has tokens, in the groups' order."""
    return [
        replace(training_sequence(sample.completion), advantage=advantage.value, penalties=advantage.penalties)
        for group, advantages in part
        for sample, advantage in zip(group.samples, advantages, strict=True)
        if sample.completion.tokens
    ]


def _equal_parts(items: list, parts: int) -> list[list]:
    size = -(-len(items) // parts)
    return [items[i : i + size] for i in range(0, len(items), size)]
