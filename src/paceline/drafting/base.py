"""What a drafter is.

    seated         ──▶ bind(context)             once: the policy, the rows, where proposals go
    prompt runs    ──▶ observe_prefill        device: the policy's hidden states, for a drafter that follows them
    request enters ──▶ observe_enter          host: which prompt, which slot
    each step      ──▶ propose(slots, k)      device: k tokens per row into the proposals, no host involved
                   ──▶ observe_step           device: what the policy computed and sampled, for a drafter that follows it
    request leaves ──▶ observe_leave          host: what it wrote, while its row is still there

A drafter sees resident rows (`kernels/row_step.py`), never the engine. `propose` and `observe_step` are
captured in CUDA graphs, so they read only tensors whose address stays; `catch_up` does beforehand what needs
the host.
"""

from dataclasses import dataclass

import torch
from torch import nn

from paceline.kernels.row_step import Queries, RowTensors
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import Request


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter sees of the engine it drafts for."""

    policy: Decoder
    rows: RowTensors
    proposals_SK: torch.Tensor
    probabilities_SKV: (
        torch.Tensor | None
    )  # what each proposal was drawn from; None: nobody asks (see `has_probabilities`)
    num_blocks: int  # of the paged pool; a drafter's own cache uses the same block numbers
    deterministic: bool
    request_tokens: int  # the longest that a prompt and its response are expected to be


@dataclass(frozen=True)
class TargetStep:
    """One step of the policy: `queries` went in, `sampled_RQ` came out, and the rows have taken what they
    keep.
    """

    slots_R: torch.Tensor
    queries: Queries
    sampled_RQ: torch.Tensor
    captured: dict[int, torch.Tensor]  # by layer: the hidden states that entered it, [R x Q, E]


@dataclass(frozen=True)
class TargetPrefill:
    """Chunks of several prompts, packed."""

    following_T: torch.Tensor  # the token after each one
    positions_T: torch.Tensor
    cache_slots_T: torch.Tensor
    last_S: torch.Tensor  # index of each chunk's last token
    captured: dict[int, torch.Tensor]


class Drafter:
    """Every method but `propose` may be left as it is."""

    name: str
    max_tokens: int  # the longest proposal it can make
    captured_layers: tuple[int, ...] = ()  # not empty: it follows the policy, and sees its prefills and steps
    needs_catch_up = False  # it must look at rows that ran without it before it can propose for them
    # It has probabilities, and leaves them in the context's buffer for `verify: rejection` where there is
    # one: entry i is what proposal i was drawn from, with the sampling noise of its own position
    # (`sampling.py` does both). Other drafters' proposals count as certain, which is exact too and accepts
    # less.
    has_probabilities = False
    token_bytes = 0  # of a cache of its own, per token of the paged pool
    head: nn.Module | None = None  # what can be trained, in the very storage that proposals are computed from
    shape: DecoderConfig | None = (
        None  # of its layers, if it has any: what a draft holds of the GPU follows from it
    )

    def bind(self, context: DrafterContext) -> None:
        self.context = context

    def observe_prefill(self, prefill: TargetPrefill) -> torch.Tensor | None:
        """One line per chunk; the line of a prompt's last chunk is handed to `observe_enter`."""
        return None

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None: ...

    def observe_step(self, step: TargetStep) -> None: ...

    def observe_leave(self, slot: int, request: Request, length: int, over: bool) -> None:
        """The row holds `length` tokens and will be reused after this call; the request comes back with them
        unless it is `over`.
        """

    def catch_up(self, slots: list[int], lengths: list[int]) -> None:
        """Before the first proposal for rows that ran without this drafter; `lengths` are known to be
        reached.
        """

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        """Writes `count` tokens for each row of `slots_R` into the proposals; `truncates`: somebody uses
        top-k, top-p or min-p.
        """
        raise NotImplementedError

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Blocks of the pool were copied; so must be those of a drafter's own cache."""

    def sleep(self) -> None:
        """The pool gives its memory back, and no row is running."""

    def wake(self) -> None: ...

    def state(self) -> dict[str, torch.Tensor]:
        """What should survive a restart, as copies: drafting on does not change them."""
        return {}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None: ...
