"""The source whose groups outlive a step: an interrupted sample is the one it would have been."""

from concurrent.futures import Future

import pytest
import torch

from paceline.config import RolloutConfig, TaskConfig, TurnsConfig, load_config
from paceline.engine.factory import make_engine
from paceline.engine.reference import ReferenceBackend
from paceline.learning.sentinel import Sentinel, UnsafeRollouts
from paceline.loop import train
from paceline.policy.huggingface import load_policy
from paceline.policy.tokenizer import load_tokenizer
from paceline.rollout.sampler import GroupIdentity, GroupSampler
from paceline.rollout.stream import StreamingRollouts
from paceline.rollout.underway import Stage
from paceline.tasks.base import Done
from paceline.tasks.make import make_task
from paceline.tasks.order import ProblemOrder
from paceline.tasks.running_sums import RunningSums
from paceline.tasks.task import Turns
from paceline.types import Purpose, SamplingParams
from tests.length_reward import pay_for_length
from tests.loop_helpers import make_tiny_policy, tiny_config
from tests.rollout.test_modes import NO_DRAFTER, STAGGERED, trained

TURNS = TurnsConfig(step="tests.tasks.reward_examples:echo_twice", stop=[";", "a"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def open_sampler(folder, backend: str, turns: TurnsConfig) -> GroupSampler:
    policy = load_policy(folder, torch.float32)
    tokenizer = load_tokenizer(folder)
    config = TaskConfig(turns=turns, train_problems=12, eval_problems=1)
    task = make_task(config, tokenizer, folder)
    engine = (
        ReferenceBackend(policy, 6, tokenizer)
        if backend == "reference"
        else make_engine(policy, RolloutConfig(max_running=6), 4096, tokenizer)
    )
    return GroupSampler(engine, task, tokenizer, run_seed=5)


@pytest.mark.parametrize(
    "backend, turns",
    [
        pytest.param("native", TurnsConfig(), id="native-plain", marks=pytest.mark.slow),
        pytest.param("native", TURNS, id="native-turns"),
        pytest.param("reference", TurnsConfig(), id="reference-plain", marks=pytest.mark.slow),
        pytest.param("reference", TURNS, id="reference-turns", marks=pytest.mark.slow),
    ],
)
def test_suspended_and_saved_samples_equal_those_of_sync(folder, backend, turns):
    """Between steps everything is taken off the backend, written down and read by another source."""
    rollout = RolloutConfig(
        mode="partial", max_lag=2, prompts_per_step=2, samples_per_prompt=3, max_tokens=60, max_running=6
    )
    sampler = open_sampler(folder, backend, turns)
    order = ProblemOrder(sampler.task.train, 1)
    source = StreamingRollouts(sampler, order, rollout, 0, pytest.fail)
    found = {}
    for step in range(1, 4):
        for group in source.collect(step):
            found |= {sample.completion.request.id: sample for sample in group.samples}
        state = source.state()
        source = StreamingRollouts(sampler, order, rollout, 0, pytest.fail)
        source.restore(state)
    problems = ProblemOrder(sampler.task.train, 1).take(6)
    sampling = SamplingParams(max_tokens=60)
    sync = {
        sample.completion.request.id: sample
        for group in sampler.sample(problems, Purpose.TRAIN, 1, 3, sampling)
        for sample in group.samples
    }
    sampler.close()
    first = {name: sample for name, sample in found.items() if name.startswith("train/1/")}
    assert len(found) == 3 * 2 * 3 and len(first) >= 4 * 3
    if backend == "native":
        assert first == {name: sync[name] for name in first}, "bit for bit"
    for name, sample in first.items():  # the reference computes a prompt and a response in different shapes
        assert sample.completion.tokens == sync[name].completion.tokens
        assert sample.completion.logprobs == pytest.approx(sync[name].completion.logprobs, abs=1e-4)
        assert (sample.completion.segments, sample.score) == (
            sync[name].completion.segments,
            sync[name].score,
        )
    if turns.step:
        assert any(not s.sampled for sample in first.values() for s in sample.completion.segments)


@pytest.mark.slow
def test_rerun_step_restarts_all_groups_in_base_precision(folder, tmp_path, monkeypatch):
    """Low precision is distrusted at the first step, so the run is the one that base precision makes."""
    monkeypatch.setattr(RunningSums, "score", pay_for_length)
    # Without drafters, which would know the first attempt, finish sooner and meet the update elsewhere.
    small = ("eval.every=0", "eval.problems=1", *STAGGERED, "run.steps=3", *NO_DRAFTER)
    # All pass through the policy, as they must with low precision: means are over the same tokens.
    small += ("rollout.speculation.drafters=[]", "learning.skip_zero_advantages=false")
    base = train(tiny_config(folder, tmp_path, "base", *small)).summary.run

    def distrust(self, mismatch):
        if self.armed:
            raise UnsafeRollouts("told so")

    monkeypatch.setattr(Sentinel, "check_mismatch", distrust)
    low = ("rollout.precision=fp8", "rollout.sentinel.capped_steps=0")
    again = train(tiny_config(folder, tmp_path, "low", *small, *low)).summary.run
    depends = ("speculation/", "mismatch/lag_")  # the latter by what was patched away
    ours = ("rollout/fell_back", "rollout/decode_steps", "rollout/tail_steps")

    def learned(run):
        return [
            {k: v for k, v in record.items() if k not in ours and not k.startswith(depends)}
            for record in trained(run)
        ]

    assert all(record["rollout/fell_back"] == 1 for record in trained(again))
    assert learned(again) == learned(base)
    assert load_config(str(again / "config.yaml")).rollout.precision == "fp8"


def open_source(sampler: GroupSampler, signal_rounds: int, **keys: object) -> StreamingRollouts:
    rollout = RolloutConfig(prompts_per_step=2, samples_per_prompt=2, max_tokens=30, max_running=6, **keys)
    order = ProblemOrder(sampler.task.train, 1)
    return StreamingRollouts(sampler, order, rollout, signal_rounds, pytest.fail)


@pytest.mark.slow
def test_rerun_step_gives_every_group_its_own_name(folder):
    """Before the sentinel distrusts step 1, a prompt has gone in for step 2; others follow it there."""
    sampler = open_sampler(folder, "native", TurnsConfig())
    source = open_source(sampler, 0, mode="async", prompts_in_flight=3)
    rewind = source.rewinder()
    source.collect(1)
    rewind()
    taken = [group for step in (1, 2, 3) for group in source.collect(step)]
    names = [sample.completion.request.id for group in taken for sample in group.samples]
    names += [sample.id for group in source.groups for sample in group.samples]
    source.suspend()
    sampler.close()
    assert len(set(names)) == len(names), "a response would take the place of another"


def test_groups_completed_between_steps_are_dropped_without_signal(folder, monkeypatch):
    """All score alike, and those under way end before they can be taken off, as in another process."""
    sampler = open_sampler(folder, "native", TurnsConfig())
    source = open_source(sampler, 1, mode="partial")
    source.collect(1)
    monkeypatch.setattr(sampler.backend, "abort", lambda ids: None)
    source.suspend()
    assert len(source.groups) == 2 and all(group.complete for group in source.groups)
    source.collect(2)
    sampler.close()
    assert source.metrics["rollout/dropped_groups"] == 2


@pytest.mark.parametrize("leave", ["stragglers", pytest.param("second attempt", marks=pytest.mark.slow)])
def test_tool_reply_to_a_dropped_group_is_ignored(folder, leave, monkeypatch):
    sampler = open_sampler(folder, "native", TURNS)
    source = open_source(sampler, 1, mode="oversample")
    waiting: Future[Done] = Future()
    monkeypatch.setattr(Turns, "step", lambda *asked: waiting)
    group = source._open(GroupIdentity(Purpose.TRAIN, 1, 0, 0), 0, 0)
    source.groups.append(group)
    for sample in group.samples:
        source._call_tool(group, sample)
    source._give_up_stragglers() if leave == "stragglers" else source._begin_again()
    waiting.set_result(Done())
    source._take_replies()
    sampler.close()
    assert not any(sample.stage is Stage.IN_TOOL for sample in group.samples)
    assert source.dropped["signal"] == 0


@pytest.mark.parametrize("stragglers", [pytest.param("abort", marks=pytest.mark.slow), "carry"])
def test_rerun_step_of_oversampling_uses_the_same_prompts(folder, stragglers):
    sampler = open_sampler(folder, "native", TurnsConfig())
    source = open_source(sampler, 0, mode="oversample", prompts_in_flight=4, stragglers=stragglers)
    attempts = []
    for _ in range(2):
        rewind = source.rewinder()
        attempts.append((source.collect(1), source.metrics, source.order.position, source.carried))
        rewind()
    sampler.close()
    assert attempts[0] == attempts[1]
    assert not source.carried and source.metrics["rollout/stragglers"] == 2
