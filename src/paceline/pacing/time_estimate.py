"""A running estimate of one time: medians of blocks of steps, averaged with weights that fade."""

from dataclasses import dataclass

from paceline.pacing.settings import PacingTuning


@dataclass
class TimeEstimate:
    """An estimate of the seconds of a step, of a draft or of catching up."""

    seconds: float = 0.0
    # Cached tokens that steps attended to on average (rows times mean context); 0 where it does not matter.
    load: float = 0.0
    # Steps behind the estimate, at most `estimate_steps`.
    steps: float = 0.0
    # Steps that all estimates together had seen when this one was last updated.
    updated_at: int = 0

    def update(self, seconds: float, load: float, steps: int, tuning: PacingTuning) -> None:
        """Updates the average with `seconds`, the median over `steps` steps."""
        if self.steps and steps < tuning.trusted_block_steps:
            seconds = min(seconds, tuning.outlier_factor * self.seconds)
        share = steps / (self.steps + steps)
        self.seconds += share * (seconds - self.seconds)
        self.load += share * (load - self.load)
        self.steps = min(tuning.estimate_steps, self.steps + steps)
