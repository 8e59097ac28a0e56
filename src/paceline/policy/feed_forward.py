"""The feed-forward of a layer: SwiGLU, or a mixture of experts.

Shape letters as in `decoder.py`: T tokens, E hidden size, F inner size; X experts, K experts per token,
S = T x K.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from paceline.kernels.moe_routing import route
from paceline.kernels.swiglu_training import silu_multiply_forward
from paceline.kernels.training_launch import takes_kernels
from paceline.policy.config import DecoderConfig
from paceline.policy.fused import fused_silu_multiply, made_again, with_value
from paceline.policy.products import Product, Projection
from paceline.policy.replay import RouterReplay
from paceline.policy.wide_linear import wide_linear


class FeedForward(nn.Module):
    """SwiGLU with one fused gate and up projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = Projection(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Projection(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TE: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        return _swiglu(self.gate_up(x_TE), self.down, recompute)


def _swiglu(
    gate_up_T2F: torch.Tensor, down: Callable[[torch.Tensor], torch.Tensor], recompute: bool
) -> torch.Tensor:
    if takes_kernels(gate_up_T2F):
        inner_TF = fused_silu_multiply(gate_up_T2F)
        kept_T2F = gate_up_T2F.detach()
        with made_again((inner_TF,), lambda: (silu_multiply_forward(kept_T2F),), recompute):
            return down(inner_TF)
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return down(F.silu(gate) * up)


class ExpertFeedForward(nn.Module):
    """A mixture of experts: a router sends each token to K of X feed-forwards and adds up what they return.

        tokens            a     b     c            rows sorted by expert   [ b0 | a1 c0 | a0 b1 c1 ]
        chosen experts    3 1   0 3   1 3          experts                   0    1       3

    Each expert multiplies its run of rows. Scores stay in float32: rounded to bf16 they would tie, and a tie
    decides which expert runs. The chosen weights are rounded to the model's type, as transformers does.
    """

    # Whether rollouts multiply by the experts in FP8.
    in_fp8: bool = False
    # What multiplies instead of the policy's own type, for the value; None: nothing does.
    product: Product | None = None

    def __init__(self, config: DecoderConfig, place: int) -> None:
        super().__init__()
        # The index among the layers with experts.
        self.place = place
        experts = config.num_experts
        size = config.hidden_size
        inner = config.expert_intermediate_size
        self.experts_per_token = config.num_experts_per_token
        self.normalise = config.normalise_expert_weights
        self.router = nn.Linear(size, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, size))
        self.down = nn.Parameter(torch.empty(experts, size, inner))

    def forward(
        self, x_TE: torch.Tensor, replay: RouterReplay | None = None, recompute: bool = False
    ) -> torch.Tensor:
        if self.product is not None:
            return self.multiplied(x_TE, self.product, replay)
        weights_TK, experts_TK = self.route(x_TE, replay)
        return self._run(x_TE, weights_TK, experts_TK, recompute)

    def multiplied(
        self, x_TE: torch.Tensor, product: Product, replay: RouterReplay | None = None
    ) -> torch.Tensor:
        """Returns what the rollout computes with `product`; the gradient is that of the policy's own type."""
        if x_TE.is_meta:
            return self._run(x_TE, *self.route(x_TE, replay), recompute=False)
        with torch.no_grad():
            weights_TK, experts_TK = route(x_TE, self.router.weight, self.experts_per_token, self.normalise)
            if replay is not None:
                weights_TK, experts_TK = self._replayed(x_TE, weights_TK, experts_TK, replay)
            value_TE = product.experts(x_TE, weights_TK, experts_TK, self.gate_up, self.down)
        chosen_TK = experts_TK.long()
        scores_TX = wide_linear(x_TE, self.router.weight)
        own_TE = self._run(x_TE, self._weights(scores_TX, chosen_TK, x_TE.dtype), chosen_TK, recompute=False)
        return with_value(own_TE, value_TE)

    def _replayed(
        self, x_TE: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor, replay: RouterReplay
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the recorded experts and weights; the given weights where the router chose the same."""
        chosen_TK = replay.choose(self.place, experts_TK.long())
        same_T1 = (chosen_TK == experts_TK).all(-1, keepdim=True)
        scores_TX = wide_linear(x_TE, self.router.weight)
        other_TK = self._weights(scores_TX, chosen_TK, x_TE.dtype)
        return torch.where(same_T1, weights_TK, other_TK), chosen_TK.to(experts_TK.dtype)

    def _run(
        self, x_TE: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor, recompute: bool
    ) -> torch.Tensor:
        sorted_S, order_S = experts_TK.flatten().sort(stable=True)
        every_expert_X = torch.arange(self.router.out_features, device=x_TE.device)
        ends_X = torch.searchsorted(sorted_S, every_expert_X, right=True, out_int32=True)
        gate_up_S2F = _multiply_runs(x_TE[order_S // self.experts_per_token], self.gate_up, ends_X)
        out_SE = _swiglu(gate_up_S2F, lambda inner_SF: _multiply_runs(inner_SF, self.down, ends_X), recompute)
        out_TKE = out_SE[order_S.argsort()].unflatten(0, weights_TK.shape)
        return torch.bmm(weights_TK.unsqueeze(1), out_TKE).squeeze(1)

    def route(
        self, x_TE: torch.Tensor, replay: RouterReplay | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights and numbers of each token's experts, `[T, K]`.

        With `replay` the experts are the recorded ones; their weights are this router's own scores either
        way, and gradients flow through them.
        """
        scores_TX = wide_linear(x_TE, self.router.weight)
        experts_TK = scores_TX.topk(self.experts_per_token).indices
        if replay is not None:
            experts_TK = replay.choose(self.place, experts_TK)
        return self._weights(scores_TX, experts_TK, x_TE.dtype), experts_TK

    def _weights(self, scores_TX: torch.Tensor, experts_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weights_TK = scores_TX.softmax(-1).gather(-1, experts_TK)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK.to(dtype)


def _multiply_runs(rows_SK: torch.Tensor, weight_XNK: torch.Tensor, ends_X: torch.Tensor) -> torch.Tensor:
    """Rows up to `ends_X[0]` times expert 0's matrix, up to `ends_X[1]` times expert 1's, and so on."""
    if (rows_SK.is_cuda or rows_SK.is_meta) and rows_SK.dtype == torch.bfloat16:
        return F.grouped_mm(rows_SK, weight_XNK.transpose(1, 2), offs=ends_X)
    if rows_SK.is_meta:
        lengths = _even_runs(len(rows_SK), len(ends_X))
    else:
        lengths = ends_X.diff(prepend=ends_X.new_zeros(1)).tolist()
    runs = zip(rows_SK.split(lengths), weight_XNK.unbind(), strict=True)
    return torch.cat([F.linear(run, weight_NK) for run, weight_NK in runs])


def _even_runs(rows: int, experts: int) -> list[int]:
    """The lengths of runs where there is no data to say which expert gets how many rows."""
    return [rows // experts + (i < rows % experts) for i in range(experts)]
