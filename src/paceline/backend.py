"""The contract between the RL loop and whatever generates its completions.

    submit(requests) ──▶ completions() yields each as it finishes ──▶ update_weights(version) ──▶ submit ...

More requests may be submitted while completions are being read. `pause` makes `completions` return early with
the rest outstanding; after `resume` it goes on, under new weights if there were any: the completion then has
a segment per weight version. Sampling noise depends on seed and absolute position only, so a sequence is
continued by a request with the same seed whose prompt is everything so far, and a request that is run again
anywhere gives the same tokens. A generator with noise of its own cannot promise that; the loop then still
learns from what was sampled, since every completion carries the logprobs of its tokens.

What is required: completions as `types.Completion` describes them (full-vocabulary logprobs at the request's
temperature, a segment per weight version) and the abstract methods of `Backend`. Statistics may stay empty.

What only some can do is a capability that a generator declares: `speculation` (its drafters can be watched,
saved and taught), `low_precision` (it computes below the policy's own type and can stop doing so) and
`slice_trainer` (it can train its drafter while it has nothing to generate). A generator without one says None
and implements nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from paceline.pacing.strategy import Pacer
from paceline.policy.attention import AttentionObserver
from paceline.policy.states import TextStates
from paceline.stats import RolloutStats
from paceline.types import Completion, Precision, Request


class WeightsNotFinite(RuntimeError):
    """Raised when the policy's weights cannot be brought into the rollout's precision; says which."""


class Speculation(Protocol):
    """A generator's speculative decoding: who chooses strategies, and what its drafters know."""

    pacer: Pacer | None  # set to None, every step decodes plainly

    @property
    def keeps_tokens(self) -> bool:
        """Whether completions are the same tokens with and without speculation."""

    @property
    def trainable_head(self) -> nn.Module | None:
        """The head that proposals are computed from, if it lies in this process: a trainer copies it."""

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes a trained head over, by copy: the only way that one gets here.

        It stays through sleep, new weights of the policy and changes of precision; statistics carry its
        version.
        """

    def record_states(self, max_bytes: int) -> None:
        """Begins to keep the policy's states of some running requests, within so many bytes of the device.

        Called before anything is generated; a generator that cannot keep any does nothing.
        """

    def want_states(self, wanted: bool) -> None:
        """Says whether requests that begin from now on are worth recording; at first they are."""

    def take_states(self) -> Mapping[tuple[int, ...], TextStates]:
        """Returns the states kept of responses that finished since the last call, by prompt and response."""

    def drafter_state(self) -> dict[str, torch.Tensor]:
        """Returns what drafters have learned, for a checkpoint."""

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `drafter_state` returned; keys of drafters that are not here are ignored."""


class LowPrecision(Protocol):
    """A generator that computes below the policy's own type, and can go back to it."""

    @property
    def attention_observer(self) -> AttentionObserver | None:
        """Sees q, k and v of the learner's forward passes, where KV scales are calibrated with them."""

    def fall_back_to_base_precision(self) -> None:
        """Switches to `Precision.BASE` with the current weights; only while nothing is outstanding."""

    def calibration_state(self) -> dict[str, torch.Tensor]:
        """Returns the scales that a resumed run must sample with."""

    def load_calibration_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `calibration_state` returned."""


class SliceTrainer(Protocol):
    """A generator that can train its drafter in time that nobody needs, in slices that end at once.

    It trains a copy: what drafts changes by `publish_drafter` alone.
    """

    tokens: float  # learned from in this term
    updates: int  # of the optimiser, in this term

    def begin(self, term: int, start: Mapping[str, torch.Tensor] | None = None) -> None:
        """Begins a term, or goes on with the one at hand.

        It begins from `start`, or from the weights that were published last.
        """

    def slice(self, should_stop: Callable[[], bool]) -> bool:
        """Trains until `should_stop`, which is to be asked every few milliseconds; False: nothing is left."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights that the term came to."""

    def take_head(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes what was published, which the next term begins from."""

    def note_weights(self, version: int) -> None:
        """Hears that the policy is about to get other weights."""

    def quality(self, weights: Mapping[str, torch.Tensor]) -> float | None:
        """Returns how well a drafter of these weights does along the newest texts; None: there are none."""


class Backend(ABC):
    """Turns requests into completions: the native engine, the reference, vLLM, a worker, a pool of those."""

    @property
    @abstractmethod
    def precision(self) -> Precision:
        """The precision that completions are computed in now."""

    @property
    def speculation(self) -> Speculation | None:
        """The capability to speculate; None where nothing ever proposes tokens."""
        return None

    @property
    def low_precision(self) -> LowPrecision | None:
        """The capability to fall back to the policy's own type; None while that is what it computes in."""
        return None

    @property
    def slice_trainer(self) -> SliceTrainer | None:
        """The capability to train the drafter while there is nothing to generate; None: it cannot."""
        return None

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. One that can never run ends with `FinishReason.REFUSED` and the reason."""

    @abstractmethod
    def completions(self) -> Iterator[Completion]:
        """Yields each completion as it finishes, until nothing is outstanding or `pause` was called."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with `FinishReason.ABORTED`; they are still yielded, with what they have."""

    @abstractmethod
    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Takes new weights under Hugging Face names; None where the learner wrote into shared storage.

        The loop passes None: in one process the generator reads the learner's own parameters. A generator
        that converts them raises `WeightsNotFinite` where it cannot.
        """

    @abstractmethod
    def pause(self) -> None:
        """Makes `completions` return before its next step; may be called from another thread."""

    @abstractmethod
    def resume(self) -> None:
        """Lets `completions` go on."""

    @abstractmethod
    def take_stats(self) -> RolloutStats:
        """Returns what was done since the last call, and starts counting anew."""

    def live_stats(self) -> RolloutStats | None:
        """Returns the statistics being counted now, to look at from another thread; None: unknown."""
        return None

    def text_logprobs(self, tokens: Sequence[int]) -> list[float] | None:
        """Returns the logprobs of a text's tokens but the first, at temperature 1; None: it cannot say."""
        return None

    def admission_state(self) -> dict[str, torch.Tensor]:
        """Returns what decides who starts first, for a checkpoint; empty: only who came first does."""
        return {}

    def load_admission_state(self, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Restores what `admission_state` returned."""

    @abstractmethod
    def close(self) -> None:
        """Drops everything that is outstanding and releases what is held."""

    def sleep(self) -> None:  # noqa: B027 - optional: a generator on a device of its own has nothing to give
        """Gives cache memory back; what is outstanding computes its cache again."""

    def wake(self) -> None:  # noqa: B027
        """Takes the cache memory again."""

    def training(self) -> AbstractContextManager[None]:
        """Returns a context in which no CUDA graph is captured, because training uses the device."""
        return nullcontext()
