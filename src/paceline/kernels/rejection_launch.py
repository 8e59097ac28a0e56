"""Launches the kernels of `rejection_kernel.py`: four to verify, two to keep what a drafter draws from."""

import torch

from paceline.kernels.rejection_kernel import (
    accept_kernel,
    distribution_kernel,
    draw_kernel,
    mass_kernel,
    settle_kernel,
)
from paceline.kernels.sampler import CHUNK
from paceline.kernels.triton_support import cdiv, launch_options, next_power_of_2


def verify_by_rejection_triton(
    logits_RQV: torch.Tensor,
    temperature_RQ: torch.Tensor,
    seed_RQ: torch.Tensor,
    position_RQ: torch.Tensor,
    proposals_RK: torch.Tensor,
    probabilities_SKV: torch.Tensor | None,
    slots_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches `verify_by_rejection`'s kernels, for rows without truncation.

    Behind the first token that differs from its proposal stand proposals and a 0.
    """
    num_rows, num_queries, vocab_size = logits_RQV.shape
    num_proposals, num_chunks = num_queries - 1, cdiv(vocab_size, CHUNK)
    block, block_k = next_power_of_2(num_chunks), next_power_of_2(num_proposals)
    facts = [x.contiguous() for x in (logits_RQV, temperature_RQ, seed_RQ, position_RQ, proposals_RK)]
    logits, temperature, _, _, _ = facts
    known, draft_stride = _by_slot(probabilities_SKV)
    drafts = *facts, known, slots_R
    masses = _launch_mass(logits, temperature, num_rows * num_proposals, num_proposals, num_queries)
    shape = vocab_size, num_chunks, num_proposals, num_queries
    new = dict(device=logits.device)
    row_max, row_sum = torch.empty(2, num_rows, num_proposals, dtype=torch.float32, **new)
    accepted = torch.empty(num_rows, num_proposals, dtype=torch.int32, **new)
    tokens_RQ = torch.empty(num_rows, num_queries, dtype=torch.int64, **new)
    logprobs_RQ = torch.empty(num_rows, num_queries, dtype=torch.float32, **new)
    accept_kernel[(num_rows, num_proposals)](
        *drafts,
        *masses,
        row_max,
        row_sum,
        accepted,
        tokens_RQ,
        logprobs_RQ,
        *shape,
        draft_stride,
        KNOWN=known is not None,
        BLOCK=block,
        **launch_options(num_warps=1),
    )
    score, value, maximum, total = torch.empty(4, num_rows, num_chunks, dtype=torch.float32, **new)
    left, best = torch.empty(2, num_rows, num_chunks, dtype=torch.int32, **new)
    drawn = left, score, best, value, maximum, total
    draw_kernel[(num_rows, num_chunks)](
        *drafts,
        row_max,
        row_sum,
        accepted,
        *drawn,
        *shape,
        draft_stride,
        KNOWN=known is not None,
        CHUNK=CHUNK,
        BLOCK_K=block_k,
        **launch_options(num_warps=8),
    )
    settle_kernel[(num_rows,)](
        accepted,
        *drawn,
        tokens_RQ,
        logprobs_RQ,
        *shape,
        BLOCK=block,
        BLOCK_K=block_k,
        **launch_options(num_warps=1),
    )
    return tokens_RQ, logprobs_RQ


def keep_distribution_triton(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    probabilities_SKV: torch.Tensor,
    slots_R: torch.Tensor,
    column: int,
) -> None:
    """Launches `keep_distribution`'s kernels, for rows without truncation."""
    num_rows, vocab_size = logits_RV.shape
    num_chunks = cdiv(vocab_size, CHUNK)
    out, slot_stride = _by_slot(probabilities_SKV[:, column:])
    logits, temperature = logits_RV.contiguous(), temperature_R.contiguous()
    masses = _launch_mass(logits, temperature, num_rows, 1, 1)
    distribution_kernel[(num_rows, num_chunks)](
        logits,
        temperature,
        slots_R,
        *masses,
        out,
        vocab_size,
        num_chunks,
        slot_stride,
        CHUNK=CHUNK,
        BLOCK=next_power_of_2(num_chunks),
        **launch_options(num_warps=8),
    )


def _by_slot(probabilities_SKV: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """Returns the probabilities and how far apart those of two slots lie."""
    if probabilities_SKV is None:
        return None, 0
    stride, per_proposal, per_token = probabilities_SKV.stride()
    assert (per_proposal, per_token) == (probabilities_SKV.shape[2], 1), "a slot's probabilities lie together"
    return probabilities_SKV, stride


def _launch_mass(
    logits: torch.Tensor, temperature: torch.Tensor, count: int, num_proposals: int, num_queries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns maximum, exp sum and most likely token of every chunk of `count` proposals' logits."""
    vocab_size = logits.shape[-1]
    num_chunks = cdiv(vocab_size, CHUNK)
    maximum, total = torch.empty(2, count, num_chunks, dtype=torch.float32, device=logits.device)
    best = torch.empty(count, num_chunks, dtype=torch.int32, device=logits.device)
    mass_kernel[(count, num_chunks)](
        logits,
        temperature,
        maximum,
        total,
        best,
        vocab_size,
        num_chunks,
        num_proposals,
        num_queries,
        CHUNK=CHUNK,
        **launch_options(num_warps=8),
    )
    return maximum, total, best
