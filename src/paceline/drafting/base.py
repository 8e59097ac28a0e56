"""The protocol of drafters: what proposes tokens for the policy to verify.

    engine starts  ──▶ bind(context)        once: the policy, the rows, where proposals go
    prompt runs    ──▶ observe_prefill      device: the policy's hidden states, if the drafter follows them
    request enters ──▶ observe_enter        host: which prompt, which slot
    each step      ──▶ propose(slots, k)    device: k tokens per row into the proposals, no host involved
                   ──▶ observe_step         device: what the policy computed and sampled, if it follows that
       in trees    ──▶ propose_tree(slots, k), observe_tree: k nodes per row, and the way through them
    request leaves ──▶ observe_leave        host: what it wrote, while its row is still there

A drafter sees resident rows (`kernels/row_step.py`), never the engine. `propose` and `observe_step` are
captured in CUDA graphs, so they read only tensors whose address stays, and so are their counterparts for
trees; `catch_up` does beforehand what needs the host.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from paceline.kernels.row_step import Queries, RowTensors
from paceline.kernels.tree_walk import TreeWalk
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from paceline.types import Request

# Stands among captured layers for the hidden states after the last norm.
HIDDEN = -1


@dataclass(frozen=True)
class DrafterContext:
    """The parts of the engine that a drafter has access to."""

    policy: Decoder
    rows: RowTensors
    # Where proposals go, and of a tree's nodes the parents (`kernels/tree_gather.py`).
    proposals_SK: torch.Tensor
    parents_SK: torch.Tensor
    # Where the distribution goes that each proposal was drawn from; None: not needed (`has_probabilities`).
    probabilities_SKV: torch.Tensor | None
    # Blocks of the paged pool; a drafter's own cache uses the same block numbers.
    num_blocks: int
    deterministic: bool
    # The longest that a prompt and its response are expected to be.
    request_tokens: int


@dataclass(frozen=True)
class TargetStep:
    """One step of the policy, after the rows have appended the samples that they keep."""

    slots_R: torch.Tensor
    # The position of each row's first token; -1: the row is not active.
    context_R: torch.Tensor
    # The tokens that ran: their positions, the cache slots that their keys and values now belong to (-1:
    # they are not kept), and what was sampled behind them.
    positions_T: torch.Tensor
    cache_slots_T: torch.Tensor
    sampled_T: torch.Tensor
    # By layer: the hidden states that entered it, `[T, E]`; under HIDDEN the last ones, if needed.
    captured: dict[int, torch.Tensor]
    # Where among the T the nodes of each row's path are; None: as they ran, row after row.
    way_RQ: torch.Tensor | None = None


@dataclass(frozen=True)
class TreeStep:
    """A tree that the policy has verified: what its nodes ran with, and the way through it."""

    slots_R: torch.Tensor
    queries: Queries
    walk: TreeWalk


@dataclass(frozen=True)
class TargetPrefill:
    """A prefill of the policy: chunks of several prompts, packed."""

    # The token after each one.
    following_T: torch.Tensor
    positions_T: torch.Tensor
    cache_slots_T: torch.Tensor
    # The index of each chunk's last token, and on the host where each ends.
    last_S: torch.Tensor
    stops: tuple[int, ...]
    # By layer: the hidden states that entered it, `[T, E]`.
    captured: dict[int, torch.Tensor]


class NodeRates(Protocol):
    """What a drafter has learned of its trees' nodes (`calibration.py`)."""

    def counts(self) -> torch.Tensor:
        """Returns a copy of the counts."""

    def load_counts(self, counts_2C: torch.Tensor) -> None:
        """Restores what `counts` returned."""


class Drafter:
    """Base class; only `propose` must be overridden."""

    name: str
    # The longest proposal it can make, in tokens.
    max_tokens: int
    # The policy's layers whose inputs it needs. Not empty: it follows the policy, seeing prefills and steps.
    captured_layers: tuple[int, ...] = ()
    # It must process rows that ran without it before it can propose for them.
    needs_catch_up = False
    # It has probabilities, and leaves them in the context's buffer for `verify: rejection` where there is
    # one: entry i is what proposal i was drawn from, with the sampling noise of its own position
    # (`sampling.py` does both). Other drafters' proposals count as certain, which is exact too and accepts
    # less.
    has_probabilities = False
    # Bytes of a cache of its own, per token of the paged pool.
    token_bytes = 0
    # What can be trained, in the very storage that proposals are computed from.
    head: nn.Module | None = None
    # Whether its layer and its head over the vocabulary propose in FP8.
    fp8: bool = False
    # It needs the hidden states after the last norm, too.
    wants_hidden = False
    # The shape of its layers, if it has any; determines the GPU memory of a draft.
    shape: DecoderConfig | None = None
    # How often nodes of its trees were right; the engine keeps it over a restart.
    calibration: NodeRates | None = None

    def bind(self, context: DrafterContext) -> None:
        """Connects the drafter to an engine; called once, before any other method."""
        self.context = context

    def observe_prefill(self, prefill: TargetPrefill) -> Iterable[torch.Tensor] | None:
        """Called after a prefill of the policy, if the drafter follows the policy.

        Returns one line per chunk; the line of a prompt's last chunk is passed to `observe_enter`.
        """
        return None

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        """Called when a request begins to run in a slot, with what `observe_prefill` returned for it."""

    def observe_step(self, step: TargetStep) -> None:
        """Called after a step of the policy, if the drafter follows the policy."""

    def observe_leave(self, slot: int, request: Request, length: int, finished: bool) -> None:
        """Called when a request leaves its slot; the row holds `length` tokens and is reused after this call.

        The request is resumed with those tokens later unless it is `finished`.
        """

    def observe_head(self) -> None:
        """Called after the weights of `head` were updated."""

    def catch_up(self, slots: list[int], lengths: list[int]) -> None:
        """Prepares for rows that ran without this drafter; the rows hold at least `lengths` tokens."""

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        """Writes `count` tokens for each row of `slots_R` into the proposals.

        `truncates` is whether any request of the batch uses top-k, top-p or min-p.
        """
        raise NotImplementedError

    def propose_tree(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        """Writes `count` nodes for each row of `slots_R` into proposals and parents; a chain is one, too."""
        self.propose(slots_R, count, truncates)
        self.context.parents_SK[slots_R, :count] = torch.arange(count, device=slots_R.device)

    def observe_tree(self, step: TreeStep) -> None:
        """Called with the path of the policy's samples through the nodes that it proposed last."""

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copies blocks of the drafter's own cache, as those of the pool were copied."""

    def sleep(self) -> None:
        """Releases memory together with the pool; no row is running."""

    def wake(self) -> None:
        """Allocates memory again together with the pool."""

    def record_states(self, max_bytes: int) -> None:
        """Begins to record the policy's states of some rows for training, if the drafter receives them."""

    def take_states(self) -> Mapping[tuple[int, ...], TextStates]:
        """Returns the states of responses that have finished since the last call, by their tokens."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Returns what should survive a restart, as copies: further drafting does not change them."""
        return {}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restores what `state` returned before a restart."""
