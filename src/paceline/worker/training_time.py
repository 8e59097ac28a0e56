"""How long a worker trained, and how long messages waited because it did."""

from dataclasses import dataclass


@dataclass
class TrainingTime:
    """Seconds since training began last."""

    seconds: float = 0.0
    waited: float = 0.0  # that messages waited for a slice to end

    def note(self, began: float, ended: float, came: float | None) -> None:
        """Records a stretch of training; `came`: when the message that ended it arrived, or None."""
        self.seconds += ended - began
        if came is not None:
            self.waited += ended - max(began, came)
