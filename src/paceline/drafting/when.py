"""When a head learns during a run, from how often the first token of its drafts is accepted.

    drift    learns while the share is below what it was in the first rollouts
    auto     learns on trial, goes on while the share clearly rises, rests at its level, and begins again when
             it has drifted: whether a frozen head is enough differs from run to run; rests at once where its
             budget is too small for any update to come about

Shares are compared by their standard deviation: a rollout with few drafts says little.
"""

import math
from dataclasses import dataclass, field

# A share of accepted first tokens that falls by less than this has not drifted,
TOLERANCE = 0.01
# nor has one whose fall chance explains: standard deviations of the difference of two shares.
SIGMAS = 3.0
# Rollouts that make up the baseline; one that went on adapting would follow a slow decline.
BASELINE_ROLLOUTS = 4
# Heads that are published after a fall; what they do not bring back is the policy's own doing, such as more
# entropy.
PATIENCE = 8
# Rollouts of a trial; acceptance must clearly rise from one trial to the next for learning to go on,
TRIAL_ROLLOUTS = 4
# by more than this, and than chance explains, in standard deviations.
RISE = 0.003
RISE_SIGMAS = 2.0
# Steps within whose budget an update must come about: one that takes longer is no trial.
REACH = 2 * TRIAL_ROLLOUTS
# So many times as long is too long whatever disturbed the one slice that was timed.
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
        """Takes in that the head was replaced by one that has learned."""
        self.tried += 1

    def update(self, share: float, drafts: int) -> bool:
        """Takes in a rollout's share of accepted first tokens; returns whether the head should learn now."""
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
class AutoMonitor:
    """Decides for `auto`; it begins with a trial, since nobody knows yet what learning gives."""

    learning: bool = True
    # Sums of the trial at hand, and of the one before: accepted first tokens, drafts, rollouts.
    accepted: float = 0.0
    drafts: float = 0.0
    rollouts: int = 0
    accepted_before: float = 0.0
    drafts_before: float = 0.0
    drift: DriftMonitor = field(default_factory=DriftMonitor)
    updates: int = 0  # of the head, in the trial at hand

    def note_update(self) -> None:
        """Takes in that the head was replaced by one that has learned.

        With the first one the trial begins: what drafted before has learned nothing in it.
        """
        if not self.updates:
            self._count_anew()
        self.updates += 1

    def update(self, share: float, drafts: int) -> bool:
        """Takes in a rollout's share of accepted first tokens; returns whether the head should learn now."""
        if not self.learning:
            if not self.drift.update(share, drafts):
                return False
            self._begin()
        self.accepted += share * drafts
        self.drafts += drafts
        self.rollouts += 1
        if self.rollouts == TRIAL_ROLLOUTS:
            if self.updates:  # of a head that did not learn, nothing follows
                self.learning = not self.drafts_before or self._risen()
            if not self.learning:
                self.drift = DriftMonitor()
            self.accepted_before, self.drafts_before = self.accepted, self.drafts
            self._count_anew()
        return self.learning

    def rest(self) -> None:
        """Stops learning until acceptance drifts."""
        self._begin()
        self.learning = False
        self.drift = DriftMonitor()

    def _begin(self) -> None:
        self.learning = True
        self.accepted_before = self.drafts_before = 0.0
        self._count_anew()

    def _count_anew(self) -> None:
        self.accepted = self.drafts = 0.0
        self.rollouts = self.updates = 0

    def _risen(self) -> bool:
        before, now = self.accepted_before / self.drafts_before, self.accepted / self.drafts
        chance = RISE_SIGMAS * deviation(before, self.drafts_before, now, self.drafts)
        return now > before + max(RISE, chance)


@dataclass
class TimeBudget:
    """The time that learning may add to steps: a share of what steps take without it."""

    share: float
    # Seconds that may be spent now; below 0 after a slice that took longer than was left.
    credit: float = 0.0

    # Steps whose share can be saved up, for a slice that is longer than one step's.
    SAVED_STEPS = 8

    def grant(self, step_seconds: float) -> None:
        """Adds a step's share."""
        granted = self.share * step_seconds
        self.credit = min(self.credit + granted, self.SAVED_STEPS * granted)

    def spend(self, seconds: float) -> None:
        """Takes what was spent out of the time that others needed."""
        self.credit -= seconds
