"""The pacer's settings: a run's requirements, and the tuned numbers behind the rules.

Every tuned number of the package is a field of `PacingTuning`, with its unit, what it does and where it comes
from. Three origins occur:

- counted: it follows from arithmetic that the comment gives;
- simulated: a round number that works, together with the others, on the simulated machines of `tests/pacing`,
  whose best strategy is known; benchmarks/notes/pacing.md has the effects of halving and doubling;
- measured: a rollout on a real machine required it; the comment names the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.pacing.strategy import Strategy


@dataclass(frozen=True)
class PacingTuning:
    """The numbers behind the pacer's rules. A draft is the proposal for one row in one decode step."""

    # -- When to decide again --------------------------------------------------------------------------------

    # Steps that a decision holds while the batch and the context stay in their class. Simulated; deciding
    # takes about 0.7 ms of CPU time, so deciding at every step would be measurable.
    decision_steps: int = 16
    # Steps instead, while the outcome of a trial or the strategy's first measured time is still to come.
    # Counted: the native engine reports outcomes up to four steps late.
    short_decision_steps: int = 4
    # Factor by which the batch grows, or the context shrinks, when another rollout has begun. Within a
    # rollout the batch shrinks and the context grows, so any factor well above one will do.
    new_rollout_factor: float = 2.0
    # Steps over which the time that a drafter needs to catch up must be earned back. Simulated.
    switch_payback_steps: int = 64

    # -- Seconds per step (cost.py, verify_times.py) ---------------------------------------------------------

    # Steps that an estimate averages over, at most; older ones fade. Simulated.
    estimate_steps: int = 64
    # Fewest steps whose median is trusted. Counted: in fewer, the median can be one or two slow steps.
    trusted_block_steps: int = 4
    # Limit on the median of a shorter block, as a multiple of the estimate. Simulated, with 0.5% to 1% of
    # steps three times as slow.
    outlier_factor: float = 1.25
    # Steps after which a measured time is stale and may be measured again. Simulated.
    stale_steps: int = 1 << 14
    # Steps that one observed catch-up counts for. Counted: the first eight are averaged, and each later one
    # moves the estimate by a ninth, 8 / (64 + 8).
    switch_weight_steps: int = 8
    # Smallest share of a measured time that remains when its context-dependent part is taken off. A floor
    # that keeps times positive where the slope is wrong.
    min_base_share: float = 0.05
    # Smallest share of the curve's guess that remains after the correction by measured neighbours. A floor,
    # as above; also for guesses below the fewest tokens that were measured.
    min_guess_share: float = 0.25
    # Slope beyond the most tokens that were measured, at least: a share of the last point's seconds per
    # token. A saturated machine has 1.0, an idle one 0.0, and which of them it is cannot be known there.
    min_extrapolation_share: float = 0.25

    # -- Acceptance (acceptance.py) --------------------------------------------------------------------------

    # Drafts that an estimate covers. Counted: a standard error of 0.044 at the worst, sqrt(0.25 / 128).
    window_drafts: int = 128
    # Steps that it covers at least, for large batches, where 128 drafts would be a sample of one step.
    # Simulated.
    window_steps: int = 16
    # Pseudo-drafts at the acceptance of the depth before, for depths beyond the first. Simulated.
    depth_pseudo_drafts: float = 4.0
    # Pseudo-drafts at the acceptance over all situations, at most. Simulated.
    pooled_pseudo_drafts: float = 16.0
    # Rejected pseudo-drafts at the first depth: an unseen drafter starts from a low acceptance.
    rejected_pseudo_drafts: float = 2.0
    # Weight that earlier counts keep when a drafter is tried again: they are stale by then. Simulated.
    stale_weight: float = 0.1

    # -- The guard (guard.py) --------------------------------------------------------------------------------

    # Steps over which a drafter must not be slower than plain decoding by more than the margin. Simulated.
    guard_steps: int = 64
    # Share of the time over those steps. Simulated.
    guard_margin: float = 0.02
    # The same for large losses, sooner. Simulated: a drafter that collapses is dropped within 56 steps.
    alarm_steps: int = 16
    alarm_margin: float = 0.15

    # -- Trials (trials.py) ----------------------------------------------------------------------------------

    # Plain steps' worth of time that a budget holds before anything has been earned. Counted: the shortest
    # trial.
    initial_budget_steps: float = 2.0
    # Steps of a drafter's trial, at least and at most. Simulated.
    min_trial_steps: int = 2
    max_trial_steps: int = 16
    # Drafts that a trial aims to see. Counted: 16 rows make them in the shortest trial, two in the longest.
    trial_drafts: int = 32
    # Tokens that a drafter proposes at most in its first trial, while its time per token is unknown.
    # Simulated.
    first_trial_tokens: int = 3
    # Limit on a trial's step if nothing is accepted, as a multiple of plain decoding's seconds. A trial
    # proposes as many tokens as this allows, since it learns about every depth. Simulated.
    max_trial_slowdown: float = 1.25
    # Acceptance at every depth that is assumed of a drafter when asking whether a trial could pay (optimism
    # in the face of uncertainty). Simulated.
    optimistic_acceptance: float = 0.9
    # Steps that a strategy runs for its time alone. Counted: the fewest whose median outvotes one slow step.
    timing_steps: int = 3
    # Share by which a time that was never measured may be shorter than guessed. Measured on an H200, whose
    # times jump from tile to tile: with such trials the second rollout was 0.3% behind the best possible one
    # instead of 2.0%. A share that grows with the distance from what was measured helped there, too, and made
    # the built-in run on a CPU slower (0.92x plain decoding instead of 1.13x).
    unmeasured_slack: float = 0.08
    # Steps after a trial's end at which outcomes that have not been reported are given up. Counted: sixteen
    # times as late as the native engine reports.
    max_report_delay_steps: int = 64

    # -- Backing off after a failed trial (drafter_record.py) ------------------------------------------------

    # Steps until the next trial after the first failure; twice as many after each further one. Simulated.
    first_wait_steps: int = 64
    # Steps until the next trial at most, in the situation in which the drafter failed. Simulated.
    max_wait_steps: int = 4096
    # The same in all other situations. Simulated: a drafter that fails at the full batch may win in the tail.
    max_wait_elsewhere_steps: int = 512
    # Share by which a wait is made longer or shorter at random, so that drafters are not tried in lockstep.
    wait_jitter: float = 0.25


DEFAULT_TUNING = PacingTuning()


@dataclass(frozen=True)
class PacingSettings:
    """A run's requirements on its pacer: the strategies, the batch sizes, and the budget of trials."""

    # Batch sizes that steps are padded to, ascending.
    buckets: tuple[int, ...]
    # What may be chosen beside plain decoding.
    strategies: tuple[Strategy, ...]
    # Seed of the jitter between trials.
    seed: int = 0
    # Share of tokens per second by which another strategy must exceed the current one. Simulated: 2% of noise
    # in step times causes no switching back and forth.
    margin: float = 0.03
    # Share of all time that trials of all drafters together may lose; timing trials may lose as much again.
    # Simulated: a drafter that is never right then costs under 2%.
    trial_share: float = 0.01
    # For each drafter that must catch up: its work for a token over the policy's.
    catch_up: Mapping[str, float] = field(default_factory=dict)
    tuning: PacingTuning = DEFAULT_TUNING
