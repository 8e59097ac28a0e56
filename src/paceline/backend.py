"""The contract between the loop and whatever generates its completions.

    submit(requests) ──▶ completions() yields each one as it finishes ──▶ update_weights(version) ──▶ submit ...

More requests may be submitted while completions are being read. `pause` makes `completions` return early with
the rest outstanding; after `resume` it goes on, under new weights if there were any: the completion then has
a segment per version. Noise depends on seed and absolute position only, so a sequence is continued by a
request with the same seed whose prompt is everything so far, and a request that is run again anywhere gives
the same tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from paceline.pacing.strategy import Pacer
from paceline.policy.attention import AttentionObserver
from paceline.stats import RolloutStats
from paceline.types import Completion, Request

BASE_PRECISION = "bf16"  # the recipe's name for rollouts in the policy's own type, whichever that is


class WeightsNotFinite(RuntimeError):
    """The policy's weights cannot be brought into the rollout's precision; the message says which."""


class Backend(Protocol):
    pacer: Pacer | None  # who chooses its strategies; None: nobody has to

    @property
    def precision(self) -> str:
        """What completions are computed in now, as the recipe names it; anything but `BASE_PRECISION` can be
        fallen back from.
        """

    def submit(self, requests: Sequence[Request]) -> None: ...

    def completions(self) -> Iterator[Completion]: ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with `FinishReason.ABORTED`; they are still yielded, with what they have."""

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """`weights` under Hugging Face names; None where the learner wrote into the storage this backend
        reads.

        A backend that converts them raises `WeightsNotFinite` where it cannot.
        """

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self) -> None:
        """Gives cache memory back; only while nothing is outstanding."""

    def wake(self) -> None: ...

    def training(self) -> AbstractContextManager[None]:
        """Within, somebody trains on the same device: nothing is done that this would disturb, such as
        capturing a graph.
        """

    def take_stats(self) -> RolloutStats: ...

    @property
    def attention_observer(self) -> AttentionObserver | None:
        """For the learner's forward passes, where this backend calibrates with what they compute."""

    @property
    def trainable_head(self) -> nn.Module | None:
        """A drafter's, for whoever trains it: where it lies is where proposals are computed from."""

    def drafter_state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep beside the policy: what drafters have learned, and KV scales; empty
        where there is nothing.
        """

    def load_drafter_state(self, tensors: dict[str, torch.Tensor]) -> None: ...

    def fall_back_to_base_precision(self) -> None:
        """From now on `BASE_PRECISION`, with the weights of the current version. Only while nothing is
        outstanding.
        """

    def close(self) -> None: ...
