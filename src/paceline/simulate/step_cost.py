"""Seconds of one decode, verify or prefill step of a replica: the sum of its operators.

    step(rows, queries, keys, longest) = fixed(rows, queries) + per_key(queries) x keys + per_longest x longest

`keys` is the cached context summed over rows. This shape is what lets `replica.py` add up thousands of steps
in closed form.
"""

from dataclasses import dataclass

import numpy as np

from paceline.simulate import operators as op
from paceline.simulate.deployment import KERNELS_ALONE, Deployment, Parallelism, Precision
from paceline.simulate.hardware import GemmCurve
from paceline.simulate.speculation import Drafter, history


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step by operator; arrays over rows."""

    gemm: np.ndarray
    attention_fixed: np.ndarray
    experts: np.ndarray
    rest: np.ndarray  # norms, RoPE, activations, sampling
    collectives: np.ndarray
    draft: np.ndarray
    engine: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return (
            self.gemm
            + self.attention_fixed
            + self.experts
            + self.rest
            + self.collectives
            + self.draft
            + self.engine
        )


@dataclass(frozen=True)
class LinearCost:
    """One strategy's step for every number of rows from 0 to `max_rows`."""

    fixed: np.ndarray
    per_key: float
    per_longest: float

    def seconds(self, rows: int, keys: float, longest: float) -> float:
        return float(self.fixed[rows]) + self.per_key * keys + self.per_longest * longest


class StepCost:
    def __init__(self, deployment: Deployment, drafter: Drafter) -> None:
        self.deployment = deployment
        self.drafter = drafter
        self.model, self.kernels = deployment.model, deployment.hardware.kernels
        split = deployment.parallelism
        self.heads = self.model.heads / split.tensor
        self.kv_heads = max(1.0, self.model.kv_heads / split.tensor)
        fp8 = deployment.precision.weights == "fp8"
        self.draft_model = None
        if drafter.model is not None:  # runs on one device of the replica
            alone = Deployment(deployment.hardware, drafter.model, KERNELS_ALONE, Precision(), Parallelism())
            self.draft_model = StepCost(alone, history())
        self.layer_gemm: GemmCurve = self.kernels.gemm_fp8 if fp8 else self.kernels.gemm_bf16

    # -- a decode or verify step ------------------------------------------------------------------------------------

    def breakdown(self, rows: np.ndarray, draft_tokens: int) -> Breakdown:
        """Everything but what grows with the context."""
        model, engine, tensor = self.model, self.deployment.engine, self.deployment.parallelism.tensor
        rows = np.asarray(rows, dtype=float)
        local = np.ceil(rows / self.deployment.parallelism.attention_groups)  # of one attention group
        tokens = local * (draft_tokens + 1)
        logits = model.vocab / tensor
        rest = self._rest(tokens) + op.sampler(self.kernels.other, tokens, logits)
        host = engine.step_seconds + rows * engine.row_seconds
        if engine.graph_tokens:
            host = host + np.where(
                tokens > engine.graph_tokens, model.layers * engine.eager_layer_seconds, 0.0
            )
        return Breakdown(
            gemm=self._dense_gemms(tokens) + self._head(tokens),
            attention_fixed=model.layers
            * op.decode_attention_fixed(self.kernels.attention, local, draft_tokens + 1),
            experts=self._experts(tokens),
            rest=rest,
            collectives=self._collectives(tokens),
            draft=self._draft(local, draft_tokens),
            engine=host,
        )

    def linear(self, max_rows: int, draft_tokens: int) -> LinearCost:
        groups, curve, model = (
            self.deployment.parallelism.attention_groups,
            self.kernels.attention,
            self.model,
        )
        queries = draft_tokens + 1
        per_key = model.layers * self.attention_per_key(queries) + draft_tokens * self.draft_per_key
        return LinearCost(
            self.breakdown(np.arange(max_rows + 1), draft_tokens).total,
            per_key / groups,
            model.layers * curve.serial_seconds_per_key,
        )

    def step(self, rows: int, draft_tokens: int, context: float) -> float:
        """For rows of equal context."""
        return self.linear(rows, draft_tokens).seconds(rows, rows * context, context)

    @property
    def draft_per_key(self) -> float:
        """Seconds of one draft pass that grow with the context."""
        if self.draft_model is not None:
            return self.draft_model.model.layers * self.draft_model.attention_per_key(1)
        return self.drafter.layers * self.attention_per_key(1)

    def attention_per_key(self, queries: int) -> float:
        kv_bytes = self.deployment.precision.kv_bytes
        return op.decode_attention_per_key(
            self.kernels.attention, queries, self.heads, self.kv_heads, self.model.head_dim, kv_bytes
        )

    # -- prefill ----------------------------------------------------------------------------------------------------

    def prefill(self, tokens: float, pairs: float) -> float:
        """Seconds to fill the cache for `tokens` tokens that attend to `pairs` (query, key) pairs; no
        logits.
        """
        if tokens <= 0:
            return 0.0
        groups, engine, curve = (
            self.deployment.parallelism.attention_groups,
            self.deployment.engine,
            self.kernels.attention,
        )
        local = np.asarray(tokens / groups)
        attention = self.model.layers * op.prefill_attention(
            curve, pairs / groups, self.heads, self.model.head_dim
        )
        products = self._dense_gemms(local) + self._experts(local)
        return float(
            products + self._collectives(local) + self._rest(local) + attention + engine.prefill_seconds
        )

    # -- parts ------------------------------------------------------------------------------------------------------

    def _gemm(self, tokens: np.ndarray, width: float, depth: float) -> np.ndarray:
        return op.gemm(self.layer_gemm, tokens, width, depth, self.deployment.precision.weight_bytes)

    def _dense_gemms(self, tokens: np.ndarray) -> np.ndarray:
        model, tensor = self.model, self.deployment.parallelism.tensor
        q = model.heads * model.head_dim
        seconds = model.layers * (
            self._gemm(tokens, model.qkv_width / tensor, model.hidden)
            + self._gemm(tokens, model.hidden, q / tensor)
        )
        seconds = seconds + (model.layers - model.expert_layers) * self._feed_forward(
            tokens, model.feed_forward / tensor
        )
        if model.expert_layers:
            router = op.gemm(self.kernels.gemm_bf16, tokens, model.experts, model.hidden, 2.0)
            shared = (
                self._feed_forward(tokens, model.shared_feed_forward / tensor)
                if model.shared_feed_forward
                else 0.0
            )
            seconds = seconds + model.expert_layers * (router + shared)
        return seconds

    def _feed_forward(self, tokens: np.ndarray, width: float) -> np.ndarray:
        return self._gemm(tokens, 2 * width, self.model.hidden) + self._gemm(tokens, self.model.hidden, width)

    def _head(self, tokens: np.ndarray) -> np.ndarray:
        return op.gemm(
            self.kernels.gemm_bf16,
            tokens,
            self.model.vocab / self.deployment.parallelism.tensor,
            self.model.hidden,
            2.0,
        )

    def _experts(self, tokens: np.ndarray) -> np.ndarray:
        """Experts see the tokens of all attention groups; without expert parallelism every device holds a
        slice of each.
        """
        model, split = self.model, self.deployment.parallelism
        if not model.expert_layers:
            return np.zeros_like(tokens)
        here, width = (model.experts / split.expert, 1) if split.expert > 1 else (model.experts, split.tensor)
        everybody = tokens * split.attention_groups
        seconds = op.expert_products(
            self.kernels.experts,
            everybody,
            here,
            model.experts_per_token / model.experts,
            model.hidden,
            model.expert_feed_forward / width,
            self.deployment.precision.weight_bytes,
        )
        return model.expert_layers * seconds

    def _rest(self, tokens: np.ndarray) -> np.ndarray:
        model, tensor = self.model, self.deployment.parallelism.tensor
        wide = (
            model.expert_feed_forward * model.experts_per_token if model.expert_layers else model.feed_forward
        )
        return model.layers * op.layer_rest(
            self.kernels.other, tokens, model.hidden, model.qkv_width / tensor, wide / tensor
        )

    def _collectives(self, tokens: np.ndarray) -> np.ndarray:
        """Two sums a layer under tensor parallelism; experts beyond an attention group's devices need two
        exchanges instead of the second.
        """
        model, split, links = self.model, self.deployment.parallelism, self.deployment.hardware.links
        message = tokens * model.hidden * 2.0
        exchanging = model.expert_layers if split.attention_groups > 1 else 0
        seconds = (2 * model.layers - exchanging) * op.all_reduce(links, split.tensor, message)
        if exchanging:
            sent = message * model.experts_per_token / split.tensor
            seconds = seconds + exchanging * 2 * op.all_to_all(links, split.expert, sent)
        return seconds

    def draft_seconds(self, rows: float, draft_tokens: int) -> float:
        """Drafting alone, without its attention to the context."""
        return float(self._draft(np.asarray([rows], dtype=float), draft_tokens)[0])

    def _draft(self, rows: np.ndarray, draft_tokens: int) -> np.ndarray:
        """`draft_tokens` passes of the drafter, one after another: its layers, its head, one sample each."""
        drafter, model, curve = self.drafter, self.model, self.kernels.gemm_bf16
        if not draft_tokens:
            return np.zeros_like(rows)
        if self.draft_model is not None:
            return draft_tokens * self.draft_model.breakdown(rows, 0).total + drafter.fixed_seconds
        if not drafter.layers:
            return np.full_like(rows, drafter.fixed_seconds)
        tensor = self.deployment.parallelism.tensor
        q = model.heads * model.head_dim
        layer = op.gemm(curve, rows, model.qkv_width / tensor, 2 * model.hidden, 2.0) + op.gemm(
            curve, rows, model.hidden, q / tensor, 2.0
        )
        layer = layer + op.gemm(curve, rows, 2 * drafter.feed_forward / tensor, model.hidden, 2.0)
        layer = layer + op.gemm(curve, rows, model.hidden, drafter.feed_forward / tensor, 2.0)
        layer = layer + op.decode_attention_fixed(self.kernels.attention, rows, 1)
        layer = layer + op.layer_rest(
            self.kernels.other, rows, model.hidden, model.qkv_width / tensor, drafter.feed_forward / tensor
        )
        layer = layer + 2 * op.all_reduce(self.deployment.hardware.links, tensor, rows * model.hidden * 2.0)
        head = op.gemm(curve, rows, drafter.vocab / tensor, model.hidden, 2.0) + op.sampler(
            self.kernels.other, rows, drafter.vocab / tensor
        )
        return draft_tokens * (drafter.layers * layer + head) + drafter.fixed_seconds
