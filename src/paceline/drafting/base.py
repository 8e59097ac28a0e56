"""What a drafter is.

    request enters ──▶ observe_enter          host: which prompt, which slot
    each step      ──▶ propose(slots, k)      device: k tokens per row into `proposals`, no host involved
    request ends   ──▶ observe_leave          host: what it wrote, while its row is still there

A drafter sees resident rows (`kernels/row_step.py`), never the engine. `propose` may be captured in a CUDA graph, so it reads
only tensors whose address stays, and `catch_up` does beforehand what needs the host.

`verify: rejection` compares the policy's probabilities with the drafter's. A drafter that has them keeps an attribute
`draft_probabilities_SKV`, allocated by `bind` and filled by `propose`: float32 `[slots, its longest proposal, V]`, entry i the
distribution that proposal i was drawn from (`kernels/rejection.py: sampled_distribution`, at the request's temperature and
truncation), drawn with the sampling noise of the very position it is proposed for. Without it proposals count as certain,
which is as right and accepts less.
"""

from typing import Protocol

import torch

from paceline.kernels.row_step import RowTensors
from paceline.types import Request


class Drafter(Protocol):
    name: str
    max_tokens: int  # the longest proposal it can make

    def bind(self, rows: RowTensors, proposals_SK: torch.Tensor) -> None:
        """Called once: where the rows are, and where proposals go."""

    def observe_enter(self, slot: int, request: Request) -> None: ...

    def observe_leave(self, slot: int, request: Request, length: int) -> None:
        """The row holds `length` tokens and will be reused after this call."""

    def catch_up(self, slots: list[int], lengths: list[int]) -> None:
        """Before the first proposal for rows that ran without this drafter; `lengths` are known to be reached."""

    def propose(self, slots_R: torch.Tensor, count: int) -> None:
        """Writes `count` tokens for each row of `slots_R` into the proposals."""

    def state(self) -> dict[str, torch.Tensor]:
        """What should survive a restart."""

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None: ...


def draft_probabilities(drafter: Drafter) -> torch.Tensor | None:
    return getattr(drafter, "draft_probabilities_SKV", None)
