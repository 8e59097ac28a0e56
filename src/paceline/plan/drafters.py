"""What drafters take: the drafters themselves, made on the meta device and seated there."""

from dataclasses import dataclass

import torch

from paceline.config import SpeculationConfig
from paceline.drafting.base import Drafter, DrafterContext
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.history import HistoryDrafter
from paceline.drafting.recipe import available_drafters, blame_recipe, draft_model_folder, eagle_head
from paceline.engine.rows import Rows
from paceline.kernels.history_index import HistoryIndex
from paceline.paged.forward import PagedForward
from paceline.plan.learning import META, total_bytes
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder


@dataclass(frozen=True)
class DrafterBytes:
    fixed: int = 0  # weights, banks, what rejection keeps
    per_token: int = 0  # of the KV pool, in a cache of its own
    shapes: tuple[DecoderConfig, ...] = ()  # of those that have layers
    captured_layers: int = 0  # of the policy, for those that follow it


def drafter_bytes(
    speculation: SpeculationConfig,
    policy: Decoder,
    rows: Rows,
    proposals_SK: torch.Tensor,
    widened: bool,
    request_tokens: int,
) -> DrafterBytes:
    """Of all of them together. With a widened policy the head is widened too; its folder is of the small one,
    so the whole vocabulary is assumed.
    """
    names = speculation.drafters if widened else available_drafters(speculation, policy.config)
    drafters = [meta_drafter(name, speculation, policy, widened) for name in names]
    probabilities_SKV = None
    if speculation.verify == "rejection" and any(drafter.has_probabilities for drafter in drafters):
        probabilities_SKV = torch.zeros(*proposals_SK.shape, policy.config.vocab_size, device=META)
    own = [] if probabilities_SKV is None else [probabilities_SKV]
    for drafter in drafters:
        drafter.bind(
            DrafterContext(
                policy,
                rows.state,
                proposals_SK,
                probabilities_SKV,
                num_blocks=1,
                deterministic=False,
                request_tokens=request_tokens,
            )
        )
        own += _tensors(drafter)
    seated = [*vars(rows.state).values(), proposals_SK, *policy.parameters(), policy.rope_table]
    shapes = tuple(drafter.shape for drafter in drafters if drafter.shape is not None)
    captured = {layer for drafter in drafters for layer in drafter.captured_layers}
    return DrafterBytes(
        total_bytes(own, besides=seated),
        sum(drafter.token_bytes for drafter in drafters),
        shapes,
        len(captured),
    )


def meta_drafter(name: str, speculation: SpeculationConfig, policy: Decoder, widened: bool) -> Drafter:
    if name == "history":
        return HistoryDrafter()
    with blame_recipe(name, speculation):
        shape = policy.config
        if name == "eagle":
            config = config_for(shape) if widened else eagle_head(speculation, shape)[1]
            return EagleDrafter(EagleHead(config, policy.dtype, META))
        return DraftModel(Decoder(read_config(draft_model_folder(speculation, shape)), policy.dtype, META))


def _tensors(drafter: Drafter) -> list[torch.Tensor]:
    """All it holds but its seat and its cache, which grows with the pool."""
    found: list[torch.Tensor] = []
    for value in vars(drafter).values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers(), value.rope_table]
        elif isinstance(value, HistoryIndex):
            found += vars(value).values()
        elif isinstance(value, PagedForward):
            found += [value.cos_PC, value.sin_PC]
    return found
