"""The device's side of the engine: precision, KV cache, resident rows, drafters and the steps over them.

The capabilities beside generating are here, too: the drafters' state, and the calibrated scales.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from tokenizers import Tokenizer
from torch import nn

from paceline.backend import Backend, LowPrecision, SliceTrainer, Speculation
from paceline.drafting.base import Drafter, DrafterContext
from paceline.engine.blocks import BlockPool
from paceline.engine.drafters import Drafters
from paceline.engine.graphs import StepRunner
from paceline.engine.rows import Rows
from paceline.engine.sampling import Verify
from paceline.engine.settings import EngineSettings
from paceline.pacing.strategy import Pacer
from paceline.paged.cache import KVCache, blocks_for
from paceline.paged.forward import PagedForward
from paceline.policy.attention import AttentionObserver
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import ExportedWeights, copy_weights
from paceline.policy.states import TextStates
from paceline.precision.rollout import RolloutPrecision
from paceline.types import Precision


class DeviceSide(Backend):
    """The part of an engine that lives on the device; `Engine` decides which requests run there."""

    pacer: Pacer | None
    slice_trainer: SliceTrainer | None = None  # set by the owner of the idle time

    def __init__(
        self,
        policy: Decoder,
        settings: EngineSettings,
        tokenizer: Tokenizer | None = None,
        drafters: Sequence[Drafter] = (),
        version: int = 0,
    ) -> None:
        self.policy = policy
        self.exported = ExportedWeights(policy)
        self.tokenizer = tokenizer
        self.settings = settings
        self.version = version
        self.drafter_version = 0
        self.max_length = min(settings.max_length or policy.config.max_positions, policy.config.max_positions)
        self.request_tokens = min(settings.request_tokens or self.max_length, self.max_length)
        self._open_device(drafters)

    def _open_device(self, drafters: Sequence[Drafter]) -> None:
        policy = self.policy
        settings = self.settings
        score_dtype = torch.float64 if policy.dtype == torch.float64 else torch.float32
        self.rollout_precision = RolloutPrecision(
            policy, settings.precision, settings.base_precision_layers, settings.kv_scales_per_head
        )
        self.pool = BlockPool(blocks_for(settings.kv_tokens) + 1)
        self.cache = self._new_cache(self.pool.num_blocks)
        self.rows = Rows(settings.max_running, self.max_length, score_dtype, policy.device)
        self.drafters = Drafters(drafters, settings.max_running)
        forward = PagedForward(
            policy,
            self.cache,
            settings.deterministic,
            self.drafters.captured_layers,
            self.rollout_precision.weights,
        )
        self.runner = StepRunner(forward, self.rows, settings, drafters)
        if settings.verify == Verify.REJECTION and self.drafters.have_probabilities:
            self.runner.keep_probabilities(policy.config.vocab_size, score_dtype)
        context = DrafterContext(
            policy,
            self.rows.state,
            self.runner.proposals.tokens_SK,
            self.runner.proposals.parents_SK,
            self.runner.probabilities_SKV,
            self.pool.num_blocks,
            settings.deterministic,
            self.request_tokens,
        )
        self.drafters.bind(context)

    def _new_cache(self, num_blocks: int) -> KVCache:
        return KVCache(
            self.policy.config,
            num_blocks,
            self.rollout_precision.cache_dtypes,
            self.policy.device,
            self.rollout_precision.cache_scales_L2H,
            self.settings.records_routing,
        )

    def _take_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None) -> bool:
        """Copies weights that come from elsewhere into the policy, and updates their FP8 copies.

        Returns whether the cache must be rebuilt.
        """
        arrived = None if weights is None else dict(weights)
        if arrived is not None:
            copy_weights(self.exported.views(), arrived, self.rollout_precision.copied_names)
        return self.rollout_precision.refresh(arrived)

    def _replace_cache(self, longest: int, num_blocks: int = 0) -> None:
        """Replaces the KV cache after layer types changed and drops captured graphs.

        Nothing may be running, and a request of `longest` tokens must still fit. It has `num_blocks`, or as
        many as fit the memory of the one before.
        """
        num_blocks = num_blocks or self.cache.blocks_with(
            self.rollout_precision.cache_dtypes, at_least=blocks_for(longest) + 1
        )
        self.cache = self.runner.forward.cache = None  # frees its memory for the new one
        self.pool.resize(num_blocks)
        self.cache = self._new_cache(num_blocks)
        self.runner.replace(self.cache, self.rollout_precision.weights)

    # -- capabilities (backend.py) ------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        return self.rollout_precision.precision

    @property
    def speculation(self) -> Speculation | None:
        return self if self.drafters else None

    @property
    def low_precision(self) -> LowPrecision | None:
        return self if self.precision is not Precision.BASE else None

    @property
    def keeps_tokens(self) -> bool:
        return self.settings.verify == Verify.SHARED_NOISE

    @property
    def attention_observer(self) -> AttentionObserver | None:
        return self.rollout_precision.observer

    def kv_scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.rollout_precision.kv_scales(layer)

    @property
    def trainable_head(self) -> nn.Module | None:
        return self.drafters.head

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self.drafters.take_head(weights)
        self.drafter_version = version

    def record_states(self, max_bytes: int) -> None:
        self.drafters.record_states(max_bytes)

    def take_states(self) -> Mapping[tuple[int, ...], TextStates]:
        return self.drafters.take_states()

    def drafter_state(self) -> dict[str, torch.Tensor]:
        return self.drafters.state()

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.drafters.load_state(tensors)

    def calibration_state(self) -> dict[str, torch.Tensor]:
        return self.rollout_precision.state()
