"""A head that learns in a whole run: that nothing else changes, and what the run keeps and says of it."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from paceline.cluster.pool import ReplicaPool
from paceline.config import ConfigError, load_config
from paceline.drafting.eagle_folder import load_eagle, save_eagle
from paceline.drafting.model_card import MeasuredAcceptance, read_acceptance, write_card
from paceline.drafting.recipe import check_teaching
from paceline.drafting.run_drafter import RunDrafter
from paceline.engine.engine import Engine
from paceline.learning.sentinel import Sentinel
from paceline.loop import train
from paceline.models.source import BUILTIN_POLICY
from paceline.plan.head_room import NO_ROOM
from paceline.policy.huggingface import load_policy
from paceline.report.console import Console
from paceline.run_setup import make_run_drafter
from paceline.session import Session, open_session
from paceline.stats import DraftStats
from tests.drafting.online_helpers import SMALL, online, spoiled_head
from tests.loop_helpers import comparable_metrics


def run(tmp_path, name: str, *overrides: str):
    config = load_config(None, [*SMALL, f"run.root={tmp_path}", f"run.name={name}", *overrides])
    return train(config).summary.run


def learned(run) -> list[dict]:
    return [record for record in comparable_metrics(run) if record["kind"] == "train"]


def final_policy(run) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    return load_file(newest / "policy" / "model.safetensors") | {
        f"optimiser.{name}": tensor for name, tensor in load_file(newest / "optimiser.safetensors").items()
    }


SHARE = "rollout.speculation.online.share=0.5"


@pytest.fixture
def two_updates(monkeypatch):
    """A share pays for two updates a step on any machine."""
    monkeypatch.setattr("paceline.drafting.online.updates_for", lambda *seconds: 2.0)
    monkeypatch.setattr("paceline.drafting.slices.UPDATE_ROWS", {"cpu": 128})


@pytest.mark.ci
@pytest.mark.slow
def test_online_head_changes_only_draft_statistics_of_a_run(tmp_path, two_updates):
    """Metrics, tokens, weights, and the moments of all gradients are those of a run that learns nothing."""
    keys = ["run.steps=4", f"rollout.speculation.eagle_path={spoiled_head(tmp_path / 'spoiled')}"]
    plain_run = run(tmp_path, "plain", *keys, "rollout.speculation.online.share=0")
    follows_run = run(tmp_path, "follows", *keys, SHARE, "rollout.speculation.online.lr=3e-3")
    plain, follows = learned(plain_run), learned(follows_run)
    own = ("drafter/", "speculation/", "rollout/decode_steps", "rollout/tail_steps")
    for before, after in zip(plain, follows, strict=True):
        kept = {key: value for key, value in before.items() if not key.startswith(own)}
        assert kept == {key: after[key] for key in kept}
    weights, again = final_policy(plain_run), final_policy(follows_run)
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    for file in sorted((plain_run / "samples").glob("*.jsonl")):
        assert file.read_text() == (follows_run / "samples" / file.name).read_text()
    assert all(step["drafter/updates"] > 0 for step in follows), "states are those of the learner's pass"
    assert [step["drafter/drafting_version"] for step in follows] == [0, 1, 2, 3]
    assert follows[-1]["speculation/eagle/accept_length"] > plain[-1]["speculation/eagle/accept_length"]


@pytest.mark.slow
def test_online_head_learns_in_another_process(tmp_path, two_updates):
    """And is the better for it: what the worker drafts with is what was published last."""
    steps = learned(run(tmp_path, "apart", "run.steps=4", "rollout.mode=async", "rollout.max_lag=1", SHARE))
    assert all(step["drafter/updates"] > 0 for step in steps)
    assert steps[-1]["drafter/drafting_version"] == 3


@pytest.mark.slow
def test_fresh_head_can_be_trained_in_the_run(tmp_path, two_updates):
    keys = ["rollout.speculation.eagle_path=fresh", SHARE, "rollout.speculation.online.lr=3e-3"]
    steps = learned(run(tmp_path, "fresh", "run.steps=8", *keys))
    assert steps[-1]["drafter/overlap"] > steps[0]["drafter/overlap"] + 0.1, [
        step["drafter/overlap"] for step in steps
    ]
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle(str(tmp_path / "fresh" / "drafter"), policy, torch.float32)
    assert head.config.draft_vocab == head.config.layer.vocab_size
    card = (tmp_path / "fresh" / "drafter" / "README.md").read_text()
    assert "| 0 |" in card and "| 7 |" in card, "how it started, and its last rollout"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(["rollout.speculation.verify=rejection"], marks=pytest.mark.ci),
        ["rollout.mode=partial", "rollout.max_running=6", "rollout.max_lag=2"],
        ["rollout.mode=oversample", "rollout.max_running=6", "rollout.prompts_in_flight=6"],
    ],
    ids=["rejection", "partial", "oversample"],
)
def test_resumed_run_gives_what_the_unbroken_one_did_where_drafts_decide(
    mode, tmp_path, two_updates, monkeypatch
):
    """The number of updates belongs to the checkpoint: after the second step no clock decides anything."""
    keys = ["checkpoint.every=1", "checkpoint.keep=9", SHARE, "rollout.speculation.online.lr=3e-3", *mode]
    keys.append(f"rollout.speculation.eagle_path={spoiled_head(tmp_path / 'spoiled')}")
    whole = run(tmp_path, "whole", "run.steps=6", *keys)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for step in (4, 5, 6):
        shutil.rmtree(cut / "checkpoints" / f"step_{step:06d}")

    def measured(*seconds: float) -> float:
        raise AssertionError("the number of updates is fixed")

    monkeypatch.setattr("paceline.drafting.online.updates_for", measured)
    train(
        load_config(None, [*SMALL, f"run.root={tmp_path}", "run.name=cut", "run.steps=6", *keys]), resume=cut
    )
    assert learned(cut) == learned(whole)
    weights, expected = final_policy(cut), final_policy(whole)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    heads = [load_file(folder / "checkpoints/step_000006/drafters.safetensors") for folder in (cut, whole)]
    assert heads[0].keys() == heads[1].keys() and any(".mean." in name for name in heads[0])
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert all(step["drafter/updates"] > 0 for step in learned(whole))


def said_of(capsys) -> str:
    said = capsys.readouterr()
    return " ".join((said.out + said.err).split())


@pytest.mark.parametrize(
    "first_accepted, share, verdict",
    [
        (0.999, 0.01, "less than expected"),
        pytest.param(0.1, 0.02, "as expected", marks=pytest.mark.slow),
        pytest.param(0.1, 0.01, "", marks=pytest.mark.slow),
    ],
)
def test_run_reports_expected_and_measured_acceptance_of_its_head(
    tmp_path, capsys, first_accepted, share, verdict
):
    """By default only where it is news."""
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    folder = tmp_path / "head"
    save_eagle(load_eagle("builtin-eagle", policy, torch.float32), folder)
    write_card(folder, None, MeasuredAcceptance("builtin", "other sums", 1.0, 9, 500, 6.0, first_accepted))
    config = load_config(
        None,
        [
            *SMALL,
            f"run.root={tmp_path}",
            "run.name=told",
            "run.steps=1",
            f"rollout.speculation.eagle_path={folder}",
            f"rollout.speculation.online.share={share}",
        ],
    )
    train(config, console=Console())
    text = said_of(capsys)
    assert ("other sums" in text) == bool(verdict) and verdict in text


@pytest.mark.slow
def test_resumed_run_may_stop_to_learn_and_begin_again(tmp_path, two_updates):
    """It drafts with what it had: also where a fresh head would have nothing to train it."""
    keys = [*SMALL, f"run.root={tmp_path}", "run.name=quiet", "rollout.speculation.eagle_path=fresh"]
    keys += ["checkpoint.every=1", "checkpoint.keep=9"]
    train(load_config(None, [*keys, "run.steps=2", SHARE]))
    folder = tmp_path / "quiet"
    train(load_config(None, [*keys, "run.steps=3", "rollout.speculation.online.share=0"]), resume=folder)
    train(load_config(None, [*keys, "run.steps=4", SHARE]), resume=folder)
    assert ["drafter/updates" in step for step in learned(folder)] == [True, True, False, True]
    heads = [
        load_file(path / "drafters.safetensors")["eagle.fc.weight"]
        for path in sorted((folder / "checkpoints").glob("step_*"))[-3:]
    ]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])
    assert (heads[1] - heads[2]).abs().max() < 0.1 * heads[1].abs().max(), "an update away"


def test_saved_rollouts_teach_no_head_unless_asked_for():
    """Nothing drafts there."""
    assert (
        make_run_drafter(SimpleNamespace(config=load_config(None, SMALL)), None, Console(quiet=True), False)
        is None
    )


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["rollout.speculation.drafters=[history]", "rollout.speculation.online.share=0.02"],
            "online.share = 0.02 does not apply.*lacks 'eagle'",
        ),
        (
            ["rollout.speculation.online.share=0", "rollout.speculation.online.lr=2e-3"],
            "online.lr = 0.002 does not apply: rollout.speculation.online.share = 0.*online.lr=0.001",
        ),
        (["rollout.speculation.online.when=never"], "online.when = 'never'.*online.share says.*0 instead of"),
        (["rollout.speculation.online.tokens=64"], "online.tokens = 64.*online.share says"),
    ],
)
def test_config_refuses_online_keys_that_would_not_be_read(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*SMALL, *overrides])
    assert load_config(None, [*SMALL, "rollout.speculation.online.when=auto"]), "as it was by default"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["eagle_path=fresh", "online.share=0"],
            "'fresh' starts from nothing.*share = 0: nothing would train",
        ),
        (
            ["eagle_path=fresh", "replicas=1"],
            "'fresh' starts from nothing.* cluster.replicas = 1: replicas teach",
        ),
        (["online.share=0.1", "replicas=1"], "^cluster.replicas = 1: .*no others .*online.share = 0.1"),
    ],
)
def test_run_refuses_a_head_that_nothing_would_train(overrides, message, tmp_path):
    keys = [f"{'cluster' if 'replicas' in key else 'rollout.speculation'}.{key}" for key in overrides]
    with pytest.raises(ConfigError, match=message):
        train(load_config(None, [*SMALL, f"run.root={tmp_path}", *keys]))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("replicas, says", [(0, []), (1, ["cluster.replicas = 1: replicas teach"]), (2, [])])
def test_resumed_run_warns_that_its_head_is_no_longer_trained(replicas, says):
    """It is opened all the same: `cluster.replicas` may change, and its head was taught."""
    fresh = ["rollout.speculation.eagle_path=fresh", "rollout.speculation.online.share=0.02"]
    told: list[str] = []
    config = load_config(None, [*SMALL, *fresh, f"cluster.replicas={replicas}"])
    check_teaching(config, resumes=True, warn=told.append)
    assert len(told) == len(says) and all(t.startswith(s) for t, s in zip(told, says, strict=True))


def test_run_refuses_to_teach_a_policy_without_a_head(tmp_path):
    from tests.loop_helpers import make_tiny_policy

    folder = make_tiny_policy(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="no eagle head drafts for this policy.*paceline drafter train"):
        run(tmp_path, "none", f"policy.path={folder}", "run.steps=1", SHARE)
    steps = learned(run(tmp_path, "default", f"policy.path={folder}", "run.steps=1"))
    assert steps and "drafter/updates" not in steps[0], "by default a head learns where there is one"


@pytest.mark.slow
@pytest.mark.parametrize("armed", [False, True])
def test_cache_is_released_once_a_step(armed, tmp_path, monkeypatch):
    """The policy learns, then its head, then the generator gets its memory back; and rollouts find it.

    Twice where the sentinel may want another cache after the update.
    """
    calls = []
    monkeypatch.setattr(Session, "gives_memory", True)
    monkeypatch.setattr(Sentinel, "armed", armed)
    for name in ("sleep", "wake"):
        plain = getattr(Engine, name)
        monkeypatch.setattr(
            Engine, name, lambda self, name=name, plain=plain: (calls.append(name), plain(self))[1]
        )
    follow = RunDrafter.follow
    monkeypatch.setattr(RunDrafter, "follow", lambda *given: (calls.append("drafter"), follow(*given))[1])
    run(tmp_path, "sleeps", "run.steps=2", SHARE)
    expected = [*(["sleep", "wake"] if armed else []), "sleep", "drafter", "wake"] * 2
    assert calls[: len(expected)] == expected and "wake" not in calls[len(expected) :], "it ends asleep"


def test_run_connects_its_head_with_the_learners_pass_by_default():
    session = open_session(load_config(None, SMALL), learns=True)
    learner = session.learning_home(print)
    drafter = make_run_drafter(session, learner, Console(quiet=True))
    assert drafter.online.share == 0.01 and learner.learner.capture_states == drafter.online.tap.watch
    session.close()


@pytest.mark.parametrize("drafters", ["[history]", "[]"])
def test_run_without_an_eagle_head_trains_none(drafters):
    own = ("rollout.speculation.drafters", "rollout.speculation.pacing", "rollout.speculation.tokens")
    kept = [override for override in SMALL if not override.startswith(own)]
    config = load_config(None, [*kept, f"rollout.speculation.drafters={drafters}"])
    session = open_session(config, learns=True)
    learner = session.learning_home(print)
    watched = learner.learner.capture_states
    assert make_run_drafter(session, learner, Console(quiet=True)) is None
    assert learner.learner.capture_states is watched
    session.close()


def test_run_warns_that_no_replica_has_room_to_train_a_head(capsys):
    """Nor does the run's own process, which has no use for the policy but to learn."""
    config = load_config(None, [*SMALL, "cluster.replicas=2"])
    pool = ReplicaPool.__new__(ReplicaPool)
    replica = SimpleNamespace(failure=None, description={"speculates": False, "trains": False})
    pool.idle_training, pool.replicas = None, [replica] * 2
    session = SimpleNamespace(backend=pool, config=config, idle_training=None, drafting_head=lambda: object())
    assert make_run_drafter(session, None, Console()) is None
    assert NO_ROOM.split(":")[0] in capsys.readouterr().err


def stats(right: int) -> dict[str, DraftStats]:
    return {"eagle": DraftStats(10, 30, right + 7, [right, 5, 2], 10)}


def test_model_card_shows_the_acceptance_of_rollouts(moved, tmp_path):
    """Of the first rollout and the last one, whichever step saves."""
    policy, head = moved
    drafter = RunDrafter(online(policy, head), policy.config, head, load_config(None, SMALL), print)
    drafter.begin(tmp_path)
    drafter.save_head()
    assert not (tmp_path / "drafter").exists(), "nothing was learned"
    for step, right in ((1, 9), (5, 7)):
        drafter.follow(step, stats(right), 1.0)
    drafter.online.version = 5
    drafter.save_head()
    found = [read_acceptance(tmp_path / "drafter", which) for which in ("first", "last")]
    assert [(one.step, one.first_accepted) for one in found] == [(0, 0.9), (4, 0.7)]
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "| 0 | 10 | 2.60 | 90.0% | 90.0%, 50.0%, 20.0% |" in card and "| 4 | 10 | 2.40 | 70.0% |" in card
    saved = load_eagle(str(tmp_path / "drafter"), policy, torch.float32)
    assert all(torch.equal(p, drafter.online.weights()[name]) for name, p in saved.named_parameters())
    again = RunDrafter(online(policy, head), policy.config, head, load_config(None, SMALL), print)
    again.begin(tmp_path)
    assert again.first == found[0]
    said: list[str] = []
    gone = RunDrafter(online(policy, head), policy.config, head, load_config(None, SMALL), said.append)
    gone.begin(tmp_path / "gone")
    gone.online.version = 1
    gone.save_head()
    assert "could not be written" in said[0] and not (tmp_path / "gone").exists(), (
        "a run's folder was deleted"
    )


@pytest.mark.parametrize(
    "overrides, places, mean",
    [
        (["shape=chain", "pacing=fixed", "tokens=3"], (0.9, 0.5, 0.2), 1.6),
        (["shape=tree", "pacing=fixed", "tokens=3"], (), 1.6),
        (["shape=chain", "pacing=adaptive"], (), 0.9),
    ],
)
def test_acceptance_is_by_place_of_fixed_chains_and_of_first_tokens_where_drafts_differ(
    moved, overrides, places, mean
):
    """Trees count by number of the node; what paced drafts have in common is a first token."""
    policy, head = moved
    config = load_config(None, [*SMALL, *(f"rollout.speculation.{key}" for key in overrides)])
    drafter = RunDrafter(online(policy, head), policy.config, head, config, print)
    drafter.follow(1, stats(9), 1.0)
    assert drafter.last.accepted_at == places and drafter.last.first_accepted == 0.9
    assert drafter.online.accepted.mean == mean
