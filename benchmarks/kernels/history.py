"""Cases of the history drafter: it files the tokens that were accepted and looks up what may follow.

Torch has no equivalent. Rows repeat themselves, so every lookup finds something. The figures include the one
small launch that lengthens the rows.
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.workload import Operands
from paceline.kernels.history_index import HistoryIndex
from paceline.kernels.history_lookup import propose_from_history

PERIOD = 97  # tokens after which a row begins again
ACCEPTED = 3  # tokens that a row gains in each step
PROPOSED = 7
FIRST_LENGTH = 256
STEPS = {"cuda": 20, "cpu": 2}  # in one call
SIBLINGS = 8  # rows that answer the same prompt
BANK_TOKENS = {"cuda": 1 << 24, "cpu": 1 << 12}


def history_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields batches of rows, all of them drafting."""
    for rows in operands.workload.rows:
        yield _case(operands, rows)


def _case(operands: Operands, rows: int) -> KernelCase:
    device = operands.device
    width = operands.workload.history_tokens
    text_W = torch.arange(width, device=device) % PERIOD
    tokens_SW = text_W.repeat(rows, 1)
    length_S = torch.full((rows,), FIRST_LENGTH, dtype=torch.int64, device=device)
    slots_R = torch.arange(rows, device=device)
    proposals_SK = torch.empty(rows, PROPOSED, dtype=torch.int64, device=device)
    bank = BANK_TOKENS[device.type]
    index = HistoryIndex.empty(rows, bank, rows * width, 2 * bank, device)
    index.prompt_S[:] = slots_R // SIBLINGS

    def step() -> None:
        length_S.add_(ACCEPTED)
        propose_from_history(slots_R, tokens_SW, length_S, index, PROPOSED, proposals_SK)

    def error() -> float:
        """The share of proposals that do not continue the row."""
        step()
        following_RK = length_S.unsqueeze(1) + torch.arange(PROPOSED, device=device)
        return float((proposals_SK != following_RK % PERIOD).float().mean())

    steps = STEPS[device.type]
    return KernelCase(
        kernel="history",
        size=f"{PROPOSED} proposals, {rows} rows",
        copies=steps,
        run=lambda: [step() for _ in range(steps)],
        run_torch=None,
        error=error,
        tolerance=0.0,
    )
