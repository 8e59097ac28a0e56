"""Watches rollouts in low precision and ends them when they cannot be trusted; stops a run whose updates keep
failing.

    rollout ──check_rollouts──▶ learner's forward ──check_mismatch──▶ update ──check_update──▶ end_step

In low precision each check raises `UnsafeRollouts` before the weights have moved: a logprob, loss or gradient
that is not finite, a mismatch above `rollout.sentinel.kl`, or every response at the length limit for
`rollout.sentinel.capped_steps` steps. The loop then falls back to base precision for the rest of the run and
makes the step again from the same problems and seeds, so the step that counts is the one base precision would
have made.

In base precision there is nothing to fall back to. An update that is not finite has been skipped by the
learner; after `FAILED_STEPS` such steps in a row the run stops and names the checkpoint to go on from.
Meanwhile none is saved: weights that an update has blown up make every later step fail, and their checkpoints
would push out the last sound one.

What it remembers between steps is in the checkpoint (`TrainingState`), so a resumed run decides as the whole
one would.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.backend import BASE_PRECISION, Backend
from paceline.config import SentinelConfig
from paceline.learning.checkpoint import TrainingState
from paceline.learning.mismatch import Mismatch
from paceline.types import Completion, Group

FAILED_STEPS = (
    2  # one may be a freak batch; weights are untouched, so the same again means the next will fail as well
)


class UnsafeRollouts(Exception):
    """Low-precision rollouts that must not be learned from; the message says why."""


class TrainingFailed(RuntimeError):
    """Updates keep failing, or have spoilt the weights; the message says where to go on from."""


class Sentinel:
    def __init__(
        self,
        config: SentinelConfig,
        backend: Backend,
        state: TrainingState,
        live: bool,
        warn: Callable[[str], None],
    ) -> None:
        """`live`: this run's samples come from the backend; with samples from files there is nothing to fall
        back to.
        """
        self.config = config
        self.backend = backend
        self.live = live
        self.warn = warn
        self.fallback = state.fallback
        self.capped_steps = state.capped_steps
        self.failed_steps = 0  # after a failed step no checkpoint is saved, so no run resumes behind one
        self._capped = False
        if self.fallback and self.armed:
            backend.fall_back_to_base_precision()

    @property
    def armed(self) -> bool:
        return self.live and self.backend.precision != BASE_PRECISION

    def check_rollouts(self, groups: Sequence[Group]) -> None:
        completions = [sample.completion for group in groups for sample in group.samples]
        self._capped = all(completion.truncated for completion in completions)
        if not self.armed:
            return
        poisoned = sum(not _finite(completion) for completion in completions)
        if poisoned:
            raise UnsafeRollouts(
                f"{poisoned} of {len(completions)} responses have logprobs that are not finite"
            )
        if self._capped and 0 < self.config.capped_steps <= self.capped_steps + 1:
            raise UnsafeRollouts(
                f"all responses reached the length limit for {self.capped_steps + 1} steps in a row"
            )

    def check_mismatch(self, mismatch: Mismatch) -> None:
        """Called by the learner before the weights move."""
        if not self.armed:
            return
        if not mismatch.finite:
            raise UnsafeRollouts(
                f"the learner finds {mismatch.not_finite:.0f} of {mismatch.tokens:.0f} tokens without a finite logprob"
            )
        if 0 < self.config.kl < mismatch.kl:
            raise UnsafeRollouts(
                f"mismatch/kl = {mismatch.kl:.3g} exceeds rollout.sentinel.kl = {self.config.kl:g}"
            )

    def check_update(self, step: int, metrics: dict[str, float]) -> None:
        failed = metrics["policy/nonfinite_updates"]
        if not failed or not self.armed:
            return
        reason = f"{failed:.0f} updates had a loss or gradient that is not finite"
        if metrics["policy/skipped"]:
            raise UnsafeRollouts(reason)
        self.fall_back(step, reason, again=False)  # other updates of the step were made, and stand

    def fall_back(self, step: int, reason: str, again: bool = True) -> None:
        then = "the step is made again" if again else "the updates that were sound stand"
        self.warn(
            f"SENTINEL, step {step}: {reason}. Rollouts go on in base precision instead of {self.backend.precision}; {then}"
        )
        self.backend.fall_back_to_base_precision()
        assert self.backend.precision == BASE_PRECISION, (
            f"the backend still rolls out in {self.backend.precision}"
        )
        self.fallback = f"step {step}: {reason}"

    def end_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """What the step leaves behind, once it is certain; its own metrics."""
        self.capped_steps = self.capped_steps + 1 if self._capped else 0
        if self._capped and self.fallback.startswith(f"step {step}: all responses"):
            self.warn(
                f"step {step}: in base precision, too, every response reached the length limit, so precision is not the cause; "
                "raise rollout.max_tokens, or set rollout.sentinel.capped_steps=0 in the next run"
            )
        failed = metrics["policy/nonfinite_updates"] > 0
        self.failed_steps = self.failed_steps + 1 if failed else 0
        if failed:
            self.warn(
                f"step {step}: a loss or gradient was not finite; the update was skipped, the weights are as they were, nothing is saved"
            )
        return {
            "rollout/fell_back": float(bool(self.fallback)),
            "policy/failed_steps": float(self.failed_steps),
        }

    def stop_if_hopeless(self, run: Path, checkpoints: Callable[[], list[Path]]) -> None:
        if self.failed_steps >= FAILED_STEPS:
            reason = f"{self.failed_steps} steps in a row had a loss or gradient that is not finite and left the weights alone"
            raise self.failure(reason, run, checkpoints())

    def failure(self, reason: str, run: Path, checkpoints: Sequence[Path]) -> TrainingFailed:
        """With the way out. `checkpoints` are older than the failures: nothing is saved after a step that
        failed.
        """
        if not checkpoints:
            return TrainingFailed(
                f"{reason}; there is no checkpoint yet: start again with a lower learning.lr, or with policy.dtype=float32"
            )
        # The last update before the first failure may be the one that spoilt the weights, and the newest
        # checkpoint of just that step.
        *earlier, newest = checkpoints
        start = " or ".join(
            f"policy.path={checkpoint / 'policy'}" for checkpoint in (newest, *reversed(earlier))
        )
        return TrainingFailed(
            f"{reason}; `paceline train --resume {run}` goes on from {newest}; if it fails there again, start a new run "
            f"from {start} or what this run began with, and with a lower learning.lr or policy.dtype=float32"
        )


def _finite(completion: Completion) -> bool:
    return all(
        math.isfinite(x)
        for x, sampled in zip(completion.logprobs, completion.loss_mask, strict=True)
        if sampled
    )
