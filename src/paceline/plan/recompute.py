"""How much the learner recomputes: as little as the memory allows.

Every layer keeps the same activations, so the memory of a pass is linear in the number of recomputed layers:
two passes on the meta device give the number that is needed, and a third checks that it is enough.
"""

from collections.abc import Callable, Iterator

from paceline.policy.fused import EVERYTHING, Recompute


def choose_recompute(num_layers: int, room_bytes: int, pass_bytes: Callable[[Recompute], int]) -> Recompute:
    """Returns the first of these that fits, each slower than the one before:

    nothing, what lies between products, the fewest whole layers, everything (whether it fits or not).
    `pass_bytes` returns the bytes of a forward and backward pass.
    """
    for choice in (Recompute(between=False), Recompute()):
        if pass_bytes(choice) <= room_bytes:
            return choice
    for layers in _layers_to_try(num_layers, room_bytes, pass_bytes):
        choice = Recompute(layers)
        if pass_bytes(choice) <= room_bytes:
            return choice
    return EVERYTHING


def _layers_to_try(num_layers: int, room_bytes: int, pass_bytes: Callable[[Recompute], int]) -> Iterator[int]:
    none, every = pass_bytes(Recompute()), pass_bytes(Recompute(num_layers))
    if every > room_bytes:
        return
    share = (none - room_bytes) / max(1, none - every)
    # The layer being recomputed is held beside those that are kept, so the line may give one too few.
    first = min(num_layers, max(1, int(share * num_layers) + 1))
    yield from range(first, num_layers + 1)
