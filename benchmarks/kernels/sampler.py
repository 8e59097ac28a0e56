"""Cases of the sampler: a token and its logprob from each row of logits.

Torch's equivalent draws with its own generator: the softmax over exponential noise, and the winner's logprob.
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import KernelCase, relative_error
from benchmarks.kernels.workload import Operands
from benchmarks.timing import copies_for
from paceline.kernels.sampler import sample

CHECKED_ROWS = 8  # against the reference on the CPU
TOLERANCE = 1e-4


def sampler_cases(operands: Operands) -> Iterator[KernelCase]:
    for rows in operands.workload.logit_rows:
        yield _case(operands, rows)


def _case(operands: Operands, rows: int) -> KernelCase:
    vocab_size = operands.shape.vocab_size
    device = operands.device
    copies = copies_for(rows * vocab_size * 4.0, device)
    logits = [torch.randn(rows, vocab_size, device=device) * 3 for _ in range(copies)]
    temperature_R = torch.ones(rows, device=device)
    seed_R = torch.randint(2**62, (rows,), device=device)
    position_R = torch.arange(rows, device=device)

    def error() -> float:
        inputs = [x[:CHECKED_ROWS] for x in (logits[0], temperature_R, seed_R, position_R)]
        token_R, logprob_R = (x.cpu() for x in sample(*inputs))
        expected_R, expected_logprob_R = sample.reference(*(x.cpu() for x in inputs))
        wrong = float((token_R != expected_R).float().mean())
        return max(wrong, relative_error(logprob_R, expected_logprob_R))

    return KernelCase(
        kernel="sampler",
        size=f"{rows} rows of {vocab_size} logits",
        copies=copies,
        run=lambda: [sample(x, temperature_R, seed_R, position_R) for x in logits],
        run_torch=lambda: [torch_sample(x) for x in logits],
        error=error,
        tolerance=TOLERANCE,
        num_bytes=float(logits[0].nbytes),
    )


def torch_sample(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a token of each row and its logprob, drawn with torch's generator."""
    logprobs_RV = logits_RV.log_softmax(-1)
    token_R = (logprobs_RV.exp() / torch.empty_like(logits_RV).exponential_()).argmax(-1)
    return token_R, logprobs_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1)
