"""A head that learns elsewhere: what is published of it, when it is taken back, what a restart keeps."""

import pytest
import torch

from paceline.config import Config, ConfigError, OnlineDrafterConfig, load_config
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.online_state import load_online_state, online_state
from paceline.drafting.publishing import snapshot
from paceline.drafting.remote_online import Learned, RemoteOnlineDrafter, make_follower
from paceline.drafting.run_drafter import RunDrafter
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.stats import DraftStats


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


@pytest.fixture(scope="module")
def head(policy):
    return load_eagle("builtin-eagle", policy, torch.float32)


class Replicas:
    """Trainers that learned what the test says, and the engines that a head is published to."""

    def __init__(self) -> None:
        self.learned: Learned | None = None
        self.rollouts: list[str] = []
        self.waits: list[float] = []
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.best = 1.0  # the scale of the head that drafts best
        self.recorded = 0

    def begin_rollout(self) -> None:
        self.rollouts.append("begin")

    def end_rollout(self) -> None:
        self.rollouts.append("end")

    def take(self, seconds: float) -> Learned | None:
        self.waits.append(seconds)
        learned, self.learned = self.learned, None
        return learned

    def quality(self, weights) -> float:
        return -abs(float(weights["norm.weight"].mean()) - self.best)

    def publish_drafter(self, version, weights) -> None:
        self.published[version] = dict(weights)

    def record_states(self, max_bytes: int) -> None:
        self.recorded = max_bytes

    def want_states(self, wanted: bool) -> None:
        self.wanted = wanted

    def take_states(self) -> dict:
        return {}


def make(policy, head, when: str = "always", said: list | None = None):
    replicas = Replicas()
    warn = print if said is None else said.append
    config = OnlineDrafterConfig(when=when)
    return RemoteOnlineDrafter(policy, head, config, warn, replicas, replicas), replicas


def learned(head, scale: float = 1.0, **figures) -> Learned:
    return Learned({name: scale * p for name, p in snapshot(head).items()}, tokens=50.0, updates=2, **figures)


def test_what_replicas_learned_is_published_once_a_step_under_its_number(policy, head):
    drafter, replicas = make(policy, head)
    with drafter.while_generating():
        assert replicas.rollouts == ["begin"]
    assert replicas.rollouts == ["begin", "end"]
    replicas.learned = learned(head, 2.0, replicas=2, seconds=3.0, waited=0.004, longest_wait=0.003)
    drafter.observe(0.8, 5000)
    metrics = drafter.follow(7, {}, step_seconds=20.0)
    assert list(replicas.published) == [7] and metrics["drafter/version"] == 7
    assert torch.equal(replicas.published[7]["norm.weight"], 2 * head.norm.weight)
    assert (metrics["drafter/tokens"], metrics["drafter/updates"], metrics["drafter/trainers"]) == (50, 2, 2)
    assert metrics["time/drafter_idle"] == 3.0 and metrics["time/drafter_stop"] == 0.003
    assert metrics["time/drafter_displaced"] >= 0.004
    assert replicas.waits == [0.01 * 20.0], "the step's budget, if a replica does not answer"
    again = drafter.follow(8, {}, 20.0)
    assert list(replicas.published) == [7] and again["drafter/version"] == 7 and again["drafter/updates"] == 0


def test_a_rollout_that_is_broken_off_ends_training_too(policy, head):
    drafter, replicas = make(policy, head)
    with pytest.raises(KeyboardInterrupt), drafter.while_generating():
        raise KeyboardInterrupt
    assert replicas.rollouts == ["begin", "end"]


def test_replicas_train_only_while_the_head_is_due(policy, head):
    drafter, replicas = make(policy, head, "drift")
    for share in (0.9, 0.9, 0.8, 0.9):
        with drafter.while_generating():
            pass
        drafter.observe(share, 5000)
    with drafter.while_generating():
        pass
    assert replicas.rollouts == ["begin", "end"], "the one after the fall"


def test_a_head_that_got_worse_is_taken_back_with_what_was_learned_from_it(policy, head):
    said: list[str] = []
    drafter, replicas = make(policy, head, said=said)
    replicas.best = float(head.norm.weight.detach().mean())
    drafter.observe(0.8, 5000)
    replicas.learned = learned(head, 2.0)
    drafter.follow(1, {})
    drafter.observe(0.6, 5000)
    replicas.learned = learned(head, 2.5)
    metrics = drafter.follow(2, {})
    assert "version 1 drafts worse than that of version 0" in said[0]
    assert metrics["drafter/rollbacks"] == 1 and metrics["drafter/version"] == 2
    assert torch.equal(replicas.published[2]["norm.weight"], head.norm.weight)
    drafter.observe(0.8, 5000)
    replicas.learned = learned(head, 1.1)
    assert drafter.follow(3, {})["drafter/version"] == 3, "and it goes on from there"


def test_small_steps_are_kept_where_the_policy_is_in_bf16(head):
    policy = load_policy(BUILTIN_POLICY, torch.bfloat16)
    narrow = load_eagle("builtin-eagle", policy, torch.bfloat16)
    drafter, replicas = make(policy, narrow)
    assert narrow.fc.weight.dtype == torch.bfloat16, "the one that was handed in stays as it is"
    start = {name: tensor.float() for name, tensor in snapshot(narrow).items()}
    replicas.learned = Learned({name: tensor * (1 + 2.0**-12) for name, tensor in start.items()}, 10.0, 1, 1)
    drafter.follow(1, {})
    assert not torch.equal(replicas.published[1]["fc.weight"], start["fc.weight"])
    assert drafter.head_to_keep().fc.weight.dtype == torch.bfloat16, "but the folder has the policy's type"


def test_its_state_is_the_newest_head_and_reaches_every_replica_again(policy, head):
    drafter, replicas = make(policy, head, "drift")
    for share in (0.9, 0.9, 0.8):
        drafter.observe(share, 5000)
    replicas.learned = learned(head, 2.0)
    drafter.follow(4, {})
    state = {name: tensor.clone() for name, tensor in online_state(drafter).items()}
    again, others = make(policy, head, "drift")
    load_online_state(again, state)
    assert list(others.published) == [4] and again.due and again.drift == drafter.drift
    assert torch.equal(others.published[4]["norm.weight"], 2 * head.norm.weight)
    # A run may go on with another number of replicas, and without any.
    said: list[str] = []
    alone = OnlineDrafter(policy, head, OnlineDrafterConfig(when="drift"), 0, said.append, others)
    load_online_state(alone, state)
    assert alone.due and torch.equal(alone.head.norm.weight, 2 * head.norm.weight)
    assert "begin anew" in said[0]
    load_online_state(again, online_state(alone))
    assert torch.equal(again.head.norm.weight, 2 * head.norm.weight)


def config_of(*keys: str) -> Config:
    own = ["rollout.speculation.drafters=[eagle]", "rollout.speculation.online.when=always"]
    return load_config(None, [*own, *keys])


def test_a_run_saves_and_restores_it(policy, head, tmp_path):
    config = config_of("cluster.replicas=2")
    replicas = Replicas()
    follower = make_follower(policy, head, config, print, replicas, replicas)
    assert isinstance(follower, RemoteOnlineDrafter)
    drafter = RunDrafter(follower, replicas, config, print)
    drafter.begin(tmp_path, 0)
    drafter.observe(0, {"eagle": DraftStats(100, 300, 250, [90, 80, 80], 100, 90)})
    replicas.learned = learned(head, 2.0)
    drafter.follow(1, 1.0)
    drafter.save(1, [1])
    drafter.close()
    kept = load_eagle(str(tmp_path / "drafter"), policy, torch.float32)
    assert torch.equal(kept.norm.weight, 2 * head.norm.weight)
    resumed, others = make(policy, head)
    RunDrafter(resumed, others, config, print).restore(tmp_path, 1, {})
    assert list(others.published) == [1]
    assert torch.equal(others.published[1]["norm.weight"], 2 * head.norm.weight)


def test_without_replicas_or_a_head(policy, head):
    replicas = Replicas()
    assert isinstance(make_follower(policy, head, config_of(), print, replicas, None), OnlineDrafter)
    with pytest.raises(ConfigError, match="online.when = 'always': no eagle head drafts for this policy"):
        make_follower(policy, None, config_of("cluster.replicas=2"), print, replicas, None)
