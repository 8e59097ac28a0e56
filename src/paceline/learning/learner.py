"""One policy update from the groups of a step: advantages, forward and backward, optimiser step, metrics.

Advantages and loss are the algorithm's (`algorithms/`); `correction.py` handles samples of another policy.
When memory runs out, the micro-batches of the current optimiser step are made half as large and it starts
over: gradients are sums over the step, so it ends where it would have ended with the smaller size from the
beginning.

With a single update per step, the learning pass itself yields the pre-update logprobs. A forward pass of
their own (the old-logprobs pass) is needed where several updates compare with them, where weights are
normalised by a mean that must be known first, and where there is nothing to learn but the mismatch is still
to be measured.

With several ranks (`ranks.py`) each computes its own micro-batches of every round (`balance.py`) and all see
the numbers of all, in one order: decisions and metrics are those of a single process.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from paceline.config import Config, ConfigError
from paceline.learning.algorithms import make_algorithm
from paceline.learning.algorithms.base import Advantage, LogRatios, token_weights
from paceline.learning.balance import PADDING, Round, SequenceCost, cut
from paceline.learning.batch import MicroBatch, TrainingSequence, pack, told_versions, training_sequence
from paceline.learning.correction import apply_correction, compute_correction
from paceline.learning.exact import exact_logprobs
from paceline.learning.logprobs import token_logprobs
from paceline.learning.mismatch import Mismatch, MismatchCheck, mismatch_values, sum_mismatches
from paceline.learning.optimiser import MasterAdamW
from paceline.learning.ranks import ONE_RANK, Ranks
from paceline.learning.rounded import RoundedWeights
from paceline.learning.teacher import EndpointTeacher, LocalTeacher, make_teacher
from paceline.learning.totals import MicroBatchSums, UpdateTotals, micro_batch_values
from paceline.policy.attention import AttentionObserver, CacheScales, PackedAttention
from paceline.policy.decoder import Capture, Decoder
from paceline.policy.fused import EVERYTHING, Recompute
from paceline.policy.lora import has_adapters
from paceline.precision.products import use_fp8
from paceline.precision.weights import quantised_parameters
from paceline.types import Group, Precision

T = TypeVar("T")

# Weights with a smaller mean are not normalised: dividing by it would only amplify rounding.
MIN_MEAN_WEIGHT = 1e-8


class Learner:
    """Updates a policy from groups of samples, with its own optimiser and, for a KL, reference policy."""

    def __init__(
        self,
        policy: Decoder,
        config: Config,
        warn: Callable[[str], None] = lambda message: None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.policy = policy
        self.config = config.learning
        self.max_tokens = config.rollout.max_tokens
        self.low_precision = config.rollout.precision is not Precision.BASE
        self.algorithm = make_algorithm(config.learning)
        self.token_budget = self.config.micro_batch_tokens
        self.warn = warn
        # Called with the q, k and v of every training forward pass.
        self.observe_attention: AttentionObserver | None = None
        # The scales of the rollout's cache, which the policy (not the reference) attends over.
        self.kv_scales: CacheScales = lambda layer: None
        # Returns a capture of the policy's states over these sequences; None: no capture.
        self.capture_states: Callable[[Sequence[TrainingSequence]], Capture | None] = lambda sequences: None
        if config.policy.activation_checkpointing != "auto":  # which the plan has decided
            policy.recompute = EVERYTHING if config.policy.activation_checkpointing else Recompute()
        updates = config.run.steps * self.config.epochs * self.config.minibatches
        rounded: frozenset[str] = frozenset()
        if config.rollout.precision.fp8_weights:
            base_layers = config.rollout.base_precision_layers
            rounded = frozenset(name for name, _ in quantised_parameters(policy, base_layers))
        if self.config.precision == "fp8":
            use_fp8(policy, config.rollout.base_precision_layers)
        self.reference: Decoder | None = None
        if self.config.kl_coef > 0:  # with adapters, switching them off gives the reference
            self.reference = policy if has_adapters(policy) else copy.deepcopy(policy).requires_grad_(False)
        self.teacher = make_teacher(config.learning, policy)
        self.ranks = ranks
        self.cost = SequenceCost.of(policy.config)
        exact = self.config.numerics == "exact"
        self.token_logprobs = exact_logprobs if exact else token_logprobs
        self.forward = ranks.shard(policy)
        if exact and policy.device.type == "cuda" and not config.rollout.deterministic:
            raise ConfigError(
                "learning.numerics = exact: on a GPU only rollout.deterministic=true computes what can be "
                "computed again bit for bit; set it, or learning.numerics=fast"
            )
        self.reference_forward = self.forward
        if self.reference is not None and self.reference is not policy:
            self.reference_forward = ranks.shard(self.reference)
        self.optimiser = MasterAdamW(policy.named_parameters(), self.config, updates, ranks, rounded)
        self.weights = RoundedWeights(policy, rounded, self.optimiser)
        self.weights.round()

    def update(
        self, groups: Sequence[Group], check: MismatchCheck = lambda mismatch: None
    ) -> dict[str, float]:
        """Updates the policy; returns metrics under `policy/`, `mismatch/` and `correction/`.

        A step without signal (every advantage zero) leaves the weights alone and reports itself as skipped.
        `check` is called with the mismatch before the weights move; if it raises, everything stays as it was.
        """
        totals = UpdateTotals()
        log_ratios = None
        if self.reference is not None and self.algorithm.kl_in_reward:
            log_ratios = self._log_ratios(groups, totals)
        if isinstance(self.teacher, EndpointTeacher):
            log_ratios = self.teacher.log_ratios(groups)
            samples = [sample for group in groups for sample in group.samples]
            ratios = [ratios for own in log_ratios for ratios in own]
            totals.add_log_ratios((r, s.completion.loss_mask) for r, s in zip(ratios, samples, strict=True))
        advantages = self.algorithm.advantages(groups, log_ratios)
        signal = self.teacher is not None or any(advantage.value for own in advantages for advantage in own)
        sequences_by_group = [_sequences(group, own) for group, own in zip(groups, advantages, strict=True)]
        mean_weight = 1.0
        if not signal or self._needs_old_logprobs():
            sequences_by_group, totals.mismatch = self._old_logprobs_pass(sequences_by_group, totals, signal)
            mean_weight = self._mean_weight(totals.mismatch)
            self._show(totals.mismatch, check)
        if not signal:
            return {
                "policy/skipped": 1.0,
                "policy/nonfinite_updates": float(not totals.mismatch.finite),
                **totals.mismatch_metrics(),
            }
        for _ in range(self.config.epochs):
            for part in _split_into(sequences_by_group, self.config.minibatches):
                sequences = [sequence for own in part for sequence in own]
                self.optimiser_step(sequences, mean_weight, totals, check)
        return totals.metrics() | {"memory/micro_batch_tokens": float(self.token_budget)}

    def _needs_old_logprobs(self) -> bool:
        correction = self.config.correction
        return correction.normalise or (
            correction.mode == "decoupled" and self.config.epochs * self.config.minibatches > 1
        )

    def optimiser_step(
        self,
        sequences: list[TrainingSequence],
        mean_weight: float,
        totals: UpdateTotals,
        check: MismatchCheck = lambda mismatch: None,
    ) -> None:
        """Makes one update from these sequences, or none where they are unusable."""
        total_tokens = sum(s.loss_tokens for s in sequences)
        learning_rate = self.optimiser.learning_rate
        if total_tokens == 0:
            totals.add_skipped_update(learning_rate)
            return

        def backward(batch: MicroBatch) -> torch.Tensor:
            return self._backward(batch, total_tokens, len(sequences), mean_weight)

        taught = self._that_teach(sequences)
        totals.idle_tokens += total_tokens - sum(s.loss_tokens for s in taught)
        sums = [
            MicroBatchSums.of(values, told_versions(part))
            for part, values in self.over_micro_batches(taught, backward, totals)
        ]
        mismatch = sum_mismatches(s.mismatch for s in sums)
        try:
            if totals.mismatch is None:
                totals.mismatch = mismatch
                self._show(mismatch, check)
        except BaseException:
            self.optimiser.discard_gradients()
            raise
        if not mismatch.finite:
            self.optimiser.discard_gradients()
            totals.add_update(sums, 1.0, math.nan, learning_rate)
            return
        if mismatch.masked == mismatch.tokens:
            self.optimiser.discard_gradients()
            self.warn(
                f"learning.correction masked all {total_tokens} tokens of an update: it was skipped; "
                "`mismatch/` in the metrics says why"
            )
            totals.add_masked_update(sums, learning_rate)
            return
        scale = self._rejection_scale(mismatch, total_tokens, len(sequences))
        norm = self.optimiser.step(scale)
        self.ranks.merge_adapters(self.policy)
        self.weights.round()
        totals.add_update(sums, scale, norm, learning_rate)

    def _show(self, mismatch: Mismatch, check: MismatchCheck) -> None:
        self.ranks.decide(lambda: check(mismatch))

    def _that_teach(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        """Returns the sequences that must pass through the policy: those whose advantage is not zero.

        The others would add zeros to the gradient, if nothing but the advantage made one and nothing but the
        number of tokens went into a mean; and only low-precision rollouts must all be looked at.
        """
        correction = self.config.correction
        everyone_counts = (
            self.teacher is not None
            or not self.config.skip_zero_advantages
            or self.reference is not None
            or correction.normalise
            or correction.reject != "none"
            or correction.veto > 0
            or self.low_precision
            or self.observe_attention is not None
        )
        if everyone_counts:
            return sequences
        return [s for s in sequences if s.advantage or any(s.penalties)] or sequences

    def _rejection_scale(self, mismatch: Mismatch, total_tokens: int, total_sequences: int) -> float:
        """Returns the factor that makes the loss a mean over what was kept.

        How much was kept is known only after the last micro-batch, so gradients are scaled afterwards.
        """
        if self.config.loss_mean == "token":
            return total_tokens / (total_tokens - mismatch.rejected_tokens)
        return total_sequences / (total_sequences - mismatch.rejected_sequences)

    def _backward(
        self, batch: MicroBatch, total_tokens: int, total_sequences: int, mean_weight: float
    ) -> torch.Tensor:
        """Adds a micro-batch's share of the update's gradients, and returns what the metrics need of it.

        That is the numbers of `MicroBatchSums`, float64 on the policy's device: nothing here waits for it.
        `total_tokens` and `total_sequences` are those of the whole update, `mean_weight` is what correction
        weights are divided by.
        """
        kl_in_loss = self.reference is not None and not self.algorithm.kl_in_reward
        reference_R = self._reference_logprobs(batch) if kl_in_loss else None
        compute = self.token_logprobs
        if isinstance(self.teacher, LocalTeacher):
            compute = self.teacher.comparison(batch)
        batch.attention.observe = self.observe_attention
        batch.attention.deterministic = self.config.deterministic
        logprobs_R, entropies_R, *divergence_R = self._logprobs(batch, compute)
        batch.attention.observe = None
        batch = replace(batch, divergence_R=divergence_R[0] if divergence_R else None)
        learner_R = logprobs_R.detach() if batch.learner_logprobs_R is None else batch.learner_logprobs_R
        correction = compute_correction(self.config.correction, batch, learner_R)
        mismatch = mismatch_values(batch, correction, learner_R, self.config.correction.weight != "none")
        corrected_batch = apply_correction(self.config.correction, batch, correction, learner_R, mean_weight)
        token_loss = self.algorithm.token_loss(corrected_batch, logprobs_R, reference_R)
        weights_R = token_weights(
            self.config.loss_mean, corrected_batch, total_tokens, total_sequences, self.max_tokens
        )
        loss = (token_loss.loss_R * weights_R.to(logprobs_R.dtype)).sum()
        loss.backward()
        values = micro_batch_values(
            batch, corrected_batch, correction, loss, logprobs_R, entropies_R, token_loss
        )
        return torch.cat((values, mismatch))

    def _logprobs(self, batch: MicroBatch, compute: Callable) -> tuple[torch.Tensor, ...]:
        attention = batch.attention
        attention.kv_scales = self.kv_scales
        try:
            return self.forward(compute, batch)
        finally:
            attention.kv_scales = PackedAttention.kv_scales

    @torch.no_grad()
    def _old_logprobs_pass(
        self, sequences_by_group: list[list[TrainingSequence]], totals: UpdateTotals, signal: bool
    ) -> tuple[list[list[TrainingSequence]], Mismatch]:
        """Returns the sequences with the learner's own logprobs, and the mismatch of the whole step.

        Sequences without gradient stay without them where there is any `signal`.
        """

        def compute(batch: MicroBatch) -> torch.Tensor:
            logprobs_R = self._logprobs(batch, self.token_logprobs)[0]
            correction = compute_correction(self.config.correction, batch, logprobs_R)
            weighted = self.config.correction.weight != "none"
            mismatch = mismatch_values(batch, correction, logprobs_R, weighted)
            return torch.cat((logprobs_R.double(), mismatch))

        sequences = [sequence for own in sequences_by_group for sequence in own]
        sequences = self._that_teach(sequences) if signal else sequences
        found: dict[int, tuple[float, ...]] = {}
        measured: list[Mismatch] = []
        for part, numbers in self.over_micro_batches(sequences, compute, totals):
            logprobs = sum(len(sequence.loss_mask) for sequence in part)
            measured.append(Mismatch.of(numbers[logprobs:], told_versions(part)))
            for sequence, values in _split(part, numbers[:logprobs]):
                found[id(sequence)] = tuple(values)
        if self.config.correction.mode == "decoupled":
            sequences_by_group = [
                [replace(sequence, learner_logprobs=found.get(id(sequence), ())) for sequence in own]
                for own in sequences_by_group
            ]
        return sequences_by_group, sum_mismatches(measured)

    def _mean_weight(self, mismatch: Mismatch) -> float:
        """Returns what normalising divides by; 1 where it is off or would divide by nothing."""
        if not self.config.correction.normalise:
            return 1.0
        per_token = self.config.correction.weight == "token"
        mean = (
            mismatch.token_weight / max(1.0, mismatch.tokens)
            if per_token
            else mismatch.sequence_weight / max(1.0, mismatch.sequences)
        )
        return mean if mean > MIN_MEAN_WEIGHT else 1.0

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        # The replayed experts are another policy's choice, and the reference's states are not captured.
        own_routing = replace(batch, replay=None, capture=None)
        with torch.no_grad(), self.ranks.adapters_off(self.reference):
            logprobs_R = self.reference_forward(token_logprobs, own_routing)[0]
        if self.reference is self.policy and self.ranks.count > 1:  # which merged the adapters again
            self.weights.round()
        return logprobs_R

    def _log_ratios(self, groups: Sequence[Group], totals: UpdateTotals) -> LogRatios:
        """Returns log pi_rollout - log pi_reference of every response token, by group and sample."""
        sequences_by_group = [
            [training_sequence(sample.completion) for sample in group.samples] for group in groups
        ]
        answered = [sequence for own in sequences_by_group for sequence in own if sequence.loss_mask]
        found: dict[int, list[float]] = {}

        def compute(batch: MicroBatch) -> torch.Tensor:
            return self._reference_logprobs(batch).double()

        for part, logprobs in self.over_micro_batches(answered, compute, totals):
            for sequence, values in _split(part, logprobs):
                found[id(sequence)] = [
                    old - fixed for old, fixed in zip(sequence.rollout_logprobs, values, strict=True)
                ]
        totals.add_log_ratios((found[id(s)], s.loss_mask) for s in answered)
        return [[found.get(id(sequence), []) for sequence in own] for own in sequences_by_group]

    def cut(self, sequences: Sequence[TrainingSequence]) -> list[Round]:
        return cut(sequences, self.token_budget, self.ranks.count, self.cost)

    def over_micro_batches(
        self,
        sequences: Sequence[TrainingSequence],
        compute: Callable[[MicroBatch], torch.Tensor],
        totals: UpdateTotals,
    ) -> list[tuple[list[TrainingSequence], list[float]]]:
        """Returns every micro-batch of all ranks with the float64 numbers that `compute` returns of it.

        Out of memory, all are rerun (gradients, too): without captured states, or at half the size.
        """
        while True:
            rounds = self.cut(sequences)
            own = [parts[self.ranks.rank] or [PADDING] for parts in rounds]
            batches: list[MicroBatch] = []
            try:
                # All of them are packed before the first is computed: copies to a GPU would wait for it.
                batches = [
                    replace(pack(part, self.policy.device), capture=self.capture_states(part)) for part in own
                ]
                # The first time that the host waits for the device.
                numbers = self.ranks.gather([compute(batch) for batch in batches])
                return [
                    (part, found)
                    for parts, by_rank in zip(rounds, numbers, strict=True)
                    for part, found in zip(parts, by_rank, strict=True)
                    if part
                ]
            except torch.OutOfMemoryError as error:
                reason = str(error)  # not the error: its traceback keeps alive the tensors that must be freed
            self.optimiser.discard_gradients()
            captured = any(batch.capture is not None for batch in batches)
            batches.clear()
            torch.cuda.empty_cache()
            if captured and self.ranks.count == 1:
                self.capture_states = lambda sequences: None
                self.warn(
                    "learner out of memory: from now on it takes no states for the eagle head, which "
                    "learns no more; rollout.speculation.online.share=0 leaves the learner its memory at once"
                )
                continue
            self._halve_budget(own, reason)
            totals.halvings += 1

    def _halve_budget(self, parts: list[list[TrainingSequence]], reason: str) -> None:
        if all(len(part) == 1 for part in parts):
            longest = max(len(part[0].tokens) for part in parts)
            raise torch.OutOfMemoryError(
                f"learning from a single response (up to {longest} tokens) does not fit in memory: "
                "lower rollout.max_tokens, set policy.activation_checkpointing=true, "
                f"or use policy.lora.rank. {reason}"
            )
        before = self.token_budget
        if self.ranks.count > 1:  # the others wait for this rank's micro-batches
            raise torch.OutOfMemoryError(
                f"rank {self.ranks.rank} of {self.ranks.count} ran out of memory with micro-batches of "
                f"{before} tokens: set learning.micro_batch_tokens={before // 2}. {reason}"
            )
        self.token_budget //= 2
        self.warn(
            f"learner out of memory: micro-batches of {before} tokens become {self.token_budget}, "
            "and the optimiser step starts over; "
            f"set learning.micro_batch_tokens={self.token_budget} to begin there"
        )


def _sequences(group: Group, advantages: list[Advantage]) -> list[TrainingSequence]:
    return [
        replace(
            training_sequence(sample.completion), advantage=advantage.value, penalties=advantage.penalties
        )
        for sample, advantage in zip(group.samples, advantages, strict=True)
        if sample.completion.tokens
    ]


def _split(
    part: list[TrainingSequence], values: list[float]
) -> Iterator[tuple[TrainingSequence, list[float]]]:
    start = 0
    for sequence in part:
        stop = start + len(sequence.loss_mask)
        yield sequence, values[start:stop]
        start = stop


def _split_into(items: list[T], parts: int) -> list[list[T]]:
    size = -(-len(items) // parts)
    return [items[i : i + size] for i in range(0, len(items), size)]
