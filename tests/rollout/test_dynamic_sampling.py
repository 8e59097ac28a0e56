"""Dynamic sampling takes groups in prompt order, bounds its rounds, reports, and never repeats a seed."""

from dataclasses import replace

import pytest

from paceline.learning.learner import Learner
from paceline.rollout.dynamic_sampling import DynamicSampling
from paceline.stats import RolloutStats
from paceline.types import Group, Sample, Score
from tests.learning.samples import make_config, make_groups, make_policy


class Rounds:
    """A source whose groups score as told: `/` unevenly, `=` alike; a string per round, then all `=`."""

    def __init__(self, *rounds: str) -> None:
        self.rounds = list(rounds)
        self.steps: list[int] = []
        self.count = 0

    def collect(self, step: int) -> list[Group]:
        self.steps.append(step)
        marks = self.rounds.pop(0) if self.rounds else "===="
        return [self._group(mark) for mark in marks]

    def _group(self, mark: str) -> Group:
        template = make_groups()[0]
        rewards = (0.0, 1.0, 0.0, 1.0) if mark == "/" else (0.1, 0.1, 0.1, 0.1)
        samples = tuple(
            Sample(s.completion, Score(r, r == 1)) for s, r in zip(template.samples, rewards, strict=True)
        )
        self.count += 1
        return replace(template, prompt_id=f"p{self.count - 1}", samples=samples)

    def take_stats(self) -> RolloutStats:
        return RolloutStats(generated_tokens=self.count)


def collect(rounds: list[str], prompts: int = 4, limit: int = 10):
    warnings: list[str] = []
    source = Rounds(*rounds)
    dynamic = DynamicSampling(source, prompts, limit, warnings.append)
    names = [group.prompt_id for group in dynamic.collect(3)]
    metrics = {name.removeprefix("rollout/"): value for name, value in dynamic.metrics.items()}
    return names, metrics, warnings, source


def test_dynamic_sampling_takes_the_first_uneven_groups_in_prompt_order():
    names, metrics, warnings, source = collect(["=/=/", "/=//"])
    assert names == ["p1", "p3", "p4", "p6"], "the picture in the module"
    assert metrics == {"sampling_rounds": 2, "dropped_groups": 3, "surplus_groups": 1} and not warnings
    assert source.take_stats().generated_tokens == 8


def test_dynamic_sampling_with_a_full_first_round_is_the_plain_step():
    names, metrics, warnings, source = collect(["////"])
    assert names == ["p0", "p1", "p2", "p3"] and source.steps == [3]
    assert metrics == {"sampling_rounds": 1, "dropped_groups": 0, "surplus_groups": 0} and not warnings


def test_dynamic_sampling_rounds_have_noise_of_their_own():
    _, _, _, source = collect(["/===", "/===", "/===", "/==="])
    assert len(set(source.steps)) == 4 and source.steps[0] == 3 and min(source.steps[1:]) > 2**31


def test_dynamic_sampling_bounds_rounds_and_warns_of_missing_groups():
    names, metrics, warnings, source = collect(["=/==", "===="], limit=3)
    assert names == ["p1"] and len(source.steps) == 3
    assert metrics == {"sampling_rounds": 3, "dropped_groups": 11, "surplus_groups": 0}
    assert warnings == ["step 3: 1 of the 4 groups wanted scored unevenly in 3 rounds; continuing with those"]


def test_dynamic_sampling_without_signal_records_the_step_and_skips_its_update():
    warnings: list[str] = []
    groups = DynamicSampling(Rounds("===="), 4, 2, warnings.append).collect(1)
    assert [group.prompt_id for group in groups] == ["p0", "p1", "p2", "p3"] and "0 of the 4" in warnings[0]
    assert (
        Learner(make_policy(), make_config("rollout.prompts_per_step=4")).update(groups)["policy/skipped"]
        == 1.0
    )


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_dynamic_sampling_updates_on_a_short_step(minibatches):
    groups = DynamicSampling(Rounds("/=/="), 4, 1, lambda message: None).collect(1)
    config = make_config("rollout.prompts_per_step=4", f"learning.minibatches={minibatches}")
    assert Learner(make_policy(), config).update(groups)["policy/skipped"] == 0
