"""Seconds of one decode, verify or prefill step of a replica: the sum of its operators.

    step(rows, k, keys, longest) = fixed(rows, k) + per_key(k) x keys + per_longest x longest

`k` is the number of draft tokens, `keys` the cached context summed over rows. This shape is what lets
`replica.py` add up thousands of steps in closed form.
"""

from dataclasses import dataclass

import numpy as np

from paceline.simulate import operators as op
from paceline.simulate.deployment import KERNELS_ALONE, Deployment
from paceline.simulate.speculation import DrafterShape, history


@dataclass(frozen=True)
class Breakdown:
    """The seconds of one step by operator, without what grows with the context; arrays over rows."""

    gemm: np.ndarray
    attention: np.ndarray
    experts: np.ndarray
    rest: np.ndarray  # norms, RoPE, activations, sampling
    collectives: np.ndarray
    draft: np.ndarray
    engine: np.ndarray

    @property
    def total(self) -> np.ndarray:
        target = self.gemm + self.attention + self.experts + self.rest + self.collectives
        return target + self.draft + self.engine


@dataclass(frozen=True)
class LinearCost:
    """The step of one number of draft tokens, for every number of rows from 0 up."""

    fixed: np.ndarray
    per_key: float
    per_longest: float

    def seconds(self, rows: int, keys: float, longest: float) -> float:
        return float(self.fixed[rows]) + self.per_key * keys + self.per_longest * longest


class StepCost:
    """The steps of one deployment with one drafter.

    A `factor` multiplies all of their seconds: measured over simulated ones of a run.
    """

    def __init__(self, deployment: Deployment, drafter: DrafterShape, factor: float = 1.0) -> None:
        self.deployment = deployment
        self.drafter = drafter
        self.factor = factor
        self.model = deployment.model
        self.kernels = deployment.hardware.kernels
        self.tensor = deployment.parallelism.tensor
        self.groups = deployment.parallelism.attention_groups
        self.heads = self.model.num_heads / self.tensor
        self.kv_heads = max(1.0, self.model.num_kv_heads / self.tensor)
        fp8 = deployment.precision.weights == "fp8"
        self.layer_gemm = self.kernels.gemm_fp8 if fp8 else self.kernels.gemm_bf16
        self.draft_model = None
        if drafter.model is not None:  # runs on one device of the replica
            alone = Deployment(deployment.hardware, drafter.model, KERNELS_ALONE)
            self.draft_model = StepCost(alone, history())

    # -- a decode or verify step --------------------------------------------------------------------------

    def breakdown(self, rows: np.ndarray, draft_tokens: int) -> Breakdown:
        """Returns everything but what grows with the context."""
        model, engine = self.model, self.deployment.engine
        rows = np.asarray(rows, dtype=float)
        local = np.ceil(rows / self.groups)  # of one attention group
        tokens = local * (draft_tokens + 1)
        attention = op.decode_attention_fixed(self.kernels.attention, local, draft_tokens + 1)
        host = engine.step_seconds + rows * engine.row_seconds
        if engine.graph_tokens:
            eager = model.num_layers * engine.eager_layer_seconds
            host = host + np.where(tokens > engine.graph_tokens, eager, 0.0)
        return Breakdown(
            gemm=self._dense_gemms(tokens) + self._gemm_16(tokens, model.vocab_size / self.tensor),
            attention=model.num_layers * attention,
            experts=self._experts(tokens),
            rest=self._rest(tokens) + op.sampler(self.kernels.other, tokens, model.vocab_size / self.tensor),
            collectives=self._collectives(tokens),
            draft=self._draft(local, draft_tokens),
            engine=host,
        )

    def linear(self, max_rows: int, draft_tokens: int) -> LinearCost:
        layers = self.model.num_layers
        per_key = layers * self.attention_per_key(draft_tokens + 1) + draft_tokens * self.draft_per_key
        fixed = self.breakdown(np.arange(max_rows + 1), draft_tokens).total
        per_longest = layers * self.kernels.attention.serial_seconds_per_key
        factor = self.factor
        return LinearCost(factor * fixed, factor * per_key / self.groups, factor * per_longest)

    def step(self, rows: int, draft_tokens: int, context: float) -> float:
        return self.linear(rows, draft_tokens).seconds(rows, rows * context, context)

    @property
    def draft_per_key(self) -> float:
        """Returns the seconds of one draft pass that each cached key adds."""
        if self.draft_model is not None:
            return self.draft_model.model.num_layers * self.draft_model.attention_per_key(1)
        return self.drafter.layers * self.attention_per_key(1)

    def attention_per_key(self, queries: int) -> float:
        """Returns the seconds of one layer that each cached key adds."""
        kv_bytes = self.deployment.precision.kv_bytes
        return op.decode_attention_per_key(
            self.kernels.attention, queries, self.heads, self.kv_heads, self.model.head_dim, kv_bytes
        )

    # -- prefill ------------------------------------------------------------------------------------------

    def prefill(self, tokens: float, pairs: float) -> float:
        """Returns the seconds to fill the cache for tokens that attend to `pairs` (query, key) pairs."""
        if tokens <= 0:
            return 0.0
        local = np.asarray(tokens / self.groups)
        layer = op.prefill_attention(
            self.kernels.attention, pairs / self.groups, self.heads, self.model.head_dim
        )
        products = self._dense_gemms(local) + self._experts(local)
        seconds = products + self._collectives(local) + self._rest(local) + self.model.num_layers * layer
        return self.factor * float(seconds + self.deployment.engine.prefill_seconds)

    # -- parts --------------------------------------------------------------------------------------------

    def _gemm(self, tokens: np.ndarray, width: float, depth: float) -> np.ndarray:
        return op.gemm(self.layer_gemm, tokens, width, depth, self.deployment.precision.weight_bytes)

    def _gemm_16(self, tokens: np.ndarray, width: float, depth: float | None = None) -> np.ndarray:
        """Returns the seconds of a product that stays in 16 bits: head, router, drafter."""
        return op.gemm(self.kernels.gemm_bf16, tokens, width, depth or self.model.hidden_size, 2.0)

    def _dense_gemms(self, tokens: np.ndarray) -> np.ndarray:
        model = self.model
        qkv = self._gemm(tokens, model.qkv_width / self.tensor, model.hidden_size)
        output = self._gemm(tokens, model.hidden_size, model.query_width / self.tensor)
        dense_layers = model.num_layers - model.num_expert_layers
        seconds = model.num_layers * (qkv + output)
        seconds = seconds + dense_layers * self._feed_forward(tokens, model.intermediate_size)
        if model.num_expert_layers:
            shared = 0.0
            if model.shared_intermediate_size:
                shared = self._feed_forward(tokens, model.shared_intermediate_size)
            router = self._gemm_16(tokens, model.num_experts)
            seconds = seconds + model.num_expert_layers * (router + shared)
        return seconds

    def _feed_forward(self, tokens: np.ndarray, width: int) -> np.ndarray:
        hidden, local_width = self.model.hidden_size, width / self.tensor
        return self._gemm(tokens, 2 * local_width, hidden) + self._gemm(tokens, hidden, local_width)

    def _experts(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the experts' seconds; they see the tokens of all attention groups."""
        model, split = self.model, self.deployment.parallelism
        if not model.num_expert_layers:
            return np.zeros_like(tokens)
        experts_here = model.num_experts / split.expert
        width = model.expert_intermediate_size / split.expert_slices
        share = model.num_experts_per_token / model.num_experts
        weight_bytes = self.deployment.precision.weight_bytes
        all_tokens = tokens * split.attention_groups
        return model.num_expert_layers * op.expert_products(
            self.kernels.experts, all_tokens, experts_here, share, model.hidden_size, width, weight_bytes
        )

    def _rest(self, tokens: np.ndarray) -> np.ndarray:
        model, width = self.model, self.model.intermediate_size
        if model.num_expert_layers:
            width = model.expert_intermediate_size * model.num_experts_per_token
        return model.num_layers * self._layer_rest(tokens, width)

    def _layer_rest(self, tokens: np.ndarray, width: int) -> np.ndarray:
        qkv_width = self.model.qkv_width / self.tensor
        return op.layer_rest(
            self.kernels.other, tokens, self.model.hidden_size, qkv_width, width / self.tensor
        )

    def _collectives(self, tokens: np.ndarray) -> np.ndarray:
        """Returns two sums a layer under tensor parallelism.

        Experts beyond an attention group's devices need two exchanges instead of the second sum.
        """
        model, split, links = self.model, self.deployment.parallelism, self.deployment.hardware.links
        message = tokens * model.hidden_size * 2.0
        exchanging = model.num_expert_layers if split.attention_groups > 1 else 0
        seconds = (2 * model.num_layers - exchanging) * op.all_reduce(links, split.tensor, message)
        if exchanging:
            sent = message * model.num_experts_per_token / split.tensor
            seconds = seconds + exchanging * 2 * op.all_to_all(links, split.expert, sent)
        return seconds

    def _draft(self, rows: np.ndarray, draft_tokens: int) -> np.ndarray:
        """Returns the drafter's passes, one after another: its layers, its head, one sample each."""
        drafter = self.drafter
        if not draft_tokens:
            return np.zeros_like(rows)
        if self.draft_model is not None:
            return draft_tokens * self.draft_model.breakdown(rows, 0).total + drafter.fixed_seconds
        if not drafter.layers:
            return np.full_like(rows, drafter.fixed_seconds)
        vocab = drafter.vocab_size / self.tensor
        head = self._gemm_16(rows, vocab) + op.sampler(self.kernels.other, rows, vocab)
        return draft_tokens * (drafter.layers * self._eagle_layer(rows) + head) + drafter.fixed_seconds

    def _eagle_layer(self, rows: np.ndarray) -> np.ndarray:
        """Returns the seconds of a layer that takes embedding and hidden state side by side."""
        model, tensor = self.model, self.tensor
        hidden, width = model.hidden_size, self.drafter.intermediate_size
        layer = self._gemm_16(rows, model.qkv_width / tensor, 2 * hidden)
        layer = layer + self._gemm_16(rows, hidden, model.query_width / tensor)
        layer = layer + self._gemm_16(rows, 2 * width / tensor)
        layer = layer + self._gemm_16(rows, hidden, width / tensor)
        layer = layer + op.decode_attention_fixed(self.kernels.attention, rows, 1)
        layer = layer + self._layer_rest(rows, width)
        return layer + 2 * op.all_reduce(self.deployment.hardware.links, tensor, rows * hidden * 2.0)
