"""What an eagle head does besides its layer, in one launch each.

eagle_inputs   token ──▶ embedding ──▶ norm ─┐
               state ────────────────▶ norm ─┴▶ [ T, 2E ]
keep_last      of the features of a step's tokens, those of each row's last kept sample go to the row's slot,
               where its next draft starts
"""

import torch
import torch.nn.functional as F

from paceline.kernels.norm import rms_norm_block, rms_norm_reference
from paceline.kernels.triton_support import (
    launch_next,
    launch_options,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)


def eagle_inputs_reference(
    tokens_T: torch.Tensor,
    embedding_VE: torch.Tensor,
    states_TE: torch.Tensor,
    token_norm_E: torch.Tensor,
    state_norm_E: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The reference of `eagle_inputs`."""
    embedded_TE = F.embedding(tokens_T, embedding_VE)
    return torch.cat(
        (
            rms_norm_reference(embedded_TE, token_norm_E, eps),
            rms_norm_reference(states_TE, state_norm_E, eps),
        ),
        dim=-1,
    )


def keep_last_reference(
    features_TE: torch.Tensor,
    slots_R: torch.Tensor,
    context_R: torch.Tensor,
    length_S: torch.Tensor,
    features_SE: torch.Tensor,
    way_RQ: torch.Tensor | None = None,
) -> None:
    """The reference of `keep_last`."""
    if way_RQ is None:
        way_RQ = torch.arange(len(features_TE), device=slots_R.device).view(len(slots_R), -1)
    # Rows that are not active keep none, and whatever is written for them is not read.
    kept_R = length_S[slots_R] - context_R - 1
    last_R1 = (kept_R - 1).clamp(0, way_RQ.shape[1] - 1).unsqueeze(1)
    features_SE[slots_R] = features_TE[way_RQ.gather(1, last_R1).squeeze(1)]


@triton.jit
def _inputs_kernel(
    tokens_ptr,
    embedding_ptr,
    states_ptr,
    token_norm_ptr,
    state_norm_ptr,
    out_ptr,
    epsilon,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, half): half 0 norms the token's embedding, half 1 the state."""
    launch_next(PDL)
    row, is_state = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    column = tl.arange(0, BLOCK_E)
    mask = column < E
    if is_state:
        weight = tl.load(state_norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        wait_previous(PDL)
        x = tl.load(states_ptr + row * E + column, mask=mask, other=0.0).to(tl.float32)
    else:
        weight = tl.load(token_norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        wait_previous(PDL)
        x = tl.load(embedding_ptr + tl.load(tokens_ptr + row) * E + column, mask=mask, other=0.0).to(
            tl.float32
        )
    normed = rms_norm_block(x, weight, epsilon, E)
    tl.store(
        out_ptr + row * 2 * E + tl.program_id(1) * E + column, normed.to(out_ptr.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=["queries"])
def _keep_last_kernel(
    features_ptr,
    slots_ptr,
    context_ptr,
    length_ptr,
    way_ptr,
    out_ptr,
    queries,
    HAS_WAY: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    kept = tl.load(length_ptr + slot) - tl.load(context_ptr + row) - 1
    last = row * queries + tl.minimum(tl.maximum(kept - 1, 0), queries - 1)
    if HAS_WAY:
        last = tl.load(way_ptr + last)
    column = tl.arange(0, BLOCK_E)
    mask = column < E
    tl.store(out_ptr + slot * E + column, tl.load(features_ptr + last * E + column, mask=mask), mask=mask)


def eagle_inputs_triton(
    tokens_T: torch.Tensor,
    embedding_VE: torch.Tensor,
    states_TE: torch.Tensor,
    token_norm_E: torch.Tensor,
    state_norm_E: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Launches `eagle_inputs`'s kernel."""
    num_tokens, width = states_TE.shape
    out_T2 = torch.empty(num_tokens, 2 * width, dtype=states_TE.dtype, device=states_TE.device)
    block = next_power_of_2(width)
    _inputs_kernel[(num_tokens, 2)](
        tokens_T,
        embedding_VE,
        states_TE,
        token_norm_E,
        state_norm_E,
        out_T2,
        eps,
        E=width,
        BLOCK_E=block,
        **launch_options(num_warps=min(8, max(1, block // 512))),
    )
    return out_T2


def keep_last_triton(
    features_TE: torch.Tensor,
    slots_R: torch.Tensor,
    context_R: torch.Tensor,
    length_S: torch.Tensor,
    features_SE: torch.Tensor,
    way_RQ: torch.Tensor | None = None,
) -> None:
    """Launches `keep_last`'s kernel."""
    width = features_TE.shape[1]
    _keep_last_kernel[(len(slots_R),)](
        features_TE,
        slots_R,
        context_R,
        length_S,
        way_RQ,
        features_SE,
        len(features_TE) // len(slots_R) if way_RQ is None else way_RQ.shape[1],
        HAS_WAY=way_RQ is not None,
        E=width,
        BLOCK_E=next_power_of_2(width),
        **launch_options(num_warps=4),
    )


def eagle_inputs(
    tokens_T: torch.Tensor,
    embedding_VE: torch.Tensor,
    states_TE: torch.Tensor,
    token_norm_E: torch.Tensor,
    state_norm_E: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns [ norm(embedding of the token), norm(state) ], `[T, 2E]`."""
    run = eagle_inputs_triton if states_TE.is_cuda else eagle_inputs_reference
    return run(tokens_T, embedding_VE, states_TE, token_norm_E, state_norm_E, eps)


def keep_last(
    features_TE: torch.Tensor,
    slots_R: torch.Tensor,
    context_R: torch.Tensor,
    length_S: torch.Tensor,
    features_SE: torch.Tensor,
    way_RQ: torch.Tensor | None = None,
) -> None:
    """Writes the features of each row's last kept sample to the row's slot of `features_SE`, after a step.

    `context_R` is where each row's queries began, `length_S` how long the rows have become; `way_RQ` says
    where among the T tokens a row's are, in the order of its text. None: row after row, as many of each.
    """
    run = keep_last_triton if features_TE.is_cuda else keep_last_reference
    run(features_TE, slots_R, context_R, length_S, features_SE, way_RQ)
