"""Requests that the backend refuses: they score 0, which must not pass for a wrong answer."""

import logging
from dataclasses import replace

import pytest

from paceline.config import ConfigError
from paceline.loop import train
from paceline.rollout.sampler import NothingSampled
from paceline.session import open_session
from paceline.tasks.running_sums import RunningSums
from tests.length_reward import pay_for_length
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config

FEW = ("run.steps=2", "eval.every=0", "eval.problems=1")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


def refuse_from(monkeypatch, first: int) -> None:
    """Every request of the n-th call that samples, and of later ones, has a prompt that the engine cannot
    take; before, one group of them.
    """
    from paceline.rollout.sampler import GroupSampler

    calls, real = [], GroupSampler._requests

    def requests(self, *arguments):
        calls.append(1)
        groups = real(self, *arguments)
        refused = groups if len(calls) >= first else groups[1:2]
        for group in refused:
            group[:] = [replace(request, prompt=request.prompt * 100) for request in group]
        return groups

    monkeypatch.setattr(GroupSampler, "_requests", requests)


def test_kv_pool_that_cannot_hold_one_request_is_refused(policy, tmp_path):
    """Where nothing limits prompts, one that cannot hold a response of the full length; their own length is
    found out later.
    """
    for limit, needed in ((0, 1 + 24), (32, 32 + 24)):
        settings = ("never", f"task.max_prompt_tokens={limit}", f"rollout.kv_tokens={needed - 1}")
        with pytest.raises(
            ConfigError,
            match=rf"rollout.kv_tokens = {needed - 1}: one request may need {needed} tokens.*"
            "raise it, set it to 0",
        ):
            open_session(tiny_config(policy, tmp_path, *settings))
        open_session(tiny_config(policy, tmp_path, *settings, f"rollout.kv_tokens={needed}")).close()


def test_refused_requests_are_warned_of_once_and_counted(policy, tmp_path, monkeypatch, caplog):
    refuse_from(monkeypatch, 100)
    with caplog.at_level(logging.WARNING):
        run = train(tiny_config(policy, tmp_path, "run", *FEW)).summary.run
    (said,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert (
        "4 of 16 requests were refused and score 0, the first because: prompt of " in said
        and "rollout/refused" in said
    )
    assert [m["rollout/refused"] for m in comparable_metrics(run) if m["kind"] == "train"] == [4, 4]


def test_step_with_only_refused_requests_stops_the_run(policy, tmp_path, monkeypatch):
    refuse_from(monkeypatch, 3)  # an evaluation and step 1 come first
    with pytest.raises(
        NothingSampled,
        match="all 16 requests of this step were refused, the first because: "
        "prompt of .* this engine takes 1 to 255",
    ):
        train(tiny_config(policy, tmp_path, "run", *FEW))
    assert [m["step"] for m in comparable_metrics(tmp_path / "run") if m["kind"] == "train"] == [1]
