"""Router replay: in learning, tokens go to the experts that the rollout chose for them.

Rollout and learner compute the same scores with other kernels, other rounding, perhaps other weights, and
where two scores nearly tie a token is routed elsewhere: another function, not a rounding error. Rollout
routing replay (Ma et al. 2025, arXiv:2510.11370) keeps the rollout's choice of experts and computes their
weights from the learner's own scores.
"""

import torch

from paceline.types import Routing

# Stands for the experts of a token that the rollout never ran.
NOT_RECORDED = -1
# The type of an expert's number, by its bytes.
ITEM_TYPES = {1: torch.uint8, 2: torch.int16}


class RouterReplay:
    """The recorded experts of a packed batch; counts how often the router would have chosen otherwise.

    Shape letters: T tokens, L layers with experts, K experts per token.
    """

    def __init__(self, recorded_TLK: torch.Tensor) -> None:
        """Takes the experts of each token; where they are NOT_RECORDED the router decides."""
        self.recorded_TLK = recorded_TLK
        # By layer: one that activation checkpointing runs again counts once.
        self._rerouted_T: dict[int, torch.Tensor] = {}

    def check(self, layers: int, choices: int) -> None:
        recorded = tuple(self.recorded_TLK.shape[1:])
        if recorded != (layers, choices):
            raise ValueError(
                f"this policy chooses {choices} experts in each of {layers} layers; "
                f"the samples' routing was recorded for {recorded[1]} in {recorded[0]}: "
                "learn from samples that this policy made, or from samples without routing"
            )

    def choose(self, layer: int, own_TK: torch.Tensor) -> torch.Tensor:
        """Returns the experts to use; counts where the router's own choice `own_TK` differs."""
        recorded_TK = self.recorded_TLK[:, layer].to(own_TK.dtype)
        known_T1 = recorded_TK[:, :1] != NOT_RECORDED
        differs_T = (own_TK.sort(-1).values != recorded_TK.sort(-1).values).any(-1)
        self._rerouted_T[layer] = differs_T & known_T1.squeeze(1)
        return torch.where(known_T1, recorded_TK, own_TK)

    @property
    def routed(self) -> torch.Tensor:
        """The number of (token, layer) pairs that were replayed."""
        return (self.recorded_TLK[:, :, 0] != NOT_RECORDED).sum()

    @property
    def rerouted(self) -> torch.Tensor:
        """The number of those whose own set of experts is another; known after a forward pass."""
        return torch.stack(list(self._rerouted_T.values())).sum()


def packed_replay(
    routings: list[Routing | None], lengths: list[int], device: torch.device
) -> RouterReplay | None:
    """Returns the replay of sequences packed one after the other; None where none of them has routing."""
    known = [routing for routing in routings if routing is not None]
    if not known:
        return None
    recorded_TLK = torch.full(
        (sum(lengths), known[0].layers, known[0].choices), NOT_RECORDED, dtype=torch.int16
    )
    start = 0
    for routing, length in zip(routings, lengths, strict=True):
        if routing is not None:
            recorded_TLK[start : start + routing.tokens] = _experts(routing)
        start += length
    return RouterReplay(recorded_TLK.to(device))


def _experts(routing: Routing) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(routing.experts), dtype=ITEM_TYPES[routing.item_bytes])
    return flat.view(-1, routing.layers, routing.choices)
