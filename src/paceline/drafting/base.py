"""The protocol of drafters: what proposes tokens for the policy to verify.

    engine starts  ──▶ bind(context)        once: the policy, the rows, where proposals go
    prompt runs    ──▶ observe_prefill      device: the policy's hidden states, if the drafter follows them
    request enters ──▶ observe_enter        host: which prompt, which slot
    each step      ──▶ propose(slots, k)    device: k tokens per row into the proposals, no host involved
                   ──▶ observe_step         device: what the policy computed and sampled, if it follows that
       in trees    ──▶ propose_tree(slots, k), observe_tree: k nodes per row, and the way through them
       shared      ──▶ propose_scored(slots, k), observe_tree: chains, and how likely each token is reached
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
    """What a drafter sees of the engine it drafts for."""

    policy: Decoder
    rows: RowTensors
    # Where proposals go, and of a tree's nodes the parents (`kernels/tree_gather.py`).
    proposals_SK: torch.Tensor
    parents_SK: torch.Tensor
    # Where the logs go of how likely each is to be reached, best first, if rows share what is verified.
    values_SK: torch.Tensor
    # Where the distribution goes that each proposal was drawn from; None: not needed (`has_probabilities`).
    probabilities_SKV: torch.Tensor | None
    # Blocks of the paged pool; a drafter's own cache uses the same block numbers.
    num_blocks: int
    deterministic: bool
    # The longest that a prompt and its response are expected to be.
    request_tokens: int


@dataclass(frozen=True)
class TargetStep:
    """One step of the policy, after the rows have taken what they keep of its samples."""

    slots_R: torch.Tensor
    # The position of each row's first token; -1: the row is not active.
    context_R: torch.Tensor
    # The tokens that ran: their positions, the cache slots that their keys and values now belong to (-1:
    # they are not kept), and what was sampled behind them.
    positions_T: torch.Tensor
    cache_slots_T: torch.Tensor
    sampled_T: torch.Tensor
    # By layer: the hidden states that entered it, `[T, E]`; under HIDDEN the last ones, if wanted.
    captured: dict[int, torch.Tensor]
    # Where among the T a row's tokens are, in the order of its text; None: row after row, as many of each.
    way_RQ: torch.Tensor | None = None


@dataclass(frozen=True)
class TreeStep:
    """A tree that the policy has verified: what its nodes ran with, and the way through it."""

    slots_R: torch.Tensor
    queries: Queries
    walk: TreeWalk
    # As the queries' cache slots, -1 also for nodes that the step did not verify.
    verified_RQ: torch.Tensor


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
        """Returns it as a copy."""

    def load_counts(self, counts_2C: torch.Tensor) -> None:
        """Takes over what `counts` returned."""


class Drafter:
    """Base class; only `propose` must be overridden."""

    name: str
    # The longest proposal it can make, in tokens.
    max_tokens: int
    # The policy's layers whose inputs it needs. Not empty: it follows the policy, seeing prefills and steps.
    captured_layers: tuple[int, ...] = ()
    # It must look at rows that ran without it before it can propose for them.
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
    # It wants the hidden states after the last norm, too.
    wants_hidden = False
    # The shape of its layers, if it has any: what a draft holds of the GPU follows from it.
    shape: DecoderConfig | None = None
    # How often nodes of its trees were right; the engine keeps it over a restart.
    calibration: NodeRates | None = None

    def bind(self, context: DrafterContext) -> None:
        """Connects the drafter to an engine, once and before anything else."""
        self.context = context

    def observe_prefill(self, prefill: TargetPrefill) -> Iterable[torch.Tensor] | None:
        """Sees a prefill of the policy, if the drafter follows it.

        Returns one line per chunk; the line of a prompt's last chunk is handed to `observe_enter`.
        """
        return None

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        """Sees that a request begins to run in a slot, with what `observe_prefill` returned for it."""

    def observe_step(self, step: TargetStep) -> None:
        """Sees a step of the policy, if the drafter follows it."""

    def observe_leave(self, slot: int, request: Request, length: int, finished: bool) -> None:
        """Sees that a request leaves its slot, whose row holds `length` tokens and is reused after this call.

        The request comes back with those tokens unless it is `finished`.
        """

    def observe_head(self) -> None:
        """Sees that `head` has new weights."""

    def catch_up(self, slots: list[int], lengths: list[int]) -> None:
        """Prepares for rows that ran without this drafter; the rows have reached at least `lengths`."""

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        """Writes `count` tokens for each row of `slots_R` into the proposals.

        `truncates` tells whether any request of the batch uses top-k, top-p or min-p.
        """
        raise NotImplementedError

    def propose_scored(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        """Writes what `propose` does, and parents and values as for a tree.

        A drafter that knows nothing of its proposals says that earlier is likelier, in all rows alike.
        """
        self.propose(slots_R, count, truncates)
        number_K = torch.arange(count, device=slots_R.device)
        self.context.parents_SK[slots_R, :count] = number_K
        self.context.values_SK[slots_R, :count] = -number_K.float()

    def propose_tree(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        """Writes `count` nodes for each row of `slots_R` into proposals, parents and values.

        A chain is a tree, too.
        """
        self.propose_scored(slots_R, count, truncates)

    def observe_tree(self, step: TreeStep) -> None:
        """Sees which of the nodes, or tokens of a scored chain, the policy's samples went through."""

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copies blocks of the drafter's own cache, as those of the pool were copied."""

    def sleep(self) -> None:
        """Gives memory back with the pool; no row is running."""

    def wake(self) -> None:
        """Takes memory again with the pool."""

    def record_states(self, max_bytes: int) -> None:
        """Begins to keep the policy's states of some rows, for a head to learn from, if it sees any."""

    def want_states(self, wanted: bool) -> None:
        """Says whether the states of rows that begin from now on are of use; at first they are."""

    def take_states(self) -> Mapping[tuple[int, ...], TextStates]:
        """Returns the states of responses that have finished since the last call, by their tokens."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Returns what should survive a restart, as copies: drafting on does not change them."""
        return {}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes over what `state` returned before a restart."""
