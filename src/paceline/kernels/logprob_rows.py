"""Logprob and entropy of rows of logits, and what the head's gradient is made of, in two passes over a row.

    p = softmax(logits / T)      logprob = log p[target]      entropy = -sum p log p
    difference = p - onehot(target)

The gradient of a logprob with respect to its logits is -difference / T. So with c = -gradient / T of each row

    d_hidden = c (difference W)          d_W = difference^T (c hidden)

and nothing of the vocabulary's width is computed again, or even scaled, in the backward pass. The difference
is in the 16-bit type that the two products take.
"""

import torch

from paceline.kernels.operation import on_gpu_or_meta, reference_of
from paceline.kernels.training_launch import plain_options
from paceline.kernels.triton_support import tl, triton

# Logits that a program holds at a time.
BLOCK = 4096
# Below every score, and finite: a lane may see no column at all.
FLOOR = tl.constexpr(-1e30)


@triton.jit
def _logprob_rows_kernel(given, out, difference_ptr, width, BLOCK: tl.constexpr):
    """One program per row: the normaliser and the mean score by rescaled sums, then the difference."""
    logits_ptr, targets_ptr, temperatures_ptr = given
    logprobs_ptr, entropies_ptr = out
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    target = tl.load(targets_ptr + row)
    logits_ptr += row * width
    column = tl.arange(0, BLOCK)
    # Every lane keeps sums of its own columns and rescales them itself: programs wait for each other once.
    largest = tl.full((BLOCK,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        scaled = tl.load(logits_ptr + start + column, mask=mask, other=-float("inf")) / temperature
        larger = tl.maximum(largest, scaled)
        shrink = tl.exp(largest - larger)
        share = tl.exp(scaled - larger)
        # The sum of exp(s - m) (s - m) follows the maximum m: nothing large cancels in the entropy.
        weighted = (weighted + total * (largest - larger)) * shrink + share * tl.where(
            mask, scaled - larger, 0.0
        )
        total = total * shrink + share
        largest = larger
    maximum = tl.max(largest, axis=0)
    shrink = tl.exp(largest - maximum)
    weighted = (weighted + total * (largest - maximum)) * shrink
    row_total = tl.sum(total * shrink, axis=0)
    normaliser = maximum + tl.log(row_total)
    chosen = tl.load(logits_ptr + target) / temperature
    tl.store(logprobs_ptr + row, chosen - normaliser)
    tl.store(entropies_ptr + row, tl.log(row_total) - tl.sum(weighted, axis=0) / row_total)
    if difference_ptr is not None:
        difference_ptr += row * width
        for start in range(0, width, BLOCK):
            mask = start + column < width
            scaled = tl.load(logits_ptr + start + column, mask=mask, other=0.0) / temperature
            difference = tl.exp(scaled - normaliser) - tl.where(start + column == target, 1.0, 0.0)
            tl.store(
                difference_ptr + start + column, difference.to(difference_ptr.dtype.element_ty), mask=mask
            )


def logprob_rows_triton(logits_RV, targets_R, temperatures_R, difference_RV=None):
    rows, width = logits_RV.shape
    out = logits_RV.new_empty(rows), logits_RV.new_empty(rows)
    if rows and not logits_RV.is_meta:
        given = logits_RV, targets_R, temperatures_R
        _logprob_rows_kernel[(rows,)](
            given, out, difference_RV, width, BLOCK=BLOCK, **plain_options(num_warps=8)
        )
    return out


@reference_of(logprob_rows_triton, on_gpu_or_meta)
def logprob_rows(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    difference_RV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logprobs and entropies of float32 logits at each row's temperature.

    Where `difference_RV` is given, softmax minus the one-hot target is written to it.
    """
    scaled_RV = logits_RV / temperatures_R[:, None]
    normaliser_R = scaled_RV.logsumexp(-1)
    all_logprobs_RV = scaled_RV - normaliser_R[:, None]
    probabilities_RV = all_logprobs_RV.exp()
    entropies_R = -(probabilities_RV * all_logprobs_RV).sum(-1)
    logprobs_R = all_logprobs_RV.gather(1, targets_R[:, None]).squeeze(1)
    if difference_RV is not None:
        ones_R1 = torch.ones_like(targets_R, dtype=scaled_RV.dtype)[:, None]
        difference_RV.copy_(probabilities_RV.scatter_add(1, targets_R[:, None], -ones_R1))
    return logprobs_R, entropies_R
