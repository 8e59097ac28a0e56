"""FSDP2 over a decoder: every layer is a unit, embedding, last norm and head are another.

A parameter's rows are distributed over the ranks in blocks (`torch.chunk`); a rank keeps its own, with the
optimiser's state of them, and a unit's full parameters exist only while it computes. They are then plain
tensors, so the policy's own kernels take them, and gradients of all ranks are added up in float32 or wider
before each keeps its rows.

The head is used after the last layer, by what computes logprobs; so the root unit is not the decoder but
`PolicyRoot`, whose forward pass ends with them.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from paceline.learning.batch import MicroBatch
from paceline.learning.ranks import Logprobs
from paceline.policy.decoder import Decoder


class PolicyRoot(nn.Module):
    """A policy whose parameters lie on all ranks; all must call it at once."""

    def __init__(self, policy: Decoder) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, logprobs: Logprobs, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs(self.policy, batch)


class ShardedForward:
    """What `PolicyRoot` computes; without a backward pass to come, nothing stays unsharded."""

    def __init__(self, root: PolicyRoot) -> None:
        self.root = root

    def __call__(self, logprobs: Logprobs, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.root(logprobs, batch)
        if not torch.is_grad_enabled():
            assert isinstance(self.root, FSDPModule)
            self.root.reshard()
        return result


def shard_policy(policy: Decoder, mesh: DeviceMesh) -> ShardedForward:
    """Leaves each rank its rows of every parameter, on the mesh's device, and returns what computes with all.

    A policy on the CPU moves to a GPU one layer at a time, so no more than a layer and the shards are there.
    """
    root = PolicyRoot(policy)
    # bf16 gradients of many ranks would lose what they have in common.
    reduced = torch.float32 if policy.dtype == torch.bfloat16 else None
    precision = MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
        register_fsdp_forward_method(layer, "run")
    fully_shard(root, mesh=mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # the sum of all, not their mean: losses are normalised globally
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    policy.rope_table = policy.rope_table.to(mesh.device_type)
    return ShardedForward(root)


def rows_of(tensor: torch.Tensor, rank: int, count: int) -> range:
    """Returns which rows of a sharded tensor a rank holds; of any other all."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[0])
    size = -(-tensor.shape[0] // count)
    start = min(rank * size, tensor.shape[0])
    return range(start, min(start + size, tensor.shape[0]))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows, in the storage that FSDP reads; a tensor that is not sharded as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all rows, on every rank; all must call it at once."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
