"""The memory of drafters, from the drafters themselves, made and bound on the meta device."""

from dataclasses import dataclass

import torch

from paceline.config import SpeculationConfig
from paceline.drafting.base import Drafter, DrafterContext
from paceline.drafting.calibration import Calibration
from paceline.drafting.factory import make_drafters
from paceline.drafting.head_products import HeadProducts
from paceline.drafting.tree import TreeProposals
from paceline.engine.rows import Rows
from paceline.kernels.history_index import HistoryIndex
from paceline.paged.forward import PagedForward
from paceline.plan.learning import META, total_bytes
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder


@dataclass(frozen=True)
class DrafterBytes:
    """Bytes that drafters take on the device."""

    fixed: int = 0  # weights, banks, rejection's probabilities
    per_token: int = 0  # of the KV pool, in a cache of its own
    shapes: tuple[DecoderConfig, ...] = ()  # of those that have layers
    captured_layers: int = 0  # of the policy, for those that follow it


def drafter_bytes(
    speculation: SpeculationConfig,
    policy: Decoder,
    rows: Rows,
    proposals_SK: torch.Tensor,
    request_tokens: int,
) -> DrafterBytes:
    """Returns the bytes of all drafters of a recipe together; `policy` is on the meta device."""
    drafters = make_drafters(speculation, policy)
    probabilities_SKV = None
    if speculation.verify == "rejection" and any(drafter.has_probabilities for drafter in drafters):
        probabilities_SKV = torch.zeros(*proposals_SK.shape, policy.config.vocab_size, device=META)
    parents_SK = torch.zeros_like(proposals_SK)
    own = [] if probabilities_SKV is None else [probabilities_SKV]
    for drafter in drafters:
        drafter.bind(
            DrafterContext(
                policy,
                rows.state,
                proposals_SK,
                parents_SK,
                probabilities_SKV,
                num_blocks=1,
                deterministic=False,
                request_tokens=request_tokens,
            )
        )
        own += _tensors(drafter)
    shared = [
        *rows.state,
        proposals_SK,
        parents_SK,
        *policy.parameters(),
        policy.rope_table,
    ]
    shapes = tuple(drafter.shape for drafter in drafters if drafter.shape is not None)
    captured = {layer for drafter in drafters for layer in drafter.captured_layers}
    return DrafterBytes(
        total_bytes(own, besides=shared),
        sum(drafter.token_bytes for drafter in drafters),
        shapes,
        len(captured),
    )


def _tensors(drafter: Drafter) -> list[torch.Tensor]:
    """Returns a drafter's tensors, except its context and its cache, which grows with the pool."""
    found: list[torch.Tensor] = []
    for value in vars(drafter).values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers(), value.rope_table]
        elif isinstance(value, HistoryIndex):
            found += value
        elif isinstance(value, Calibration):
            found += vars(value).values()
        elif isinstance(value, TreeProposals):
            found.append(value.nodes.cells_SK)
        elif isinstance(value, HeadProducts):
            found += value.tensors
        elif isinstance(value, PagedForward):
            found += [value.cos_PC, value.sin_PC]
    return found
