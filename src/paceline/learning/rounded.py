"""Weights of the policy that are rounded to E4M3, as the rollout has them, between two updates.

    masters ──step──▶ parameters ──round──▶ parameters on E4M3's grid ──▶ the learner's products
                                                     └──quantise──▶ the rollout's products: the same weights

Rounding passes gradients on as they are (a straight-through estimator), so the optimiser's masters move by
steps much smaller than E4M3's, and a weight changes when its master has crossed half a step. Quantising what
was rounded loses nothing, so learner and rollout multiply by the same weights wherever each of them lives;
what is left between them is the rounding of the rollout's activations.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.kernels.fp8_format import BlockMatrix
from paceline.kernels.fp8_quantise import quantise_blocks
from paceline.learning.optimiser import MasterAdamW
from paceline.policy.decoder import Decoder


class RoundedWeights:
    """The parameters named `names`, which are on E4M3's grid except within `as_learned`."""

    def __init__(self, policy: Decoder, names: frozenset[str], optimiser: MasterAdamW) -> None:
        self.policy = policy
        self.optimiser = optimiser
        parameters = dict(policy.named_parameters())
        self.modules = [policy.get_submodule(_owner(name)) for name in names]
        self._mark(True)
        with torch.no_grad():
            self.weights = [optimiser.ranks.local(parameters[name]) for name in sorted(names)]

    @torch.no_grad()
    def round(self) -> None:
        """Called when weights were written: after a step, and after a checkpoint was read."""
        for weight in self.weights:
            if weight.numel() and not weight.is_meta:  # a rank's share may be empty
                quantise_blocks(weight, BlockMatrix.poisoned(weight.shape, weight.device), round_weight=True)

    def stop(self) -> None:
        """Called when rollouts have left FP8: from now on the policy has its masters' weights."""
        if self.weights:
            self._write_masters()
            self._mark(False)
            self.weights = []

    @contextmanager
    def as_learned(self) -> Iterator[None]:
        """Within the context the policy has its masters' weights, for a file or an evaluation."""
        if not self.weights:
            yield
            return
        self._write_masters()
        try:
            yield
        finally:
            self.round()

    def _mark(self, in_fp8: bool) -> None:
        for module in self.modules:
            assert hasattr(module, "in_fp8")
            module.in_fp8 = in_fp8

    def _write_masters(self) -> None:
        self.optimiser.write_parameters()
        self.optimiser.ranks.merge_adapters(self.policy)


def _owner(name: str) -> str:
    """Returns the module of a projection, or of experts, whose weights are parameters of their own."""
    path = name.removesuffix(".weight")
    return path if name.endswith(".weight") else path.rpartition(".")[0]
