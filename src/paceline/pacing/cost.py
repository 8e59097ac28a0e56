"""The seconds of a step: the policy's part, the drafter's part, and catching up after a switch.

`verify_times.py` estimates the policy's part. Drafters have times of their own, by the tokens they propose
and the bucket. A drafter that has not run may first have to catch up on the tokens decoded without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from paceline.pacing.blocks import Block
from paceline.pacing.settings import DEFAULT_TUNING, PacingTuning
from paceline.pacing.strategy import PLAIN
from paceline.pacing.time_estimate import TimeEstimate
from paceline.pacing.verify_times import VerifyTimes


class CostModel:
    """The expected seconds of every possible next step."""

    def __init__(
        self,
        buckets: Sequence[int],
        queries: Sequence[int],
        catch_up: Mapping[str, float] | None = None,
        tuning: PacingTuning = DEFAULT_TUNING,
    ) -> None:
        """`catch_up`: by drafter, its work to catch up on a token over the policy's work for it."""
        self.catch_up = catch_up or {}
        self.verify_times = VerifyTimes(buckets, queries, tuning)
        self._tuning = tuning
        # By drafter, then by (tokens proposed, bucket).
        self._drafts: dict[str, dict[tuple[int, int], TimeEstimate]] = {}
        self._switches: dict[str, TimeEstimate] = {}

    # -- Commands --------------------------------------------------------------------------------------------

    def update(self, block: Block) -> None:
        """Updates with the times of a block: its clean steps, and catching up beyond an expected step."""
        strategy = block.strategy
        clean = len(block.clean)
        if clean:
            self.update_verify(
                block.running, strategy.queries, block.context, block.median_verify_seconds, clean
            )
            if strategy.count:
                self.update_draft(
                    strategy.drafter, strategy.count, block.running, block.median_draft_seconds, clean
                )
        for seconds in block.switch_step_seconds:
            verify = self.verify_seconds(block.running, strategy.queries, block.context)
            draft = self.draft_seconds(strategy.drafter, [strategy.count], block.running)[0]
            self.update_switch(strategy.drafter, seconds - float(verify + draft))

    def update_verify(
        self, running: int, queries: int, context: float, seconds: float, steps: int = 1
    ) -> None:
        """Updates with the median seconds of the policy's part over `steps` like steps."""
        self.verify_times.update(running, queries, context, seconds, steps)

    def update_draft(self, drafter: str, count: int, running: int, seconds: float, steps: int = 1) -> None:
        """Updates with the median seconds in which `drafter` proposed `count` tokens, over `steps` steps."""
        estimates = self._drafts.setdefault(drafter, {})
        estimate = estimates.setdefault((count, self.verify_times.bucket(running)), TimeEstimate())
        estimate.update(seconds, 0.0, steps, self._tuning)

    def update_switch(self, drafter: str, seconds: float) -> None:
        estimate = self._switches.setdefault(drafter, TimeEstimate())
        estimate.update(max(0.0, seconds), 0.0, self._tuning.switch_weight_steps, self._tuning)

    def clear(self) -> None:
        """Drops all times: later steps take different ones."""
        self.verify_times = VerifyTimes(self.verify_times.buckets, self.verify_times.queries, self._tuning)
        self._drafts.clear()
        self._switches.clear()

    # -- Queries ---------------------------------------------------------------------------------------------

    @property
    def knows_times(self) -> bool:
        return self.verify_times.knows_times

    def is_measured(self, running: int, queries: int, context: float) -> bool:
        return self.verify_times.is_measured(running, queries, context)

    def verify_seconds(self, running: int, queries: int, context: float) -> float:
        """Returns the seconds of the policy's part of a step; 0 before any measurement."""
        return self.verify_times.seconds_of(running, queries, context)

    def plain_seconds(self, running: int, context: float) -> float:
        """Returns the seconds of a step of plain decoding; 0 before any measurement."""
        return self.verify_times.seconds_of(running, PLAIN.queries, context)

    def draft_seconds(
        self, drafter: str, counts: Sequence[int], running: int, at_worst: bool = False
    ) -> np.ndarray:
        """Returns the seconds to propose each of `counts` tokens; zeros for a drafter that has never run.

        Beyond the longest proposal that has run, time is extrapolated linearly. From one point alone it stays
        level, as for a drafter that copies, or with `at_worst` rises in proportion, as for one that runs once
        per token.
        """
        estimates = self._drafts.get(drafter)
        if not estimates:
            return np.zeros(len(counts))
        bucket = self.verify_times.bucket(running)
        known = sorted({count for count, _ in estimates})
        nearest_seconds = []
        for count in known:
            buckets = (b for c, b in estimates if c == count)
            nearest = min(buckets, key=lambda b: (abs(np.log(b / bucket)), b))
            nearest_seconds.append(estimates[count, nearest].seconds)
        seconds = np.maximum.accumulate(nearest_seconds)
        slope = seconds[-1] / known[-1] if at_worst else 0.0
        if len(known) > 1:
            slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        wanted = np.asarray(counts, dtype=float)
        return np.interp(wanted, known, seconds) + slope * np.maximum(0.0, wanted - known[-1])

    def has_drafted(self, drafter: str) -> bool:
        return drafter in self._drafts

    def switch_seconds(self, drafter: str, running: int, context: float) -> float:
        """Returns the seconds of catching up when this drafter is switched to.

        Until that was measured, the worst is assumed: the drafter decodes every cached token again.
        """
        estimate = self._switches.get(drafter)
        if estimate is not None:
            return estimate.seconds
        return self.catch_up.get(drafter, 0.0) * context * self.plain_seconds(running, context)

    # -- State -----------------------------------------------------------------------------------------------

    def state(self) -> dict:
        return {
            "verify": self.verify_times.state(),
            "drafts": [
                {"drafter": name, "count": count, "bucket": bucket, "time": asdict(estimate)}
                for name, estimates in self._drafts.items()
                for (count, bucket), estimate in estimates.items()
            ],
            "switches": [
                {"drafter": name, "time": asdict(estimate)} for name, estimate in self._switches.items()
            ],
        }

    def load_state(self, state: dict) -> None:
        self.verify_times.load_state(state["verify"])
        for entry in state["drafts"]:
            estimates = self._drafts.setdefault(entry["drafter"], {})
            estimates[entry["count"], entry["bucket"]] = TimeEstimate(**entry["time"])
        for entry in state["switches"]:
            self._switches[entry["drafter"]] = TimeEstimate(**entry["time"])
