"""Logprobs and entropies from hidden states, with products as large as a GPU likes them.

Logits exist for a chunk of rows at a time. What the backward pass needs of them, softmax minus one-hot in the
policy's type (kernels/logprob_rows.py), is

    the head is trained      kept for all rows, or computed again chunk by chunk where memory is short
    the head is frozen       multiplied by the head at once: the gradient's direction, a hidden state wide

so that the backward pass has two products, or none. With exact numerics (exact.py) logits come from the
rollout's product and logprobs from its sampler; the gradient is taken at these logits all the same.
"""

from collections.abc import Iterator

import torch

from paceline.kernels.linear import linear
from paceline.kernels.logprob_rows import logprob_rows
from paceline.kernels.sampler import target_logprobs
from paceline.learning.batch import MicroBatch

# Logits per chunk: 512 MiB in float32.
CHUNK_ELEMENTS = 1 << 27
# Chunks are so many rows or a multiple of it, where they can be.
ROW_MULTIPLE = 128


def head_logprobs(
    hidden_TE: torch.Tensor, weight_VE: torch.Tensor, batch: MicroBatch, recompute: bool, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `logprobs_R` of the batch's targets and `entropies_R`, which have no gradient.

    With `recompute` the backward pass computes logits again; with `exact` logprobs have the rollout's bits.
    """
    predictors_R, targets_R = batch.predictors_R, batch.targets_R
    temperatures_R = batch.temperatures_R.to(torch.promote_types(hidden_TE.dtype, torch.float32))
    return _HeadLogprobs.apply(
        hidden_TE, weight_VE, predictors_R, targets_R, temperatures_R, recompute, exact
    )


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TE, weight_VE, predictors_R, targets_R, temperatures_R, recompute, exact):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        rows, vocabulary = len(predictors_R), len(weight_VE)
        keep = needs_weight and not recompute
        difference_RV = hidden_TE.new_empty(rows, vocabulary) if keep else None
        direction_RE = None
        if needs_hidden and not needs_weight:
            direction_RE = hidden_TE.new_empty(rows, hidden_TE.shape[1])
        logprobs, entropies = [], []
        for part in chunks(rows, vocabulary):
            logits_CV = _logits(hidden_TE[predictors_R[part]], weight_VE, exact)
            into_CV = None
            if keep:
                into_CV = difference_RV[part]
            elif direction_RE is not None:
                into_CV = hidden_TE.new_empty(logits_CV.shape)
            logprobs_C, entropies_C = logprob_rows(logits_CV, targets_R[part], temperatures_R[part], into_CV)
            if direction_RE is not None:
                torch.mm(into_CV, weight_VE, out=direction_RE[part])
            if exact:
                logprobs_C = target_logprobs(logits_CV, temperatures_R[part], targets_R[part])
            logprobs.append(logprobs_C)
            entropies.append(entropies_C)
        ctx.exact = exact
        ctx.save_for_backward(
            hidden_TE, weight_VE, predictors_R, targets_R, temperatures_R, difference_RV, direction_RE
        )
        logprobs_R, entropies_R = torch.cat(logprobs), torch.cat(entropies)
        ctx.mark_non_differentiable(entropies_R)
        return logprobs_R, entropies_R

    @staticmethod
    def backward(ctx, d_logprobs_R, _):
        hidden_TE, weight_VE, predictors_R, targets_R, temperatures_R, difference_RV, direction_RE = (
            ctx.saved_tensors
        )
        factors_R1 = -(d_logprobs_R / temperatures_R)[:, None]
        d_hidden_TE = torch.zeros_like(hidden_TE)
        if direction_RE is not None:
            d_hidden_TE.index_copy_(0, predictors_R, (factors_R1 * direction_RE).to(hidden_TE.dtype))
            return d_hidden_TE, *(None,) * 6
        if difference_RV is not None:
            rows_RE = (factors_R1 * hidden_TE[predictors_R]).to(hidden_TE.dtype)
            d_weight_VE = torch.mm(difference_RV.t(), rows_RE)
            _add_hidden(d_hidden_TE, difference_RV, weight_VE, factors_R1, predictors_R)
            return d_hidden_TE, d_weight_VE, *(None,) * 5
        d_weight_VE = torch.zeros_like(weight_VE, dtype=factors_R1.dtype)
        for part in chunks(len(predictors_R), len(weight_VE)):
            rows_CE = hidden_TE[predictors_R[part]]
            logits_CV = _logits(rows_CE, weight_VE, ctx.exact)
            difference_CV = hidden_TE.new_empty(logits_CV.shape)
            logprob_rows(logits_CV, targets_R[part], temperatures_R[part], difference_CV)
            del logits_CV
            scaled_CE = (factors_R1[part] * rows_CE).to(hidden_TE.dtype)
            d_weight_VE += scores(difference_CV.t(), scaled_CE.t())
            _add_hidden(d_hidden_TE, difference_CV, weight_VE, factors_R1[part], predictors_R[part])
        return d_hidden_TE, d_weight_VE.to(weight_VE.dtype), *(None,) * 5


def _add_hidden(
    d_hidden_TE: torch.Tensor,
    difference_RV: torch.Tensor,
    weight_VE: torch.Tensor,
    factors_R1: torch.Tensor,
    predictors_R: torch.Tensor,
) -> None:
    d_rows_RE = factors_R1 * scores(difference_RV, weight_VE.t())
    d_hidden_TE.index_copy_(0, predictors_R, d_rows_RE.to(d_hidden_TE.dtype))


def _logits(x_RE: torch.Tensor, weight_VE: torch.Tensor, exact: bool) -> torch.Tensor:
    if not exact:
        return scores(x_RE, weight_VE)
    wide = torch.promote_types(x_RE.dtype, torch.float32)
    return linear(x_RE.contiguous(), weight_VE, out_dtype=wide, deterministic=True)


def scores(x_RE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
    """Returns x times weight transposed in float32 (float64 for float64)."""
    if x_RE.dtype in (torch.float32, torch.float64):
        return x_RE @ weight_VE.t()
    if x_RE.is_cuda or x_RE.is_meta:
        return torch.mm(x_RE, weight_VE.t(), out_dtype=torch.float32)
    return x_RE.float() @ weight_VE.float().t()


def chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    """Yields consecutive parts of the rows, each with at most CHUNK_ELEMENTS logits."""
    most = max(1, CHUNK_ELEMENTS // vocabulary)
    size = most // ROW_MULTIPLE * ROW_MULTIPLE or most
    for start in range(0, rows, size):
        yield slice(start, start + size)
