"""What an eagle head does besides its layer, in one launch each.

eagle_inputs   token ──▶ embedding ──▶ norm ─┐
               state ────────────────▶ norm ─┴▶ [ T, 2E ], plain or quantised
keep_last      of the features of a step's tokens, those of each row's last kept sample go to the row's slot,
               where its next draft starts
"""

import torch
import torch.nn.functional as F

from paceline.kernels.fp8_format import GROUP, QuantisedRows, quantise_groups
from paceline.kernels.fp8_quantise import quantise_rows, store_groups
from paceline.kernels.norm import rms_norm_block, rms_norm_reference
from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous


@triton.jit(do_not_specialize=["padded_rows"])
def _inputs_kernel(
    given, norms, out, padded_rows, epsilon, E: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    """Program (row, half): half 0 norms the token's embedding, half 1 the state.

    Out are the plain rows or, if those are None, exactly the same quantised; E is then a multiple of 128.
    """
    launch_next(PDL)
    tokens_ptr, embedding_ptr, states_ptr = given
    token_norm_ptr, state_norm_ptr = norms
    out_ptr, values_ptr, scales_ptr = out
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
    if out_ptr is None:
        rounded = normed.to(states_ptr.dtype.element_ty).to(tl.float32)
        values, scales = quantise_groups(tl.reshape(rounded, (BLOCK_E // 128, 128)))
        half_group = tl.arange(0, BLOCK_E // 128)
        # Groups past the half's end are none of the row.
        group = tl.where(half_group < E // 128, tl.program_id(1) * (E // 128) + half_group, 2 * E // 128)
        group_column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        store_groups(values, scales, values_ptr, scales_ptr, row, group, group_column, padded_rows, 2 * E)
    else:
        at = row * 2 * E + tl.program_id(1) * E + column
        tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["queries"])
def _keep_last_kernel(
    features_ptr, rows, way_ptr, out_ptr, queries, E: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    slots_ptr, context_ptr, length_ptr = rows
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    kept = tl.load(length_ptr + slot) - tl.load(context_ptr + row) - 1
    last = row * queries + tl.minimum(tl.maximum(kept - 1, 0), queries - 1)
    if way_ptr is not None:
        last = tl.load(way_ptr + last)
    column = tl.arange(0, BLOCK_E)
    mask = column < E
    tl.store(out_ptr + slot * E + column, tl.load(features_ptr + last * E + column, mask=mask), mask=mask)


def eagle_inputs_triton(tokens_T, embedding_VE, states_TE, token_norm_E, state_norm_E, eps, quantise=False):
    num_tokens, width = states_TE.shape
    dtype, device = states_TE.dtype, states_TE.device
    if quantise:
        result = QuantisedRows.empty(num_tokens, 2 * width, dtype, device)
        out, padded_rows = (None, result.values_MK, result.scales_GM), len(result.values_MK)
    else:
        result = torch.empty(num_tokens, 2 * width, dtype=dtype, device=device)
        out, padded_rows = (result, None, None), 0
    block = max(128, next_power_of_2(width))
    _inputs_kernel[(num_tokens, 2)](
        (tokens_T, embedding_VE, states_TE),
        (token_norm_E, state_norm_E),
        out,
        padded_rows,
        eps,
        E=width,
        BLOCK_E=block,
        **launch_options(num_warps=min(8, max(1, block // 512))),
    )
    return result


def keep_last_triton(features_TE, slots_R, context_R, length_S, features_SE, way_RQ=None):
    width = features_TE.shape[1]
    queries = len(features_TE) // len(slots_R) if way_RQ is None else way_RQ.shape[1]
    _keep_last_kernel[(len(slots_R),)](
        features_TE,
        (slots_R, context_R, length_S),
        way_RQ,
        features_SE,
        queries,
        E=width,
        BLOCK_E=next_power_of_2(width),
        **launch_options(num_warps=4),
    )


@reference_of(eagle_inputs_triton)
def eagle_inputs(
    tokens_T: torch.Tensor,
    embedding_VE: torch.Tensor,
    states_TE: torch.Tensor,
    token_norm_E: torch.Tensor,
    state_norm_E: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns [ norm(embedding of the token), norm(state) ], `[T, 2E]`."""
    embedded_TE = F.embedding(tokens_T, embedding_VE)
    return torch.cat(
        (
            rms_norm_reference(embedded_TE, token_norm_E, eps),
            rms_norm_reference(states_TE, state_norm_E, eps),
        ),
        dim=-1,
    )


def eagle_inputs_quantised(
    tokens_T: torch.Tensor,
    embedding_VE: torch.Tensor,
    states_TE: torch.Tensor,
    token_norm_E: torch.Tensor,
    state_norm_E: torch.Tensor,
    eps: float,
) -> QuantisedRows:
    """Returns what `eagle_inputs` does, as an FP8 product takes it."""
    inputs = tokens_T, embedding_VE, states_TE, token_norm_E, state_norm_E, eps
    if states_TE.is_cuda and states_TE.shape[1] % GROUP == 0:
        return eagle_inputs_triton(*inputs, quantise=True)
    return quantise_rows(eagle_inputs(*inputs))


@reference_of(keep_last_triton)
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
    if way_RQ is None:
        way_RQ = torch.arange(len(features_TE), device=slots_R.device).view(len(slots_R), -1)
    # Rows that are not active keep none, and whatever is written for them is not read.
    kept_R = length_S[slots_R] - context_R - 1
    last_R1 = (kept_R - 1).clamp(0, way_RQ.shape[1] - 1).unsqueeze(1)
    features_SE[slots_R] = features_TE[way_RQ.gather(1, last_R1).squeeze(1)]
