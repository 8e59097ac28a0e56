"""Cases of the matrix products: the projections of a layer and the LM head, in the base precision and in FP8.

The kernel is the row-invariant one at every number of rows. The engine's fast mode takes torch's own from
`linear.CUBLAS_ROWS` or `fp8_linear.CUBLAS_ROWS` rows on.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import KernelCase, relative_error
from benchmarks.kernels.workload import Operands
from paceline.kernels.fp8_format import GROUP, BlockMatrix
from paceline.kernels.fp8_linear import fp8_linear, fp8_linear_cublas
from paceline.kernels.fp8_quantise import quantise_blocks, quantise_blocks_reference, quantise_rows
from paceline.kernels.linear import linear
from paceline.policy.config import DecoderConfig

# Rows from which on torch's block-scaled product, a product for prefill, is worth comparing with.
SCALED_ROWS = 32


def projections(shape: DecoderConfig) -> dict[str, tuple[int, int]]:
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    sizes = {"qkv": (q + 2 * kv, shape.hidden_size), "output": (shape.hidden_size, q)}
    if len(shape.expert_layers) < shape.num_layers:
        sizes["gate_up"] = (2 * shape.intermediate_size, shape.hidden_size)
        sizes["down"] = (shape.hidden_size, shape.intermediate_size)
    return sizes


def linear_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields the projections at each number of rows, then the LM head, whose logits are float32."""
    for name, (width, depth) in projections(operands.shape).items():
        weights = operands.weights(width, depth)
        for rows in operands.workload.rows:
            yield _linear_case(operands, name, weights, rows, None)
    weights = operands.weights(operands.shape.vocab_size, operands.shape.hidden_size)
    for rows in operands.workload.logit_rows:
        yield _linear_case(operands, "head", weights, rows, torch.float32)


def _linear_case(
    operands: Operands, name: str, weights: list[torch.Tensor], rows: int, out_dtype: torch.dtype | None
) -> KernelCase:
    width, depth = weights[0].shape
    x_MK = operands.random(rows, depth)

    def multiply(weight_NK: torch.Tensor) -> torch.Tensor:
        return linear(x_MK, weight_NK, out_dtype, deterministic=True)

    def multiply_torch(weight_NK: torch.Tensor) -> torch.Tensor:
        if out_dtype in (None, x_MK.dtype):
            return F.linear(x_MK, weight_NK)
        return torch.mm(x_MK, weight_NK.t(), out_dtype=out_dtype)

    return KernelCase(
        kernel="linear",
        size=f"{name} {width} x {depth}, {rows} rows",
        copies=len(weights),
        run=lambda: [multiply(weight) for weight in weights],
        run_torch=lambda: [multiply_torch(weight) for weight in weights],
        error=lambda: relative_error(multiply(weights[0]), F.linear(x_MK.float(), weights[0].float())),
        tolerance=operands.tolerance,
        num_bytes=weights[0].nbytes + x_MK.nbytes + rows * width * (out_dtype or x_MK.dtype).itemsize,
        flops=2.0 * rows * width * depth,
    )


def quantised(weight: torch.Tensor) -> BlockMatrix:
    out = BlockMatrix.poisoned(weight.shape, weight.device)
    quantise_blocks(weight, out)
    return out


def fp8_linear_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields the projections over FP8 weights; torch's equivalent is its block-scaled product."""
    for name, (width, depth) in projections(operands.shape).items():
        matrices = [quantised(weight) for weight in operands.weights(width, depth)]
        for rows in operands.workload.rows:
            yield _fp8_linear_case(operands, name, matrices, rows)


def _fp8_linear_case(operands: Operands, name: str, matrices: list[BlockMatrix], rows: int) -> KernelCase:
    width, depth = matrices[0].values.shape
    x = quantise_rows(operands.random(rows, depth))
    fits_torch = rows >= SCALED_ROWS and width % GROUP == 0 and depth % (4 * GROUP) == 0

    def multiply(matrix: BlockMatrix) -> torch.Tensor:
        return fp8_linear(x, matrix, deterministic=True)

    return KernelCase(
        kernel="fp8-linear",
        size=f"{name} {width} x {depth}, {rows} rows",
        copies=len(matrices),
        # In a layer the norm or RoPE that follows adds up a product that comes in parts.
        run=lambda: [fp8_linear(x, matrix, deterministic=True, keep_parts=True) for matrix in matrices],
        run_torch=(lambda: [fp8_linear_cublas(x, matrix) for matrix in matrices])
        if fits_torch and operands.device.type == "cuda"
        else None,
        error=lambda: relative_error(
            multiply(matrices[0]), F.linear(x.dequantise(), matrices[0].dequantise())
        ),
        tolerance=operands.tolerance,
        num_bytes=matrices[0].values.nbytes + x.values_MK.nbytes + rows * width * x.dtype.itemsize,
        flops=2.0 * rows * width * depth,
        fp8=True,
    )


def quantise_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields the quantisation of each projection, which every weight update repeats for all layers."""
    for name, (width, depth) in projections(operands.shape).items():
        weights = operands.weights(width, depth)
        out = BlockMatrix.poisoned(weights[0].shape, operands.device)

        def error(weights=weights, out=out) -> float:
            # The reference on a CPU: on a GPU torch divides by a constant by multiplying with its inverse,
            # which moves a scale by its last bit and some values across a rounding boundary.
            expected = BlockMatrix.poisoned(weights[0].shape, torch.device("cpu"))
            quantise_blocks(weights[0], out)
            quantise_blocks_reference(weights[0].cpu(), expected)
            return relative_error(out.dequantise().cpu(), expected.dequantise())

        yield KernelCase(
            kernel="quantise",
            size=f"{name} {width} x {depth}",
            copies=len(weights),
            run=lambda weights=weights, out=out: [quantise_blocks(w, out) for w in weights],
            run_torch=lambda weights=weights, out=out: [quantise_blocks_reference(w, out) for w in weights],
            error=error,
            tolerance=1e-6,
            num_bytes=weights[0].nbytes + out.values.nbytes,
        )
