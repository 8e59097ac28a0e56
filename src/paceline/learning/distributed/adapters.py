"""LoRA over shards: each rank merges its own rows of a projection, and keeps the base of these alone.

        weight of a fused projection, rows        adapters
        rank 0   q q q q                          B_q A_q
        rank 1   q k v v                          B_q A_q, B_k A_k, B_v A_v

Adapters are sharded as every parameter is; a merge gathers them, which is little beside the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.learning.distributed.sharding import local, rows_of, whole
from paceline.policy.decoder import Decoder
from paceline.policy.lora import AdaptedLinear, Adapter


def shard_bases(policy: Decoder, rank: int, count: int) -> None:
    """Leaves each rank its rows of the base that adapters are merged with."""
    for module in _adapted(policy):
        rows = rows_of(module.weight, rank, count)
        module.base = module.base[rows.start : rows.stop].clone()


@torch.no_grad()
def merge_sharded_adapters(policy: Decoder, rank: int, count: int) -> None:
    """Writes base plus adapters into each rank's rows of the weights; all ranks must call it at once."""
    for module in _adapted(policy):
        rows = rows_of(module.weight, rank, count)
        weight = local(module.weight)
        for adapter in module.adapters.values():
            assert isinstance(adapter, Adapter)
            a_RI, b_OR = whole(adapter.A), whole(adapter.B)
            start, stop = max(rows.start, adapter.start), min(rows.stop, adapter.stop)
            if start < stop:
                own = slice(start - rows.start, stop - rows.start)
                theirs = b_OR[start - adapter.start : stop - adapter.start]
                base = module.base[own].to(a_RI.dtype)
                weight[own].copy_(torch.addmm(base, theirs, a_RI, alpha=module.scale))


@contextmanager
def sharded_adapters_off(policy: Decoder, rank: int, count: int) -> Iterator[None]:
    """Computes with the base weights within the context; all ranks must enter it at once."""
    modules = list(_adapted(policy))
    with torch.no_grad():
        for module in modules:
            local(module.weight).copy_(module.base)
    try:
        yield
    finally:
        if modules:
            merge_sharded_adapters(policy, rank, count)


def _adapted(policy: Decoder) -> Iterator[AdaptedLinear]:
    return (module for module in policy.modules() if isinstance(module, AdaptedLinear))
