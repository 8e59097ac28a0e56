"""The policy's projections in FP8, quantised from the learner's parameters at every weight update.

The storage keeps its addresses, because CUDA graphs captured them. A sync first poisons every scale with NaN,
quantises, and then checks for NaN: a projection that was not written is an error that names it; without the
check it would make every logit NaN.

Which projections: those of the decoder's layers, by their exact names (a match by substring once took
`mlp.gate_up_proj` for the router `mlp.gate`). Embeddings, head, norms and the router keep the policy's type.
"""

import math
import time
from collections.abc import Mapping

import torch
from torch import nn

from paceline.backend import WeightsNotFinite
from paceline.kernels.fp8_format import BlockMatrix, scale_shape
from paceline.kernels.fp8_quantise_many import BlockQuantiser, WeightUpdate
from paceline.policy.decoder import Decoder, ExpertFeedForward
from paceline.policy.huggingface import pieces_by_parameter


class QuantisedWeights:
    """The FP8 copies of a policy's projections, which a forward pass uses instead."""

    def __init__(self, policy: Decoder, base_layers: int = 0) -> None:
        """Quantises all projections but those of the first and last `base_layers` layers."""
        self.sources = quantised_parameters(policy, base_layers)
        sizes = [math.prod(scale_shape(parameter.shape)) for _, parameter in self.sources]
        self.scales = torch.empty(sum(sizes), dtype=torch.float32, device=policy.device)
        parts = self.scales.split(sizes)
        self.matrices = [
            BlockMatrix.poisoned(parameter.shape, policy.device, part.view(scale_shape(parameter.shape)))
            for (_, parameter), part in zip(self.sources, parts, strict=True)
        ]
        self._quantiser = BlockQuantiser()
        pieces = pieces_by_parameter(policy.config)
        self._pieces = [pieces[name] for name, _ in self.sources]
        # The Hugging Face names of the tensors that make up the projections.
        self.copied_names = frozenset(name for names in self._pieces for name in names)
        self._by_parameter = {
            id(parameter): matrix for (_, parameter), matrix in zip(self.sources, self.matrices, strict=True)
        }
        self.sync_seconds = 0.0
        self.sync()

    def of(self, parameter: torch.Tensor) -> BlockMatrix | None:
        """Returns a parameter's FP8 copy; None if it keeps the policy's type."""
        return self._by_parameter.get(id(parameter))

    @torch.no_grad()
    def sync(self, arrived: Mapping[str, torch.Tensor] | None = None) -> None:
        """Updates the FP8 weights; raises if one of them is not finite.

        Tensors that `arrived` from elsewhere are copied into the projections first: `copied_names`.
        """
        start = self._now()
        self.scales.fill_(torch.nan)
        self._quantiser.quantise(self._updates(arrived))
        finite = bool(self.scales.isfinite().all())
        self.sync_seconds = self._now() - start
        if not finite:
            bad = [
                source
                for source, matrix in zip(self.sources, self.matrices, strict=True)
                if not matrix.scales.isfinite().all()
            ]
            harmed = [name for name, parameter in bad if not parameter.isfinite().all()]
            if harmed:
                raise WeightsNotFinite(
                    f"the weights of {len(harmed)} of {len(self.sources)} projections are not finite, first "
                    f"{harmed[0]}"
                )
            raise RuntimeError(
                f"FP8 weight sync did not write {len(bad)} of {len(self.sources)} projections, first "
                f"{bad[0][0]}: a bug in paceline"
            )

    def _updates(self, arrived: Mapping[str, torch.Tensor] | None) -> list[WeightUpdate]:
        return [
            WeightUpdate(
                parameter.detach(), matrix, () if arrived is None else [arrived[name] for name in names]
            )
            for (_, parameter), matrix, names in zip(self.sources, self.matrices, self._pieces, strict=True)
        ]

    def _now(self) -> float:
        if self.scales.is_cuda:
            torch.cuda.synchronize(self.scales.device)
        return time.perf_counter()


def quantised_parameters(policy: Decoder, base_layers: int = 0) -> list[tuple[str, nn.Parameter]]:
    """Returns the projections that FP8 replaces, by name; the outermost `base_layers` are left out."""
    if 2 * base_layers >= len(
        policy.layers
    ):  # nothing would be in FP8, and figures would be called FP8's all the same
        most = (len(policy.layers) - 1) // 2
        raise ValueError(
            f"rollout.base_precision_layers = {base_layers}: the first and last {base_layers} of "
            f"{len(policy.layers)} layers are all of them, "
            f"and no projection would be in FP8; the most is {most} (rollout.base_precision_layers={most}), "
            "or use rollout.precision=base"
        )
    parameters = dict(policy.named_parameters())
    names = []
    for index, layer in enumerate(policy.layers):
        if base_layers <= index < len(policy.layers) - base_layers:
            suffix = "" if isinstance(layer.feed_forward, ExpertFeedForward) else ".weight"
            names += [f"layers.{index}.attention.{name}.weight" for name in ("qkv", "output")]
            names += [f"layers.{index}.feed_forward.{name}{suffix}" for name in ("gate_up", "down")]
    return [(name, parameters[name]) for name in names]
