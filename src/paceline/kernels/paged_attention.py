"""Attention of a few new queries per row over the paged KV cache: decoding (Q = 1), verification (Q = k + 1).

Query j of row r sits at absolute position context_len[r] + j and attends to keys 0 .. context_len[r] + j; a
row with context_len < 0 is inactive and gives zeros. The caches are [num_blocks, block_size, num_kv_heads,
head_dim]. Queries that are nodes of a tree (`TreeKeys`) sit at context_len[r] + their depth, and each has
keys of its own from context_len[r] on (tree_attention.py).

A query's bits depend on its own sequence only, not on the batch, on Q, or on whether a prefill kernel
computed it (attention_tiles.py). With many rows one program walks its whole row and folds in registers. With
fewer, programs are spread over the rows in proportion to their lengths (paged_launch.py), those of one row
share its groups, and a second kernel folds their partial results (attention_combine.py). Both fold the same
numbers in the same order. Queries and the heads of a GQA group are packed into a tile's rows.

Of a tree with a long text before it, programs of many nodes take the groups that all of them share, so that
these are read once, and programs of few the nodes' own:

    few rows      far: partial results of groups      near: the same      combined
    many rows     far: folds its whole row            near: continues from there
"""

from dataclasses import dataclass

import torch

from paceline.kernels.attention_combine import AttentionOutput, Partials, combine_partials
from paceline.kernels.attention_reference import attend_reference
from paceline.kernels.attention_shapes import Heads
from paceline.kernels.attention_tiles import GROUP, LOG2E, AttentionShape
from paceline.kernels.fp8_format import E4M3, QuantisedRows
from paceline.kernels.fp8_format import GROUP as QUANTISED_GROUP
from paceline.kernels.fp8_quantise import quantise_rows
from paceline.kernels.operation import cdiv, next_power_of_2, reference_of
from paceline.kernels.paged_kernel import paged_attention_kernel
from paceline.kernels.paged_launch import Launch, plan_attention
from paceline.kernels.query_tiles import decode_tiles
from paceline.kernels.row_step import TreeKeys
from paceline.kernels.triton_support import multiprocessors


@dataclass(frozen=True)
class _Call:
    """What the kernel reads and writes, however the work is cut up."""

    q_RQHD: torch.Tensor
    # Caches and their scales.
    cache: tuple[torch.Tensor | None, ...]
    block_table_RB: torch.Tensor
    context_len_R: torch.Tensor
    # Positions from the context on that queries may sit at.
    reach: int
    out: AttentionOutput
    # Where several programs share a row, or two see to it in turn.
    partials: Partials | None
    # Whether several share it.
    shared: bool

    def shape(self, rows: int) -> AttentionShape:
        """Returns what the kernel is compiled for, with `rows` pairs of a query and a head per program."""
        num_heads, head_dim = self.q_RQHD.shape[2:]
        k_cache = self.cache[0]
        block_size, num_kv_heads = k_cache.shape[1:3]
        gqa = next_power_of_2(num_heads // num_kv_heads)
        return AttentionShape(num_heads, num_kv_heads, head_dim, block_size, rows, gqa, k_cache.dtype == E4M3)

    def run(
        self, rows: int, launch: Launch, tree: TreeKeys | None, far: bool = False, near: bool = False
    ) -> None:
        num_rows, num_queries = self.q_RQHD.shape[:2]
        k_cache, v_cache, *scales = self.cache
        shape = self.shape(rows)
        row_tiles = num_rows * cdiv(num_queries, rows // shape.padded_gqa)
        paged_attention_kernel[(shape.kv_heads, row_tiles, launch.programs)](
            self.q_RQHD,
            (k_cache, v_cache.view(torch.int16) if shape.fp8 else v_cache, *scales),
            self.block_table_RB,
            self.context_len_R,
            tree,
            self.out.pointers,
            self.partials,
            num_rows,
            num_queries,
            self.reach,
            self.block_table_RB.shape[1],
            0 if self.partials is None else self.partials.max_groups,
            launch.resident_programs(shape.fp8, multiprocessors(self.q_RQHD.device)),
            self.out.padded_rows,
            shape.head_dim**-0.5 * LOG2E,
            SHAPE=shape,
            SHARED=self.shared,
            FAR=far,
            NEAR=near,
            **launch.options(rows, shape.head_dim, self.q_RQHD.itemsize, k_cache.itemsize),
        )


def paged_attention_triton(
    q_RQHD,
    k_cache,
    v_cache,
    block_table_RB,
    context_len_R,
    k_scale_H=None,
    v_scale_H=None,
    tree=None,
    quantise=False,
    launch=None,
):
    """Launches the kernels; `quantise` wants heads of 128 dimensions, those of a quantised group."""
    num_rows, num_queries, num_heads, _ = q_RQHD.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    fp8 = k_cache.dtype == E4M3
    max_groups = cdiv(block_table_RB.shape[1] * block_size, GROUP)
    processors = multiprocessors(q_RQHD.device)
    plan = plan_attention(
        num_rows, num_queries, num_heads, num_kv_heads, max_groups, processors, tree is not None, fp8, launch
    )
    out = AttentionOutput.empty(q_RQHD, quantise)
    results = plan.results(max_groups)
    partials = Partials.empty(q_RQHD, results) if results else None
    cache = k_cache, v_cache, k_scale_H, v_scale_H
    reach = num_queries if tree is None else tree.slots_RQD.shape[2]
    call = _Call(q_RQHD, cache, block_table_RB, context_len_R, reach, out, partials, plan.shared)
    if plan.far is not None:
        call.run(plan.far_rows, plan.far, None, far=True)
    call.run(plan.rows, plan.launch, tree, near=plan.far is not None)
    if plan.shared:
        assert partials is not None
        depth_RQ = None if tree is None else tree.depth_RQ
        combine_partials(partials, context_len_R, depth_RQ, v_scale_H, out, call.shape(plan.rows))
    return out.result


@reference_of(paged_attention_triton)
def paged_attention(
    q_RQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
    tree: TreeKeys | None = None,
) -> torch.Tensor:
    """Returns the attention of `q [R, Q, Hq, D]` with scale 1 / sqrt(D), in the same shape.

    The new tokens' K and V are already in the cache. `block_table_RB` is int32; `context_len_R` is the
    absolute position of each row's first query, or of the root of its `tree`; negative for an inactive row.
    """
    _, num_queries, num_heads, head_dim = q_RQHD.shape
    heads = Heads.of(num_heads, k_cache.shape[2], head_dim, q_RQHD.dtype)
    tiles = decode_tiles(heads, k_cache.shape[1], num_queries, block_table_RB, context_len_R, tree)
    out_THD = attend_reference(q_RQHD.flatten(0, 1), tiles, k_cache, v_cache, k_scale_H, v_scale_H)
    return out_THD.view(q_RQHD.shape)


def paged_attention_quantised(
    q_RQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
    tree: TreeKeys | None = None,
) -> QuantisedRows:
    """Returns `paged_attention`'s heads side by side, `[R x Q, Hq x D]`, as an FP8 product takes them."""
    inputs = q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, k_scale_H, v_scale_H, tree
    if q_RQHD.is_cuda and q_RQHD.shape[-1] == QUANTISED_GROUP:
        return paged_attention_triton(*inputs, quantise=True)
    out_RQHD = paged_attention(*inputs)
    return quantise_rows(out_RQHD.flatten(0, 1).flatten(1))
