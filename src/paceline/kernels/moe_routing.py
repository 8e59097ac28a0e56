"""Routing of a mixture of experts: which K of the X experts run a token, and with which weights.

A token's choice must not depend on the other tokens: scores are one product per row (linear.py), and sums
over a token's choices are taken in order. Shape letters: M tokens, X experts, K choices per token, E hidden.
"""

import torch

from paceline.kernels.linear import linear, linear_reference
from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous


def route_reference(
    scores_MX: torch.Tensor, num_choices: int, normalise: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights (softmax) and numbers of the experts with the highest scores, `[M, K]`, best first.

    Of equal scores the lowest number comes first.
    """
    experts_MK = scores_MX.sort(dim=-1, descending=True, stable=True).indices[:, :num_choices]
    weights_MK = scores_MX.softmax(-1).gather(-1, experts_MK)
    if normalise:
        weights_MK = weights_MK / add_in_order(weights_MK.unbind(1)).unsqueeze(1)
    return weights_MK.to(dtype), experts_MK


def add_in_order(terms: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns the sum from left to right; `Tensor.sum` may take another order for another number of rows."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@triton.jit
def _route_kernel(
    scores_ptr,
    out,
    X,
    CHOICES: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token."""
    launch_next(PDL)
    weights_ptr, experts_ptr = out
    row = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    wait_previous(PDL)
    scores = tl.load(scores_ptr + row * X + expert, mask=expert < X, other=float("-inf"))
    highest = tl.max(scores, axis=0)
    mass = tl.sum(tl.exp(scores - highest), axis=0)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    experts = tl.zeros((BLOCK_K,), tl.int32)
    for k in tl.static_range(CHOICES):
        best = tl.max(scores, axis=0)
        # X - 1: a row of NaN must not point outside.
        which = tl.min(tl.where(scores == best, expert, X - 1), axis=0)
        weights = tl.where(choice == k, tl.exp(best - highest) / mass, weights)
        experts = tl.where(choice == k, which, experts)
        scores = tl.where(expert == which, float("-inf"), scores)
    if NORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    offset = row * CHOICES + choice
    tl.store(weights_ptr + offset, weights.to(weights_ptr.dtype.element_ty), mask=choice < CHOICES)
    tl.store(experts_ptr + offset, experts, mask=choice < CHOICES)


def route_triton(scores_MX, num_choices, normalise, dtype):
    num_rows, num_experts = scores_MX.shape
    weights_MK = torch.empty(num_rows, num_choices, dtype=dtype, device=scores_MX.device)
    experts_MK = torch.empty(num_rows, num_choices, dtype=torch.int32, device=scores_MX.device)
    blocks = dict(BLOCK_X=next_power_of_2(num_experts), BLOCK_K=next_power_of_2(num_choices))
    _route_kernel[(num_rows,)](
        scores_MX,
        (weights_MK, experts_MK),
        num_experts,
        CHOICES=num_choices,
        NORMALISE=normalise,
        **blocks,
        **launch_options(num_warps=1),
    )
    return weights_MK, experts_MK


def _score_and_route(x_ME, router_XE, num_choices, normalise):
    scores_MX = linear(x_ME, router_XE, out_dtype=torch.float32, deterministic=True)
    return route_triton(scores_MX, num_choices, normalise, x_ME.dtype)


@reference_of(_score_and_route)
def route(
    x_ME: torch.Tensor, router_XE: torch.Tensor, num_choices: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights in x's type and the numbers of each token's experts, `[M, K]`, best first."""
    wide = torch.float64 if x_ME.dtype == torch.float64 else torch.float32
    scores_MX = linear_reference(x_ME.to(wide), router_XE.to(wide))
    return route_reference(scores_MX, num_choices, normalise, x_ME.dtype)
