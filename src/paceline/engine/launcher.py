"""Launches a pacer's decision for the running rows: a draft, and the step that verifies it."""

from bisect import bisect_left
from dataclasses import replace

import numpy as np

from paceline.engine.drafters import Drafters
from paceline.engine.graphs import StepRunner, buckets_up_to
from paceline.engine.outcomes import Batch
from paceline.engine.reservation import RESERVED_STEPS
from paceline.engine.sampling import StepVariant
from paceline.engine.settings import EngineSettings
from paceline.engine.step import StepStatus
from paceline.engine.step_timer import StepTimer
from paceline.pacing.strategy import Moment, Strategy


class Launcher:
    """Describes the next step as a `Moment`, and launches it."""

    def __init__(
        self, runner: StepRunner, drafters: Drafters, timer: StepTimer, settings: EngineSettings
    ) -> None:
        self.runner = runner
        self.drafters = drafters
        self.timer = timer
        self.how_to_verify = settings.verify
        self.buckets = buckets_up_to(settings.max_running)
        self._moment: Moment | None = None
        # Steps for which the moment is reused.
        self._steps_left = 0

    def bucket(self, rows: int) -> int:
        """Returns the batch size to which a step of `rows` rows is padded."""
        return self.buckets[bisect_left(self.buckets, rows)]

    def note_change(self) -> None:
        self._steps_left = 0

    def moment(self, batch: Batch, length: np.ndarray) -> Moment:
        """Returns the pacer's input; rebuilt when the batch changes, and every few steps.

        `length` is the known length of every slot's row.
        """
        self._steps_left -= 1
        if self._moment is None or self._steps_left < 0:
            context = float(length[batch.slots].mean())
            self._moment = Moment(
                len(batch), context, self.max_queries(self.bucket(len(batch))), batch.purpose.value
            )
            self._steps_left = RESERVED_STEPS - 1
        return self._moment

    def max_queries(self, bucket: int) -> int:
        return self.runner.memory.max_queries(bucket)

    def launch(self, batch: Batch, strategy: Strategy) -> StepStatus:
        """Launches the draft and the step of a strategy; marks in `timer` time each."""
        bucket = self.bucket(len(batch))
        captures = self.runner.capture_seconds
        self.timer.begin()
        if strategy.count:
            self.draft(bucket, strategy, batch.variant.truncates)
            self.timer.note_drafted()
        self.drafters.mark_behind(batch.slots, strategy.drafter)
        status = self.verify(bucket, strategy, batch.variant)
        if self.runner.capture_seconds != captures:
            self.timer.note_disturbance()
        return status

    def draft(self, bucket: int, strategy: Strategy, truncates: bool) -> None:
        drafter = self.drafters[strategy.drafter]
        self.runner.draft(bucket, drafter, strategy.count, truncates, strategy.tree)

    def verify(self, bucket: int, strategy: Strategy, variant: StepVariant) -> StepStatus:
        verify = self.drafters.verification(strategy, self.how_to_verify)
        return self.runner.run(
            bucket,
            strategy.queries,
            variant if verify is variant.verify else replace(variant, verify=verify),
            self.drafters[strategy.drafter] if strategy.tree else None,
            strategy.tree,
        )
