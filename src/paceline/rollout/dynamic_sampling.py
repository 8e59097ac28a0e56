"""Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): prompts are drawn until enough groups carry a signal.

A group whose rewards are all equal has no advantage and only dilutes the step. It is dropped, and further
rounds of prompts are sampled until `prompts` groups are left:

    prompt order   p0 p1 p2 p3 | p4 p5 p6 p7          two rounds of four prompts, four groups are wanted
    rewards        =  /  =  /  |  /  =  /  /          = all equal, / unequal
    taken             1     2     3     4  -          the last one is surplus

Groups count in prompt order, never in order of arrival: taking the first to finish would prefer short
responses. How many rounds a step takes depends on nothing but weights and seeds, and where the next step
begins is the order's position, so a resumed run continues unchanged.
"""

from collections.abc import Callable

from paceline.rollout.sources import RolloutSource
from paceline.stats import RolloutStats
from paceline.types import Group

# A request's seed depends on its step, its prompt and its occurrence. A prompt that recurs in a later round
# must be sampled with a new seed, so that round uses a step number that no run reaches; the first round uses
# the step itself.
ROUND_STRIDE = 1 << 32


class DynamicSampling(RolloutSource):
    """A source that filters another's groups."""

    def __init__(self, source: RolloutSource, prompts: int, rounds: int, warn: Callable[[str], None]) -> None:
        super().__init__()
        self.source = source
        self.prompts = prompts
        self.rounds = rounds
        self.warn = warn

    def collect(self, step: int) -> list[Group]:
        first_round: list[Group] = []
        uneven: list[Group] = []
        sampled = rounds = 0
        while len(uneven) < self.prompts and rounds < self.rounds:
            groups = self.source.collect(step + rounds * ROUND_STRIDE)
            first_round = first_round or groups
            uneven += [group for group in groups if scored_unevenly(group)]
            sampled += len(groups)
            rounds += 1
        taken = uneven[: self.prompts]
        self.metrics = {
            "rollout/sampling_rounds": float(rounds),
            "rollout/dropped_groups": float(sampled - len(uneven)),
            "rollout/surplus_groups": float(len(uneven) - len(taken)),
        }
        if len(taken) < self.prompts:
            self.warn(
                f"step {step}: {len(taken)} of the {self.prompts} groups wanted scored unevenly "
                f"in {rounds} rounds; continuing with those"
            )
        return taken or first_round  # if empty, the step is recorded and its update skipped

    def take_stats(self) -> RolloutStats:
        return self.source.take_stats()

    def rewinder(self) -> Callable[[], None]:
        return self.source.rewinder()


def scored_unevenly(group: Group) -> bool:
    """Returns whether the group's rewards differ, so that its samples have advantages."""
    return len(set(group.rewards)) > 1
