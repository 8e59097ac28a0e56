"""Ends low-precision rollouts that cannot be trusted; stops a run whose updates keep failing.

    supervise:  roll out ──▶ logprobs finite? ──▶ learn ──▶ mismatch small? ──▶ update ──▶ update finite?

In low precision each check raises `UnsafeRollouts` before the weights have moved: a logprob, loss or gradient
that is not finite, a mismatch above `rollout.sentinel.kl`, or every response at the length limit for
`rollout.sentinel.capped_steps` steps. `supervise` then falls back to base precision for the rest of the run
and reruns the step from the same problems and seeds, so the step that counts is the one base precision would
have made.

A smaller mismatch ruins a run more quietly: clipping, bounds and rejection take the tokens on which rollout
and learner differ out of the update. How much of the advantages they take on policy, when nothing but the
mismatch makes them act, does not depend on the responses' length. Where it is more than
`rollout.sentinel.lost_signal` over LOST_SIGNAL_STEPS steps, the sentinel says so, and what to set.

In base precision there is nothing to fall back to. An update that is not finite has been skipped by the
learner; after `MAX_FAILED_STEPS` such steps in a row the run stops and names the checkpoint to resume from.
Meanwhile none is saved: weights that an update has blown up make every later step fail, and their checkpoints
would push out the last sound one.

Its state between steps is in the checkpoint (`TrainingState`), so a resumed run decides as an uninterrupted
one would.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.backend import Backend
from paceline.config import SentinelConfig
from paceline.learning.checkpoint import TrainingState
from paceline.learning.mismatch import Mismatch, MismatchCheck
from paceline.tasks.base import FAILED
from paceline.types import Completion, Group, Precision

# One failed step may be a freak batch. The weights are untouched, so after a second one the next fails, too.
MAX_FAILED_STEPS = 2

# Steps whose mean share of lost signal is judged.
LOST_SIGNAL_STEPS = 3

# Steps in a row of which no response was scored.
MAX_UNSCORED_STEPS = 3


class UnsafeRollouts(Exception):
    """Low-precision rollouts that must not be learned from; the message gives the reason."""


class TrainingFailed(RuntimeError):
    """Updates keep failing, or have spoilt the weights; the message names the checkpoint to resume from."""


class Sentinel:
    """Supervises the steps of one run."""

    def __init__(
        self,
        config: SentinelConfig,
        backend: Backend,
        state: TrainingState,
        live: bool,
        warn: Callable[[str], None],
        stop_rounding: Callable[[], None],
    ) -> None:
        """Falls back at once where the resumed run had; `live` is False where samples come from files.

        `stop_rounding` is called with it: the learner no longer rounds weights for rollouts.
        """
        self.config = config
        self.backend = backend
        self.live = live
        self.warn = warn
        self.stop_rounding = stop_rounding
        self.fallback = state.fallback
        self.capped_steps = state.capped_steps
        self.unscored_steps = 0
        self.failed_steps = 0  # after a failed step no checkpoint is saved, so no run resumes behind one
        self._capped = False
        self._lost: list[float] = []  # shares of the signal in the last steps
        self._said_lost = False
        self._mismatch = Mismatch()  # of the last update, before the weights moved
        if self.fallback and self.armed:
            stop_rounding()
            backend.low_precision.fall_back_to_base_precision()

    @property
    def armed(self) -> bool:
        """Whether there is anything to fall back from."""
        return self.live and self.backend.low_precision is not None

    @property
    def precision(self) -> Precision:
        """The current precision of rollouts, which after a fall-back is not the recipe's."""
        return self.backend.precision

    def supervise(
        self,
        step: int,
        roll_out: Callable[[], list[Group]],
        learn: Callable[[list[Group], MismatchCheck], dict[str, float]],
        rewind: Callable[[], None],
    ) -> tuple[list[Group], dict[str, float]]:
        """Runs one step of `roll_out` and `learn`, and returns its groups and metrics.

        Where low-precision rollouts turn out not to be trustworthy it calls `rewind` and reruns the step in
        base precision: the weights have not moved, so it is the same step. While it is `armed`, `learn` must
        have released the device when it returns: falling back builds another KV pool.
        """
        try:
            groups, metrics = self._attempt(step, roll_out, learn)
        except UnsafeRollouts as problem:
            self._fall_back(step, str(problem))
            rewind()
            groups, metrics = self._attempt(step, roll_out, learn)
        self._check_scores(step, groups)
        self._check_signal(step, metrics)
        return groups, metrics | self._close_step(step, metrics)

    def _attempt(
        self,
        step: int,
        roll_out: Callable[[], list[Group]],
        learn: Callable[[list[Group], MismatchCheck], dict[str, float]],
    ) -> tuple[list[Group], dict[str, float]]:
        groups = roll_out()
        self.check_rollouts(groups)
        metrics = learn(groups, self.check_mismatch)
        self.check_update(step, metrics)
        return groups, metrics

    def check_rollouts(self, groups: Sequence[Group]) -> None:
        """Raises `UnsafeRollouts` for logprobs that are not finite, or responses that never end."""
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

    def _check_scores(self, step: int, groups: Sequence[Group]) -> None:
        """Warns where no response of a step was scored; after `MAX_UNSCORED_STEPS` ends the run."""
        samples = [sample for group in groups for sample in group.samples]
        failed = [any(name.startswith(FAILED) for name in s.score.components) for s in samples]
        # A response that was cut off may have got its 0 without a call.
        called = [bad for bad, s in zip(failed, samples, strict=True) if bad or not s.completion.truncated]
        self.unscored_steps = self.unscored_steps + 1 if called and all(called) else 0
        if self.unscored_steps:
            problem = f"step {step}: every reward failed, so there is nothing to learn from"
            if self.unscored_steps >= MAX_UNSCORED_STEPS:
                raise TrainingFailed(
                    f"{problem}, for {self.unscored_steps} steps in a row; see rewards.log in the run "
                    "directory, mend the reward or its time_limit (task.rewards), and start again"
                )
            self.warn(f"{problem}; the run ends after {MAX_UNSCORED_STEPS} such steps")

    def check_mismatch(self, mismatch: Mismatch) -> None:
        """Raises `UnsafeRollouts` for too large a mismatch; the learner calls it before the weights move.

        Tokens that older weights sampled differ because of their age, so only those of the newest count.
        """
        self._mismatch = mismatch
        if not self.armed:
            return
        if not mismatch.finite:
            raise UnsafeRollouts(
                f"the learner finds {mismatch.not_finite:.0f} of {mismatch.tokens:.0f} tokens "
                "without a finite logprob"
            )
        if 0 < self.config.kl < mismatch.newest_kl:
            raise UnsafeRollouts(
                f"mismatch/kl = {mismatch.newest_kl:.3g} exceeds rollout.sentinel.kl = {self.config.kl:g}"
            )

    def check_update(self, step: int, metrics: dict[str, float]) -> None:
        """Raises `UnsafeRollouts` where every update of a step failed; falls back where some did."""
        failed = metrics["policy/nonfinite_updates"]
        if not failed or not self.armed:
            return
        reason = f"{failed:.0f} updates had a loss or gradient that is not finite"
        if metrics["policy/skipped"]:
            raise UnsafeRollouts(reason)
        self._fall_back(step, reason, again=False)  # other updates of the step were made, and stand

    def _check_signal(self, step: int, metrics: dict[str, float]) -> None:
        """Acts once where the mismatch takes too much of what the steps would have taught."""
        bound = self.config.lost_signal
        by_age = bool(self._mismatch.lag_metrics(step - 1))  # the age of samples costs signal, too
        if not self.armed or not bound or self._said_lost or by_age or "policy/lost_signal" not in metrics:
            return
        self._lost = [*self._lost, metrics["policy/lost_signal"]][-LOST_SIGNAL_STEPS:]
        lost = sum(self._lost) / len(self._lost)
        if len(self._lost) < LOST_SIGNAL_STEPS or lost <= bound:
            return
        self._said_lost = True
        reason = (
            f"{lost:.0%} of the steps' advantages were lost to the mismatch of rollout and learner "
            f"(policy/lost_signal; rollout.sentinel.lost_signal = {bound:g})"
        )
        if self.config.on_lost_signal == "fall_back":
            self._fall_back(step, reason, again=False)
            return
        self.warn(
            f"SENTINEL, step {step}: {reason}, so the run may learn little: set "
            "learning.correction.preset=token-tis, or learning.numerics=exact with "
            "rollout.deterministic=true, or rollout.precision=base"
        )

    def _fall_back(self, step: int, reason: str, again: bool = True) -> None:
        then = "the step is rerun" if again else "the updates that were sound stand"
        self.warn(
            f"SENTINEL, step {step}: {reason}. Rollouts continue in base precision instead of "
            f"{self.precision}; {then}"
        )
        self.stop_rounding()
        self.backend.low_precision.fall_back_to_base_precision()
        assert self.precision is Precision.BASE, f"the backend still rolls out in {self.precision}"
        self.fallback = f"step {step}: {reason}"

    def _close_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Updates the counters once the step is final, and returns the sentinel's own metrics."""
        self.capped_steps = self.capped_steps + 1 if self._capped else 0
        if self._capped and self.fallback.startswith(f"step {step}: all responses"):
            self.warn(
                f"step {step}: in base precision, too, every response reached the length limit, so precision "
                "is not the cause; raise rollout.max_tokens, or set rollout.sentinel.capped_steps=0 "
                "in the next run"
            )
        failed = metrics["policy/nonfinite_updates"] > 0
        self.failed_steps = self.failed_steps + 1 if failed else 0
        if failed:
            self.warn(
                f"step {step}: a loss or gradient was not finite; the update was skipped, "
                "the weights are as they were, nothing is saved"
            )
        by_lag = self._mismatch.lag_metrics(step - 1) if self.live else {}
        return by_lag | {
            "rollout/fell_back": float(bool(self.fallback)),
            "policy/failed_steps": float(self.failed_steps),
        }

    @property
    def stop_reason(self) -> str:
        """Why the run should stop; empty while it may continue."""
        if self.failed_steps < MAX_FAILED_STEPS:
            return ""
        return (
            f"{self.failed_steps} steps in a row had a loss or gradient that is not finite "
            "and left the weights alone"
        )


def training_failed(reason: str, resume: str, checkpoints: Sequence[Path]) -> TrainingFailed:
    """Returns the error that ends a run; `resume` is the command that continues it.

    `checkpoints` are older than the failures: nothing is saved after a step that failed.
    """
    if not checkpoints:
        return TrainingFailed(
            f"{reason}; there is no checkpoint yet: start again with a lower learning.lr, "
            "or with policy.dtype=float32"
        )
    # The last update before the first failure may be the one that spoilt the weights, and the newest
    # checkpoint of just that step.
    *earlier, newest = checkpoints
    start = " or ".join(f"policy.path={checkpoint / 'policy'}" for checkpoint in (newest, *reversed(earlier)))
    return TrainingFailed(
        f"{reason}; `{resume}` continues from {newest}; if it fails there again, "
        f"start a new run from {start} or what this run began with, and with a lower learning.lr or "
        "policy.dtype=float32"
    )


def _finite(completion: Completion) -> bool:
    return all(
        math.isfinite(logprob)
        for logprob, sampled in zip(completion.logprobs, completion.loss_mask, strict=True)
        if sampled
    )
