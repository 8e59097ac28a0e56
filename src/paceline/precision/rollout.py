"""A rollout's precision in the engine: the weights it multiplies by and the types of its cache.

    base       the policy's own weights and type: no effect
    fp8        projections in blockwise FP8
    fp8+kv     and keys and values in FP8
    kv         keys and values in FP8, projections in the policy's own type

`refresh` is called after a weight update. Whatever FP8 is too coarse for returns to the policy's own type,
with a warning: a layer's keys and values after a failed validation, everything when `fall_back` is called.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch

from paceline.kernels.fp8_format import E4M3
from paceline.policy.attention import AttentionObserver, PackedAttention
from paceline.policy.decoder import Decoder
from paceline.precision.kv_scales import MAX_ERROR, KVScales
from paceline.precision.weights import QuantisedWeights
from paceline.stats import PrecisionStats
from paceline.types import Precision

# Names in a checkpoint.
SCALES_KEY = "precision.kv_scales"
BASE_LAYERS_KEY = "precision.kv_base_layers"
ERRORS_KEY = "precision.kv_errors"
# Prompt tokens on which scales are measured before the first update.
CALIBRATION_TOKENS = 4096


class RolloutPrecision:
    """One engine's precision: FP8 copies of the weights and scales of the KV cache, or nothing."""

    def __init__(
        self, policy: Decoder, precision: Precision, base_layers: int = 0, per_head: bool = False
    ) -> None:
        precision = Precision(precision)
        self.policy = policy
        self.precision = precision
        self.weights = QuantisedWeights(policy, base_layers) if precision.fp8_weights else None
        self.kv = KVScales(policy.config, policy.device, per_head) if precision.fp8_kv else None
        self.kv_base_layers: set[int] = set()

    # -- inputs of the engine's storage -----------------------------------------------------------

    @property
    def cache_dtypes(self) -> list[torch.dtype]:
        own = self.policy.dtype
        return [
            own if self.kv is None or layer in self.kv_base_layers else E4M3
            for layer in range(self.policy.config.num_layers)
        ]

    @property
    def cache_scales_L2H(self) -> torch.Tensor | None:
        """The scales of an FP8 cache by layer, for keys and values; None where it has none."""
        return self.kv.scales_L2H if self.kv is not None else None

    @property
    def observer(self) -> AttentionObserver | None:
        """Measures what the learner's forward passes compute, for the next scales; None without FP8 KV."""
        return self._observe if self.kv is not None else None

    def kv_scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the scales with which the cache was written; None where a layer is not in E4M3."""
        if self.kv is None or not self.kv.calibrated or layer in self.kv_base_layers:
            return None
        return self.kv.scales_L2H[layer, 0], self.kv.scales_L2H[layer, 1]

    def _observe(self, layer: int, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        if self.kv is not None:  # the learner still calls the observer after falling back
            self.kv.observe(layer, q_THD, k_THD, v_THD)

    # -- weight updates ---------------------------------------------------------------------------

    @property
    def copied_names(self) -> frozenset[str]:
        """The tensors, by Hugging Face names, that `refresh` copies where they arrive from elsewhere."""
        return self.weights.copied_names if self.weights is not None else frozenset()

    def refresh(self, arrived: Mapping[str, torch.Tensor] | None = None) -> bool:
        """Called after a weight update; returns whether the cache must be rebuilt for layers that left FP8.

        Of tensors that `arrived` from elsewhere, it copies `copied_names` into the policy.
        """
        if self.weights is not None:
            self.weights.sync(arrived)
        return self._calibrate() if self.kv is not None and self.kv.has_measurements else False

    @property
    def wants_prompts(self) -> bool:
        """Whether scales are unmeasured: the cache cannot be used before a pass over prompts."""
        return self.kv is not None and not self.kv.calibrated

    @torch.no_grad()
    def calibrate_from(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Measures scales on prompts in the policy's own type; returns whether the cache must be rebuilt."""
        if not prompts:
            return False
        chosen, budget = [], CALIBRATION_TOKENS
        # Sorted: the scales must not depend on the order of requests.
        for prompt in sorted({tuple(p) for p in prompts}):
            chosen.append(prompt[:budget])
            budget -= len(chosen[-1])
            if budget <= 0:
                break
        attention = PackedAttention([len(prompt) for prompt in chosen], self.policy.device)
        attention.observe = self.kv.observe
        tokens_T = torch.tensor([token for prompt in chosen for token in prompt], device=self.policy.device)
        self.policy(tokens_T, attention.positions_T, attention)
        return self._calibrate()

    def _calibrate(self) -> bool:
        unfit = set(self.kv.calibrate()) - self.kv_base_layers
        if not unfit:
            return False
        self.kv_base_layers |= unfit
        worst = max(unfit, key=lambda layer: self.kv.errors[layer])
        warnings.warn(
            f"FP8 KV changes attention by more than {MAX_ERROR:.0%} in {_layers(unfit)} "
            f"(layer {worst}: {self.kv.errors[worst]:.0%}); "
            f"their keys and values stay in {self.policy.dtype} for the rest of the run",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    def fall_back(self) -> None:
        """Returns to the policy's own type for good; the cache must be rebuilt."""
        self.precision = Precision.BASE
        self.weights = None
        self.kv = None

    # -- checkpoints and statistics ---------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the cache's scales and their calibration errors, for a checkpoint."""
        if self.kv is None or not self.kv.calibrated:
            return {}
        base_layers = torch.tensor(sorted(self.kv_base_layers), dtype=torch.int64)
        # In float64, like Python's numbers, so that a resumed run's metric is the same to the last digit.
        errors = torch.tensor(self.kv.errors, dtype=torch.float64)
        return {
            SCALES_KEY: self.kv.scales_L2H.cpu().clone(),
            BASE_LAYERS_KEY: base_layers,
            ERRORS_KEY: errors,
        }

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Restores what `state` returned; returns whether the cache must be rebuilt."""
        if self.kv is None or SCALES_KEY not in tensors:
            return False
        errors = tensors[ERRORS_KEY].tolist() if ERRORS_KEY in tensors else []  # early checkpoints had none
        self.kv.load(tensors[SCALES_KEY], errors)
        before = self.kv_base_layers
        self.kv_base_layers = set(tensors[BASE_LAYERS_KEY].tolist())
        return before != self.kv_base_layers

    def stats(self) -> PrecisionStats:
        return PrecisionStats(
            precision=self.precision,
            quantise_seconds=self.weights.sync_seconds if self.weights is not None else 0.0,
            kv_error=max(self.kv.errors, default=0.0) if self.kv is not None else 0.0,
            kv_base_layers=len(self.kv_base_layers) if self.kv is not None else 0,
        )


def _layers(layers: set[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(str(layer) for layer in sorted(layers))}"
