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
        self.starts: list[float | None] = []  # the scale of what replicas are given to begin from
        self.waits: list[float] = []
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.best: float | None = 1.0  # the scale of the head that drafts best; None: nothing tells
        self.judged = 0
        self.recorded = 0

    def begin_rollout(self, start=None) -> None:
        self.rollouts.append("begin")
        self.starts.append(None if start is None else float(start["norm.weight"].mean()))

    def end_rollout(self) -> None:
        self.rollouts.append("end")

    def take(self, seconds: float) -> Learned | None:
        self.waits.append(seconds)
        learned, self.learned = self.learned, None
        return learned

    def quality(self, weights) -> float | None:
        self.judged += 1
        if self.best is None:
            return None
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


def learned(head, scale: float = 1.0, updates: int = 8, **figures) -> Learned:
    weights = {name: scale * p for name, p in snapshot(head).items()}
    return Learned(weights, tokens=50.0, updates=updates, **({"replicas": 2} | figures))


def scale_of(head) -> float:
    return float(head.norm.weight.detach().mean())


def make_proven(policy, head, when: str = "always", said: list | None = None):
    """Returns one whose head has learned and drafts, at 1.5 times the weights, in version 2."""
    drafter, replicas = make(policy, head, when, said)
    replicas.best = 1.5 * scale_of(head)
    for step in (1, 2):
        drafter.observe(0.8, 5000)
        replicas.learned = learned(head, 1.5)
        drafter.follow(step, {})
    assert drafter.probation.proven and list(replicas.published) == [2]
    return drafter, replicas


def test_remote_head_is_published_once_a_step_under_its_number(policy, head):
    drafter, replicas = make_proven(policy, head)
    with drafter.while_generating():
        assert replicas.rollouts == ["begin"]
    assert replicas.rollouts == ["begin", "end"] and replicas.starts == [None], "from what was published"
    replicas.learned = learned(head, 2.0, seconds=3.0, waited=0.004, longest_wait=0.003)
    drafter.observe(0.8, 5000)
    metrics = drafter.follow(7, {}, step_seconds=20.0)
    assert list(replicas.published) == [2, 7] and metrics["drafter/version"] == 7
    assert torch.equal(replicas.published[7]["norm.weight"], 2 * head.norm.weight)
    assert (metrics["drafter/tokens"], metrics["drafter/updates"], metrics["drafter/trainers"]) == (50, 8, 2)
    assert metrics["time/drafter_idle"] == 3.0 and metrics["time/drafter_stop"] == 0.003
    assert metrics["time/drafter_displaced"] >= 0.004
    assert replicas.waits[-1] == 0.01 * 20.0, "the step's budget, if a replica does not answer"
    again = drafter.follow(8, {}, 20.0)
    assert list(replicas.published) == [2, 7]
    assert again["drafter/version"] == 7 and again["drafter/updates"] == 0


def test_remote_head_drafts_once_it_is_as_good_along_texts_it_has_not_seen(policy, head):
    drafter, replicas = make(policy, head)
    good, first = scale_of(head), snapshot(head)
    replicas.best = good
    replicas.learned = learned(head, 3.0, updates=6)
    with drafter.while_generating():
        pass
    drafter.follow(1, {})
    replicas.learned = learned(head, 3.0, updates=6)
    with drafter.while_generating():
        pass
    drafter.follow(2, {})
    assert not replicas.judged and not replicas.published, "three updates of each replica tell nothing"
    assert replicas.starts == [None, pytest.approx(3 * good)], "but learning continues from them"
    replicas.learned = learned(head, 2.0)
    drafter.follow(3, {})
    assert replicas.judged == 2 and not replicas.published, "worse after six"
    assert all(torch.equal(drafter.weights()[name], first[name]) for name in first), "what drafts is kept"
    replicas.learned = learned(head, 1.0)
    drafter.follow(4, {})
    assert replicas.judged == 2, "twice as many first"
    replicas.learned = learned(head, 1.2)
    metrics = drafter.follow(5, {})
    assert replicas.judged == 4 and list(replicas.published) == [5] and metrics["drafter/version"] == 5
    assert torch.equal(replicas.published[5]["norm.weight"], 1.2 * head.norm.weight), "with the newest term"


def test_aborted_rollout_ends_training(policy, head):
    drafter, replicas = make(policy, head)
    with pytest.raises(KeyboardInterrupt), drafter.while_generating():
        raise KeyboardInterrupt
    assert replicas.rollouts == ["begin", "end"]


def test_remote_head_that_got_worse_is_rolled_back_with_what_was_learned_from_it(policy, head):
    said: list[str] = []
    drafter, replicas = make_proven(policy, head, said=said)
    drafter.observe(0.8, 5000)
    replicas.learned = learned(head, 3.0)
    drafter.follow(3, {})
    drafter.observe(0.6, 5000)
    replicas.learned = learned(head, 3.5)
    metrics = drafter.follow(4, {})
    assert "version 3 drafts worse than that of version 2" in said[0]
    assert metrics["drafter/rollbacks"] == 1 and metrics["drafter/version"] == 4
    assert torch.equal(replicas.published[4]["norm.weight"], 1.5 * head.norm.weight)
    drafter.observe(0.8, 5000)
    replicas.learned = learned(head, 1.5)
    assert drafter.follow(5, {})["drafter/version"] == 4, "what is learned from now on is judged anew,"
    drafter.observe(0.8, 5000)
    assert drafter.follow(6, {})["drafter/version"] == 6, "and it continues from there"


def test_remote_head_state_is_the_newest_head_and_reaches_every_replica_again(policy, head):
    drafter, replicas = make_proven(policy, head)
    replicas.learned = learned(head, 2.0)
    drafter.follow(4, {})
    drafter.config = OnlineDrafterConfig(when="drift")
    for share in (0.9, 0.9, 0.8):
        drafter.observe(share, 5000)
    state = {name: tensor.clone() for name, tensor in online_state(drafter).items()}
    again, others = make(policy, head, "drift")
    load_online_state(again, state)
    assert list(others.published) == [4] and again.due and again.drift == drafter.drift
    assert torch.equal(others.published[4]["norm.weight"], 2 * head.norm.weight)
    assert again.probation == drafter.probation and again.probation.proven
    # A run may resume with another number of replicas, and without any.
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


def test_run_saves_and_restores_a_remote_head(policy, head, tmp_path):
    config = config_of("cluster.replicas=2")
    replicas = Replicas()
    follower = make_follower(policy, head, config, print, replicas, replicas)
    assert isinstance(follower, RemoteOnlineDrafter)
    drafter = RunDrafter(follower, replicas, config, print)
    drafter.begin(tmp_path, 0)
    drafter.observe(0, {"eagle": DraftStats(100, 300, 250, [90, 80, 80], 100)})
    replicas.best = 2 * scale_of(head)
    for step in (1, 2):
        replicas.learned = learned(head, 2.0)
        drafter.follow(step, 1.0)
    drafter.save(2, [2])
    drafter.close()
    kept = load_eagle(str(tmp_path / "drafter"), policy, torch.float32)
    assert torch.equal(kept.norm.weight, 2 * head.norm.weight)
    resumed, others = make(policy, head)
    RunDrafter(resumed, others, config, print).restore(tmp_path, 2, {})
    assert list(others.published) == [2]
    assert torch.equal(others.published[2]["norm.weight"], 2 * head.norm.weight)


def test_make_follower_without_replicas_or_a_head(policy, head):
    replicas = Replicas()
    assert isinstance(make_follower(policy, head, config_of(), print, replicas, None), OnlineDrafter)
    with pytest.raises(ConfigError, match="online.when = 'always': no eagle head drafts for this policy"):
        make_follower(policy, None, config_of("cluster.replicas=2"), print, replicas, None)
