"""The contract between the RL loop and the generator of its completions.

    submit(requests) ──▶ completions() yields each as it finishes ──▶ update_weights(version) ──▶ submit ...

More requests may be submitted while completions are being read. `pause` makes `completions` return early with
the rest outstanding; after `resume` it continues, under new weights if they were updated: the completion then
has a segment per weight version. Sampling noise depends on seed and absolute position only, so a sequence is
continued by a request with the same seed whose prompt is everything so far, and a retried request gives the
same tokens anywhere. A generator with its own noise cannot promise that; the loop can still learn from what
was sampled, since every completion carries the logprobs of its tokens.

Required: completions as `types.Completion` describes them (full-vocabulary logprobs at the request's
temperature, a segment per weight version) and the abstract methods of `Backend`. Statistics may stay empty.

Optional features are capabilities, which a generator declares as properties: `speculation` (its drafters can
be observed, saved and trained), `low_precision` (it computes below the policy's own dtype and can fall back
to it) and `slice_trainer` (it can train its drafter while it is idle). A generator without a capability
returns None and implements none of its methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from paceline.pacing.strategy import Pacer
from paceline.policy.attention import AttentionObserver
from paceline.stats import RolloutStats
from paceline.types import Completion, Precision, Request


class WeightsNotFinite(RuntimeError):
    """Raised when the policy's weights cannot be converted to the rollout's precision; names them."""


class Speculation(Protocol):
    """The capability to speculate: the pacer that chooses strategies, and the state of the drafters."""

    pacer: Pacer | None  # setting it to None turns speculation off

    @property
    def keeps_tokens(self) -> bool:
        """Whether completions have the same tokens with and without speculation."""

    @property
    def trainable_head(self) -> nn.Module | None:
        """The draft head, for a trainer to copy; None where it lives in another process or there is none."""

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Installs a copy of a trained head's weights; the only way to change the head that drafts.

        The head survives `sleep`, weight updates of the policy and changes of precision. Statistics report
        its version.
        """

    def drafter_state(self) -> dict[str, torch.Tensor]:
        """Returns the learned state of the drafters, for a checkpoint."""

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `drafter_state` returned; keys of absent drafters are ignored."""


class LowPrecision(Protocol):
    """The capability to compute below the policy's own dtype, and to fall back to it."""

    @property
    def attention_observer(self) -> AttentionObserver | None:
        """Receives q, k and v of the learner's forward passes to calibrate KV scales; None: not needed."""

    def kv_scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the scales of a layer's K and V in the cache, for the learner; None: not in E4M3."""

    def in_base_precision(self) -> AbstractContextManager[None]:
        """Computes in the policy's own dtype while the context is open. No request may be outstanding."""

    def fall_back_to_base_precision(self) -> None:
        """Switches to `Precision.BASE` with the current weights. No request may be outstanding."""

    def calibration_state(self) -> dict[str, torch.Tensor]:
        """Returns the scales that a resumed run must sample with, for a checkpoint."""

    def load_calibration_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `calibration_state` returned."""


class SliceTrainer(Protocol):
    """The capability to train the drafter in idle time, in slices that return promptly.

    It trains a copy: only `publish_drafter` changes the head that drafts.
    """

    tokens: float  # trained on in this term
    updates: int  # optimiser steps in this term
    overlap: float  # of the head with the policy that they saw, in all

    def begin(self, term: int) -> None:
        """Begins a term from the weights published last, or continues it if `term` is the current one."""

    def slice(self, should_stop: Callable[[], bool]) -> bool:
        """Trains until `should_stop`, polled every few milliseconds; returns whether any work is left."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights trained in this term."""

    def take_head(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Called with newly published weights, which the next term starts from."""

    def note_weights(self, version: int) -> None:
        """Called before the policy is updated to `version`, to which later states belong."""


class Backend(ABC):
    """Turns requests into completions: the native engine, the reference, vLLM, a worker, a worker pool."""

    @property
    @abstractmethod
    def precision(self) -> Precision:
        """The precision in which completions are currently computed."""

    @property
    def speculation(self) -> Speculation | None:
        """The capability to speculate; None where no drafter ever proposes tokens."""
        return None

    @property
    def low_precision(self) -> LowPrecision | None:
        """The capability to fall back to the policy's own dtype; None while it already computes in it."""
        return None

    @property
    def slice_trainer(self) -> SliceTrainer | None:
        """The capability to train the drafter in idle time; None: it cannot."""
        return None

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. One that can never run finishes with `FinishReason.REFUSED` and `error` set."""

    @abstractmethod
    def completions(self) -> Iterator[Completion]:
        """Yields each completion as it finishes, until no request is outstanding or `pause` is called."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Aborts queued and running requests, and releases the caches of held ones.

        Aborted requests are still yielded, with `FinishReason.ABORTED` and the tokens sampled so far.
        """

    @abstractmethod
    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Updates the weights, given under Hugging Face names; None: the learner wrote into shared storage.

        The loop passes None: in one process the generator reads the learner's own parameters. A generator
        that converts weights raises `WeightsNotFinite` where it cannot.
        """

    @abstractmethod
    def pause(self) -> None:
        """Makes `completions` return before its next step; may be called from another thread."""

    @abstractmethod
    def resume(self) -> None:
        """Lets `completions` continue."""

    @abstractmethod
    def take_stats(self) -> RolloutStats:
        """Returns the statistics since the last call, and resets them."""

    def live_stats(self) -> RolloutStats | None:
        """Returns the statistics being counted, for reading from another thread; None: unavailable."""
        return None

    def text_logprobs(self, tokens: Sequence[int]) -> list[float] | None:
        """Returns the logprobs of all tokens but the first, at temperature 1; None: unsupported."""
        return None

    def admission_state(self) -> dict[str, torch.Tensor]:
        """Returns the state that orders waiting requests, for a checkpoint; empty: first in, first out."""
        return {}

    def load_admission_state(self, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Restores what `admission_state` returned."""

    @abstractmethod
    def close(self) -> None:
        """Drops all outstanding requests and releases memory, processes and connections."""

    def sleep(self) -> None:  # noqa: B027 - optional: a generator on its own device has nothing to release
        """Releases cache memory; outstanding requests recompute their cache after `wake`."""

    def wake(self) -> None:  # noqa: B027
        """Allocates the cache memory again."""

    def training(self) -> AbstractContextManager[None]:
        """Returns a context in which no CUDA graph is captured, because training uses the device."""
        return nullcontext()
