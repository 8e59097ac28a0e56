"""When a head learns during a run.

    drift    learns while the share is below what it was in the first rollouts
    auto     learns on trial, continues while updates make the head better, rests then, and begins again when
             the share has drifted: whether a frozen head is enough differs from run to run; rests at once
             where its budget is too small for any update to come about

Drift is measured by how often the first token of drafts is accepted, and shares are compared by their
standard deviation: a rollout with few drafts is weak evidence. What learning gives is measured
by what updates see.
"""

import math
from dataclasses import dataclass, field

# A share of accepted first tokens that falls by less than this has not drifted,
TOLERANCE = 0.01
# nor has one whose fall chance explains: standard deviations of the difference of two shares.
SIGMAS = 3.0
# Rollouts that make up the baseline; one that kept adapting would follow a slow decline.
BASELINE_ROLLOUTS = 4
# Heads that are published after a fall; what they do not bring back is the policy's own doing, such as more
# entropy.
PATIENCE = 8
# Updates of a trial; from one trial to the next the head's overlap with the policy must rise for learning to
# continue,
TRIAL_UPDATES = 8
# by more than this, and than so many standard errors: few, since continuing by mistake costs a trial, and to
# rest by mistake what would have been learned.
RISE = 0.003
RISE_ERRORS = 1.0
# Steps within whose budget an update must come about: one that takes longer is no trial.
REACH = 8
# Beyond this factor a single timed slice suffices, whatever disturbed it.
FAR = 3


def deviation(share: float, drafts: float, other_share: float, other_drafts: float) -> float:
    """Returns the standard deviation of the difference of two shares that are in truth the same."""
    pooled = (share * drafts + other_share * other_drafts) / (drafts + other_drafts)
    return math.sqrt(pooled * (1 - pooled) * (1 / drafts + 1 / other_drafts))


@dataclass
class DriftMonitor:
    """Decides whether the head must learn, from how often the first token of its drafts is accepted."""

    baseline: float = 0.0  # share accepted, over the rollouts that make it up
    baseline_drafts: float = 0.0
    rollouts: int = 0  # that make up the baseline so far
    tried: int = 0  # heads that were published since acceptance fell

    def note_update(self) -> None:
        """Called after a head that has learned was published."""
        self.tried += 1

    def update(self, share: float, drafts: int) -> bool:
        """Records a rollout's share of accepted first tokens; returns whether the head should learn now."""
        if self.rollouts:
            margin = self._margin(share, drafts)
            if share < self.baseline - margin and self.tried < PATIENCE:
                return True
            if share > self.baseline + margin or self.tried >= PATIENCE:
                self.rollouts = 0  # a new level: the baseline starts over
        if self.rollouts < BASELINE_ROLLOUTS:
            before = self.baseline_drafts if self.rollouts else 0.0
            self.baseline = (self.baseline * before + share * drafts) / (before + drafts)
            self.baseline_drafts = before + drafts
            self.rollouts += 1
        self.tried = 0
        return False

    def _margin(self, share: float, drafts: int) -> float:
        """Returns how far a share may lie from the baseline by chance, and no less than TOLERANCE."""
        return max(TOLERANCE, SIGMAS * deviation(self.baseline, self.baseline_drafts, share, drafts))


@dataclass
class Tally:
    """Running sums of numbers, for their mean and its standard error."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)

    @property
    def variance_of_mean(self) -> float:
        """The square of the mean's standard error."""
        deviations = max(0.0, self.squares - self.count * self.mean**2)
        return deviations / max(1, self.count * (self.count - 1))


@dataclass
class AutoMonitor:
    """Decides for `auto`; it begins with a trial, since it is not known yet what learning gives.

    What an update sees of the head before it learns, along responses that are mostly new, shows whether
    learning still gives anything. Accepted first tokens do not: from 3.08 to 3.29 tokens a draft their share
    stayed where it was, since what comes after them got better (benchmarks/notes/heads.md).
    """

    learning: bool = True
    trial: Tally = field(default_factory=Tally)  # overlaps of the current trial's updates
    before: Tally = field(default_factory=Tally)  # and of the trial before
    drift: DriftMonitor = field(default_factory=DriftMonitor)

    def note_update(self, overlap: float) -> None:
        """Records the head's overlap with the policy, in [0, 1], along what an update learned from."""
        self.trial.add(overlap)
        if self.trial.count < TRIAL_UPDATES:
            return
        if self.before.count and not self._has_risen():
            self.rest()
        else:
            self.before, self.trial = self.trial, Tally()

    def update(self, share: float, drafts: int) -> bool:
        """Records a rollout's share of accepted first tokens; returns whether the head should learn now."""
        if not self.learning and self.drift.update(share, drafts):
            self.learning = True
        return self.learning

    def rest(self) -> None:
        self.learning = False
        self.restart()
        self.drift = DriftMonitor()

    def restart(self) -> None:
        """Begins a trial: the head was replaced."""
        self.trial, self.before = Tally(), Tally()

    def _has_risen(self) -> bool:
        chance = math.sqrt(self.before.variance_of_mean + self.trial.variance_of_mean)
        return self.trial.mean > self.before.mean + max(RISE, RISE_ERRORS * chance)


@dataclass
class TimeBudget:
    """The time that learning may add to steps: a share of what steps take without it."""

    share: float
    # Seconds that may be spent now; below 0 after what took longer than was left.
    credit: float = 0.0

    def grant(self, step_seconds: float) -> None:
        self.credit = self.after(step_seconds)

    def after(self, step_seconds: float) -> float:
        return min(self.credit + self.share * step_seconds, self.most(step_seconds))

    def most(self, step_seconds: float) -> float:
        """Returns what can be saved up, for a slice that is longer than one step's share."""
        return REACH * self.share * step_seconds

    def spend(self, seconds: float) -> None:
        """Subtracts the time that learning delayed others by."""
        self.credit -= seconds
