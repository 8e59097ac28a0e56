"""Async: a worker generates while the policy learns; its samples are still exact."""

import json
import time

import pytest
import torch

from paceline.config import ConfigError, load_config
from paceline.engine.engine import Engine, EngineSettings
from paceline.learning.learner import Learner
from paceline.loop import Trainer, train
from paceline.policy.huggingface import exported_tensors, load_policy
from paceline.report.console import Console
from paceline.rollout.samples import read_groups
from paceline.rollout.schedule import ScheduleMismatch
from paceline.tasks.running_sums import RunningSums
from paceline.types import FinishReason, Request, SamplingParams
from tests.length_reward import pay_for_length
from tests.loop_helpers import make_tiny_policy, tiny_config
from tests.rollout.test_modes import NO_DRAFTER, trained


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


SMALL = ("eval.every=0", "eval.problems=1", "rollout.speculation.drafters=[]", *NO_DRAFTER, "run.steps=4")


def perturbed(decoder, version: int):
    """Yields the weights of a version: near the policy's own, a function of the version."""
    generator = torch.Generator().manual_seed(version)
    for name, tensor in exported_tensors(decoder):
        yield name, tensor + version * 0.02 * torch.randn(tensor.shape, generator=generator)


def test_response_across_updates_equals_its_parts_sampled_separately(policy):
    """Each segment equals what an engine with those weights samples after everything before it."""
    base = load_policy(policy, torch.float32)
    settings = EngineSettings(max_running=4, kv_tokens=2048)
    engine = Engine(load_policy(policy, torch.float32), settings)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(f"r{i}", (3, 5, 7 + i), 100 + i, sampling) for i in range(6)]
    engine.update_weights(0, list(perturbed(base, 0)))
    engine.submit(requests)
    done = []
    version = 0
    while len(done) < len(requests):
        steps = 0

        def stop_soon(*_):
            nonlocal steps
            steps += 1
            if steps == 9:
                engine.pause()

        engine.outcomes.observer = stop_soon
        done += engine.completions()
        version += 1
        engine.update_weights(version, list(perturbed(base, version)))
        engine.resume()
    assert all(len(completion.segments) >= 2 for completion in done)
    for completion in done:
        request = completion.request
        for segment in completion.segments:
            alone = Engine(load_policy(policy, torch.float32), settings)
            alone.update_weights(segment.weight_version, list(perturbed(base, segment.weight_version)))
            before = completion.tokens[: segment.start]
            count = segment.stop - segment.start
            alone.submit(
                [
                    Request(
                        "again",
                        request.prompt + before,
                        request.seed,
                        SamplingParams(max_tokens=count, ignore_eos=True),
                    )
                ]
            )
            (again,) = alone.completions()
            assert again.tokens == completion.tokens[segment.start : segment.stop]
            assert again.logprobs == completion.logprobs[segment.start : segment.stop], "bit for bit"


def test_on_update_keep_continues_caches_and_marks_segments(policy):
    base = load_policy(policy, torch.float32)
    prefills = {}
    for keeps in (False, True):
        settings = EngineSettings(max_running=4, kv_tokens=2048, keeps_cache=keeps)
        engine = Engine(load_policy(policy, torch.float32), settings)
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        engine.submit([Request(f"r{i}", (3, 5, 7 + i), 100 + i, sampling) for i in range(4)])
        engine.outcomes.observer = lambda sequences, lengths, gained: (
            engine.pause() if lengths.max() >= 20 and engine.version == 0 else None
        )
        assert not list(engine.completions())
        engine.update_weights(1, list(perturbed(base, 1)))
        engine.resume()
        done = list(engine.completions())
        assert [[s.weight_version for s in c.segments] for c in done] == [[0, 1]] * 4
        assert all(c.finish_reason is FinishReason.LENGTH and len(c.tokens) == 40 for c in done)
        prefills[keeps] = engine.take_stats().prefill_tokens
    assert prefills[True] == 4 * 2 and prefills[False] > prefills[True] + 4 * 15


@pytest.mark.slow
def test_async_mode_learns_from_groups_within_max_lag_and_resumes(policy, tmp_path):
    mode = ("rollout.mode=async", "rollout.max_lag=2", "rollout.max_running=6", "report.samples_per_step=4")
    run = train(tiny_config(policy, tmp_path, "async", *SMALL, *mode, "run.steps=2")).summary.run
    saved = json.loads((run / "checkpoints/step_000002/under_way.json").read_text())
    assert len(saved["groups"]) == 8, "what went in while the last step learned"
    train(load_config(str(run / "config.yaml"), ["run.steps=4"]), resume=run)
    records = trained(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["rollout/lag_max"] <= 2 for record in records)
    assert sum(record["rollout/lag_mean"] for record in records) > 0
    assert any(f"mismatch/lag_{lag}/kl" in record for record in records for lag in (1, 2))
    groups = [g for path in sorted((run / "samples").iterdir()) for g in read_groups(path)]
    names = [sample.completion.request.id for group in groups for sample in group.samples]
    assert len(names) == len(set(names)) == 4 * 16, "nothing counts twice"


@pytest.mark.slow
def test_async_mode_generates_while_the_policy_learns(policy, tmp_path, monkeypatch):
    """With a worker that continues only once the learner is at work and waits for a response, the two must
    overlap.
    """
    from paceline import session
    from paceline.rollout.stream import StreamingRollouts
    from paceline.worker.process import Launch

    hold = tmp_path / "hold"
    slow = json.dumps({"seconds": 0.005, "die_once": "", "hold": str(hold)})
    monkeypatch.setattr(
        session, "Launch", lambda factory, settings: Launch("tests.worker.slow_backend:make", slow)
    )
    fill, update = StreamingRollouts._fill, Learner.update
    under_way = []

    def holding_fill(self, step, version, learning=False):
        if learning:
            hold.touch()  # else all of it might be done before the learner begins
        fill(self, step, version, learning)

    def waiting_update(self, *arguments):
        pool = trainer.session.backend

        def outstanding() -> int:
            return len(pool.queue) + len(pool.replicas[0].outstanding)

        under_way.append(outstanding())
        hold.unlink()
        deadline = time.monotonic() + 120
        while under_way[-1] and outstanding() == under_way[-1]:
            assert time.monotonic() < deadline, "nothing was generated while the policy learned"
            time.sleep(0.01)
        return update(self, *arguments)

    monkeypatch.setattr(StreamingRollouts, "_fill", holding_fill)
    monkeypatch.setattr(Learner, "update", waiting_update)
    mode = ("rollout.mode=async", "rollout.max_lag=1", "run.steps=5")
    trainer = Trainer(
        tiny_config(policy, tmp_path, "overlap", *SMALL, *mode), "default", None, None, Console(quiet=True)
    )
    trainer.run_steps()
    assert len(under_way) == 5 and all(under_way[1:]), under_way


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["partial", "async"])
def test_schedule_repeats_a_run_in_one_process(policy, tmp_path, mode):
    keys = (f"rollout.mode={mode}", "rollout.max_lag=2", "rollout.max_running=6", "run.steps=3")
    first = train(tiny_config(policy, tmp_path, "first", *SMALL, *keys)).summary.run
    schedule = first / "schedule.jsonl"
    config = tiny_config(policy, tmp_path, "again", *SMALL, *keys)
    again = train(config, schedule=schedule).summary.run
    depends = ("rollout/decode_steps", "rollout/tail_steps", "cluster/")
    repeated, recorded = (
        [{k: v for k, v in record.items() if not k.startswith(depends)} for record in trained(run)]
        for run in (again, first)
    )
    assert repeated == recorded
    assert sum(record["rollout/lag_mean"] for record in recorded) > 0
    other = tiny_config(policy, tmp_path, "other", *SMALL, *keys, "run.seed=5")
    with pytest.raises(ScheduleMismatch, match="the schedule says"):
        train(other, schedule=schedule)
    with pytest.raises(ConfigError, match="there is nothing to repeat"):
        train(tiny_config(policy, tmp_path, "sync", *SMALL), schedule=schedule)
