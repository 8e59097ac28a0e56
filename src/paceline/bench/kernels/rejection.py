"""Cases of verification: rejection by kernels and by torch, and shared noise over the same logits.

A drafter near the policy proposed, so most rows accept something and most end in a recovery. Keeping what a
drafter drew from belongs to rejection alone.
"""

from collections.abc import Iterator

import torch

from paceline.bench.kernels.case import KernelCase, relative_error
from paceline.bench.kernels.timing import copies_for
from paceline.bench.kernels.workload import Operands
from paceline.kernels.rejection import (
    keep_distribution,
    keep_distribution_torch,
    sampled_distribution,
    verify_by_rejection,
    verify_by_rejection_torch,
)
from paceline.kernels.sampler import sample, sample_reference

ROWS = {"cuda": (1, 16, 64), "cpu": (1, 4)}
PROPOSALS = {"cuda": (1, 3, 7), "cpu": (3,)}
CHECKED_ROWS = 4  # against the reference on the CPU
TOLERANCE = 1e-4
DISTANCE = 1.0  # of the drafter's logits from the policy's, which have a deviation of 3


def rejection_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields batches of rows at temperature 1 with so many proposals each, verified either way."""
    for rows in ROWS[operands.device.type]:
        for proposals in PROPOSALS[operands.device.type]:
            yield from _verifying(operands, rows, proposals)
        yield _keeping(operands, rows)


def _verifying(operands: Operands, rows: int, proposals: int) -> Iterator[KernelCase]:
    vocab_size, device = operands.shape.vocab_size, operands.device
    queries = proposals + 1
    size = f"{proposals}, {rows} rows of {vocab_size} logits"
    copies = copies_for(rows * queries * vocab_size * 4.0, device)
    logits = [torch.randn(rows, queries, vocab_size, device=device) * 3 for _ in range(copies)]
    temperature_RQ = torch.ones(rows, queries, device=device)
    seed_RQ = torch.randint(2**62, (rows, 1), device=device).expand(-1, queries).contiguous()
    position_RQ = torch.arange(queries, device=device).expand(rows, -1).contiguous()
    slots_R = torch.arange(rows, device=device)
    noise = temperature_RQ, seed_RQ, position_RQ
    drafts = [_drafted(x, *noise) for x in logits]
    inputs = [(x, *noise, None, *draft, slots_R) for x, draft in zip(logits, drafts, strict=True)]
    flat_noise = [x.flatten() for x in noise]

    def error() -> float:
        few = [x if x is None else x[:CHECKED_ROWS] for x in inputs[0]]
        tokens_RQ, logprobs_RQ = (x.cpu() for x in verify_by_rejection(*few))
        expected_RQ, expected_logprobs_RQ = verify_by_rejection_torch(
            *(x if x is None else x.cpu() for x in few)
        )
        proposals_RK = drafts[0][0][:CHECKED_ROWS].cpu()
        kept_RQ = torch.ones_like(tokens_RQ, dtype=torch.bool)
        kept_RQ[:, 1:] = (expected_RQ[:, :-1] == proposals_RK).cumprod(1).bool()
        wrong = float((tokens_RQ != expected_RQ)[kept_RQ].float().mean())
        return max(wrong, relative_error(logprobs_RQ[kept_RQ], expected_logprobs_RQ[kept_RQ]))

    def shared_error() -> float:
        few = [x[: CHECKED_ROWS * queries] for x in (logits[0].flatten(0, 1), *flat_noise)]
        tokens_T, logprobs_T = (x.cpu() for x in sample(*few))
        expected_T, expected_logprobs_T = sample_reference(*(x.cpu() for x in few))
        wrong = float((tokens_T != expected_T).float().mean())
        return max(wrong, relative_error(logprobs_T, expected_logprobs_T))

    # The logits of all proposals; the probabilities, or the last logits, at one position.
    num_bytes = 4.0 * rows * queries * vocab_size
    yield KernelCase(
        kernel="rejection",
        size=f"verify {size}",
        copies=copies,
        run=lambda: [verify_by_rejection(*x) for x in inputs],
        run_torch=lambda: [verify_by_rejection_torch(*x) for x in inputs],
        error=error,
        tolerance=TOLERANCE,
        num_bytes=num_bytes,
    )
    yield KernelCase(
        kernel="rejection",
        size=f"shared noise {size}",
        copies=copies,
        run=lambda: [sample(x.flatten(0, 1), *flat_noise) for x in logits],
        run_torch=None,
        error=shared_error,
        tolerance=TOLERANCE,
        num_bytes=num_bytes,
    )


def _drafted(
    logits_RQV: torch.Tensor, temperature_RQ: torch.Tensor, seed_RQ: torch.Tensor, position_RQ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns proposals drawn with shared noise, and the probabilities that they were drawn from."""
    before_RKV = logits_RQV[:, :-1]
    flat_TV = (before_RKV + DISTANCE * torch.randn_like(before_RKV)).flatten(0, 1)
    noise = [x[:, :-1].flatten() for x in (temperature_RQ, seed_RQ, position_RQ)]
    shape = before_RKV.shape
    return sample(flat_TV, *noise)[0].view(shape[:2]), sampled_distribution(flat_TV, noise[0]).view(shape)


def _keeping(operands: Operands, rows: int) -> KernelCase:
    vocab_size, device = operands.shape.vocab_size, operands.device
    copies = copies_for(2 * rows * vocab_size * 4.0, device)
    logits = [torch.randn(rows, vocab_size, device=device) * 3 for _ in range(copies)]
    temperature_R = torch.ones(rows, device=device)
    kept = [torch.zeros(rows, 1, vocab_size, device=device) for _ in range(copies)]
    slots_R = torch.arange(rows, device=device)
    inputs = [(x, temperature_R, None, out, slots_R, 0) for x, out in zip(logits, kept, strict=True)]

    def error() -> float:
        keep_distribution(*inputs[0])
        expected_RV = sampled_distribution(logits[0][:CHECKED_ROWS].cpu(), temperature_R[:CHECKED_ROWS].cpu())
        return relative_error(kept[0][:CHECKED_ROWS, 0].cpu(), expected_RV)

    return KernelCase(
        kernel="rejection",
        size=f"keep probabilities, {rows} rows of {vocab_size} logits",
        copies=copies,
        run=lambda: [keep_distribution(*x) for x in inputs],
        run_torch=lambda: [keep_distribution_torch(*x) for x in inputs],
        error=error,
        tolerance=TOLERANCE,
        num_bytes=8.0 * rows * vocab_size,
    )
