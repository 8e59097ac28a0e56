"""Cases of the mixture-of-experts feed-forward behind its router.

Torch's equivalent is a loop over the experts that were chosen. It is given the routing beforehand:
computing it would make it wait for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import KernelCase, relative_error
from benchmarks.kernels.products import quantised
from benchmarks.kernels.workload import Operands
from paceline.kernels.fp8_moe import fp8_run_experts
from paceline.kernels.moe import run_experts

# Activations are rounded to E4M3 in between, which torch's equivalent does not do.
FP8_TOLERANCE = 0.08


@dataclass(frozen=True)
class Routing:
    """Which experts each token chose at random, with which weights; by token, and by expert."""

    weights_MK: torch.Tensor
    experts_MK: torch.Tensor
    by_expert: list[tuple[int, torch.Tensor, torch.Tensor]]  # expert, its tokens, their weights

    @classmethod
    def random(cls, operands: Operands, rows: int) -> "Routing":
        shape = operands.shape
        chosen = torch.rand(rows, shape.num_experts).topk(shape.num_experts_per_token)
        weights_MK = chosen.values.softmax(-1).to(operands.device, operands.dtype)
        by_expert = []
        for expert in chosen.indices.unique().tolist():
            token, place = (chosen.indices == expert).nonzero(as_tuple=True)
            token = token.to(operands.device)
            by_expert.append((expert, token, weights_MK[token, place.to(operands.device)].unsqueeze(1)))
        index_type = torch.int32 if operands.device.type == "cuda" else torch.int64
        return cls(weights_MK, chosen.indices.to(operands.device, index_type), by_expert)


def experts_cases(operands: Operands) -> Iterator[KernelCase]:
    gate_up, down = _expert_weights(operands)
    layers = list(zip(gate_up, down, strict=True))
    for rows in operands.workload.rows:
        yield _case(operands, rows, run_experts, layers, layers[0], fp8=False)


def fp8_experts_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields the experts over FP8 weights."""
    gate_up, down = _expert_weights(operands)
    layers = [(quantised(g), quantised(d)) for g, d in zip(gate_up, down, strict=True)]
    # Quantised depths are filled up to whole blocks.
    wide = tuple(
        matrix.dequantise()[..., : plain[0].shape[-1]].to(operands.dtype)
        for matrix, plain in zip(layers[0], (gate_up, down), strict=True)
    )
    for rows in operands.workload.rows:
        yield _case(operands, rows, fp8_run_experts, layers, wide, fp8=True)


def _expert_weights(operands: Operands) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    shape = operands.shape
    inner = shape.expert_intermediate_size
    gate_up = operands.weights(shape.num_experts, 2 * inner, shape.hidden_size)
    down = operands.weights(shape.num_experts, shape.hidden_size, inner)
    copies = min(len(gate_up), len(down))
    return gate_up[:copies], down[:copies]


def _case(
    operands: Operands,
    rows: int,
    run: Callable[..., torch.Tensor],
    layers: list[tuple],
    wide: tuple[torch.Tensor, torch.Tensor],
    fp8: bool,
) -> KernelCase:
    """Takes the weights of `layers` as the kernel wants them, and the first layer's in the policy's type."""
    shape = operands.shape
    x_ME = operands.random(rows, shape.hidden_size)
    routing = Routing.random(operands, rows)
    choices = (routing.weights_MK, routing.experts_MK)
    expert_numbers = 3.0 * shape.hidden_size * shape.expert_intermediate_size
    return KernelCase(
        kernel="fp8-experts" if fp8 else "experts",
        size=f"{shape.num_experts_per_token} of {shape.num_experts}, {rows} rows",
        copies=len(layers),
        run=lambda: [run(x_ME, *choices, gate_up, down) for gate_up, down in layers],
        # Over the same weights each time; with many experts they outgrow the cache by themselves.
        run_torch=lambda: [torch_experts(x_ME, routing, *wide) for _ in layers],
        error=lambda: relative_error(run(x_ME, *choices, *layers[0]), torch_experts(x_ME, routing, *wide)),
        tolerance=FP8_TOLERANCE if fp8 else operands.tolerance,
        num_bytes=len(routing.by_expert) * expert_numbers * (1 if fp8 else operands.dtype.itemsize),
        flops=2.0 * rows * shape.num_experts_per_token * expert_numbers,
        fp8=fp8,
    )


def torch_experts(
    x_ME: torch.Tensor, routing: Routing, gate_up_XNE: torch.Tensor, down_XEF: torch.Tensor
) -> torch.Tensor:
    """Returns the sum over each token's experts, one expert after the other."""
    out_ME = torch.zeros_like(x_ME)
    for expert, tokens, weights in routing.by_expert:
        gate, up = F.linear(x_ME[tokens], gate_up_XNE[expert]).chunk(2, dim=-1)
        out_ME.index_add_(0, tokens, F.linear(F.silu(gate) * up, down_XEF[expert]) * weights)
    return out_ME
