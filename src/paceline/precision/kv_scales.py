"""Scales of the FP8 KV cache, measured after QK-norm and RoPE in a forward pass at full precision.

    amax per micro-batch, layer, K or V, kv head ──▶ 99.9th percentile over them x 1.05 / 448 ──▶ scales

Scales are rounded up to powers of two, so what the cache stands for is exact in bf16: the learner, which
attends over the same numbers (`PackedAttention.kv_scales`), has them as they are.

The learner calls `observe` in its forward pass over the batch it trains on, so measuring needs no extra pass;
the scales are one update old when they are used, hence the margin (recipe: FP8-RL, arXiv 2601.18150). Before
the first update a pass over prompts takes its place. Every calibration is validated: attention over the kept
windows, with K and V as the cache would hold them, against the same with the original K and V. Where the two
differ by more than MAX_ERROR the layer is reported as unfit.

One scale serves all tokens, so two windows are kept of each layer, whatever micro-batch they were in: the one
with the quietest values, which a large scale loses, and the one with the loudest key, which a small scale
cuts off. A window is a run of packed tokens, attended as one text: an artificial context, but real numbers.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.fp8_format import SMALLEST_AMAX, power_of_two_scale, round_to_e4m3
from paceline.policy.config import DecoderConfig

PERCENTILE = 0.999
MARGIN = 1.05
WINDOW = 256  # tokens
# Of the attention output, relative. E4M3 itself costs 4% on normal numbers and 3-9% on the built-in policy
MAX_ERROR = 0.2


class KVScales:
    """The scales of one policy's keys and values, and the measurements for their calibration."""

    def __init__(self, config: DecoderConfig, device: torch.device, per_head: bool = False) -> None:
        self.per_head = per_head
        self.num_layers = config.num_layers
        # NaN until calibrated: a cache used too early makes every logit NaN.
        self.scales_L2H = torch.full((config.num_layers, 2, config.num_kv_heads), torch.nan, device=device)
        # not read off the scales: the engine asks at every step, and the device must not be waited for
        self.calibrated = False
        self.errors: list[float] = []  # of the last calibration, per layer
        self._amax: list[list[torch.Tensor]] = [
            [] for _ in range(config.num_layers)
        ]  # [2, H] per micro-batch
        self._windows: list[list[Window]] = [[] for _ in range(config.num_layers)]

    @property
    def has_measurements(self) -> bool:
        """Whether every layer was observed since the last calibration."""
        return all(self._amax)

    @torch.no_grad()
    def observe(self, layer: int, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """Measures one layer of one micro-batch, as attention sees it."""
        q, k, v = q_THD.detach(), k_THD.detach(), v_THD.detach()
        self._amax[layer].append(torch.stack((k.abs().amax((0, 2)), v.abs().amax((0, 2)))).float())
        found = [Window.most(-v.abs().mean((1, 2)), q, k, v), Window.most(k.abs().amax((1, 2)), q, k, v)]
        kept = self._windows[layer] or found
        self._windows[layer] = [new.or_kept(old) for new, old in zip(found, kept, strict=True)]

    @torch.no_grad()
    def calibrate(self) -> list[int]:
        """Writes the scales from the observations since the last call; returns the layers that are unfit."""
        assert self.has_measurements, "nothing was observed"
        amax_L2H = torch.stack([self._percentile(torch.stack(batches)) for batches in self._amax])
        self.scales_L2H.copy_(power_of_two_scale(amax_L2H * MARGIN))
        unfit = self.validate()
        self._amax = [[] for _ in range(self.num_layers)]
        self._windows = [[] for _ in range(self.num_layers)]
        self.calibrated = True
        return unfit

    def load(self, scales_L2H: torch.Tensor, errors: list[float]) -> None:
        self.scales_L2H.copy_(scales_L2H)
        self.errors = errors
        self.calibrated = True

    def _percentile(self, amax_B2H: torch.Tensor) -> torch.Tensor:
        """Returns the percentile over one layer's micro-batches.

        Per layer, because a forward pass that ran out of memory has measured the layers before that point
        once more than those after.
        """
        if not self.per_head:
            amax_B2H = amax_B2H.amax(-1, keepdim=True).expand_as(amax_B2H)
        return torch.quantile(amax_B2H, PERCENTILE, dim=0)

    @torch.no_grad()
    def validate(self) -> list[int]:
        """Returns the layers whose attention over either window changes by more than MAX_ERROR."""
        errors_L2 = [
            [attention_error(*w.tokens, *self.scales_L2H[layer]) for w in windows]
            for layer, windows in enumerate(self._windows)
        ]
        self.errors = torch.stack([torch.stack(errors).max() for errors in errors_L2]).tolist()
        return [layer for layer, error in enumerate(self.errors) if not error <= MAX_ERROR]


@dataclass(frozen=True)
class Window:
    """The run of tokens with the largest measure; chosen on the device, without synchronising with it."""

    measure: torch.Tensor
    tokens: tuple[torch.Tensor, ...]

    @staticmethod
    def most(measure_T: torch.Tensor, *tensors: torch.Tensor) -> "Window":
        """Returns the window with the largest mean measure, among consecutive whole windows.

        Fewer tokens than one window are repeated to fill it.
        """
        num_tokens = len(measure_T)
        windows = max(1, num_tokens // WINDOW)
        measure_N = measure_T[: windows * WINDOW].view(windows, -1).mean(1)
        best = measure_N.argmax()
        index = (best * WINDOW + torch.arange(WINDOW, device=best.device)) % num_tokens
        return Window(measure_N[best], tuple(x[index] for x in tensors))

    def or_kept(self, kept: "Window") -> "Window":
        better, pairs = self.measure > kept.measure, zip(self.tokens, kept.tokens, strict=True)
        return Window(
            torch.maximum(self.measure, kept.measure),
            tuple(torch.where(better, new, old) for new, old in pairs),
        )


def attention_error(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_scale_H: torch.Tensor,
    v_scale_H: torch.Tensor,
) -> torch.Tensor:
    """Returns |attention with K and V through E4M3 - attention| / |attention|, causal over the tokens."""

    q, k, v = q_THD.float(), k_THD.float(), v_THD.float()
    exact = _attend(q, k, v)
    cached = _attend(q, *(round_to_e4m3(x, scale_H) for x, scale_H in ((k, k_scale_H), (v, v_scale_H))))
    return (cached - exact).norm() / exact.norm().clamp(min=SMALLEST_AMAX)


def _attend(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_THD, v_THD))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
