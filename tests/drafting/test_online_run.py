"""A head that learns in a whole run: that nothing else changes, and what the run keeps and says of it."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from paceline.cluster.pool import ReplicaPool
from paceline.config import ConfigError, OnlineDrafterConfig, load_config
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle, save_eagle
from paceline.drafting.model_card import MeasuredAcceptance, read_acceptance, write_card
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.publishing import Probation
from paceline.drafting.recipe import check_teaching
from paceline.drafting.run_drafter import RunDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.learning.checkpoint import Beside, TrainingState, checkpoint_steps, write_checkpoint
from paceline.learning.sentinel import Sentinel
from paceline.loop import train
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.plan.head_room import NO_ROOM
from paceline.policy.huggingface import load_policy
from paceline.report.console import Console
from paceline.run_setup import make_run_drafter
from paceline.session import Session, open_session
from paceline.stats import DraftStats
from paceline.types import Request, SamplingParams
from tests.drafting.online_helpers import SMALL, Recorded, follow, groups_of, spoiled_head
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


@pytest.mark.slow
@pytest.mark.parametrize("when", [pytest.param("always", marks=pytest.mark.ci), "auto"])
def test_online_head_changes_only_draft_statistics_of_a_run(tmp_path, when):
    """Metrics, tokens, weights, and the moments of all gradients are those of a run that learns nothing."""
    keys = ["run.steps=3", f"rollout.speculation.eagle_path={spoiled_head(tmp_path / 'spoiled')}"]
    plain_run = run(tmp_path, "plain", *keys, "rollout.speculation.online.when=never")
    online_keys = [
        f"rollout.speculation.online.{key}" for key in (f"when={when}", "unroll=2", "batch=2", "lr=3e-3")
    ]
    follows_run = run(tmp_path, "follows", *keys, *online_keys)
    plain, follows = learned(plain_run), learned(follows_run)
    own = ("drafter/", "speculation/", "rollout/decode_steps", "rollout/tail_steps")
    for before, after in zip(plain, follows, strict=True):
        kept = {key: value for key, value in before.items() if not key.startswith(own)}
        assert kept == {key: after[key] for key in kept}
    weights, again = final_policy(plain_run), final_policy(follows_run)
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    for file in sorted((plain_run / "samples").glob("*.jsonl")):
        assert file.read_text() == (follows_run / "samples" / file.name).read_text()
    if when == "always":
        assert all(step["drafter/updates"] > 0 for step in follows)
        assert all(step["drafter/rebuilt"] == 0 for step in follows), "no second pass"
        assert [step["drafter/drafting_version"] for step in follows] == [0, 0, 2], "compared in the second"
        assert follows[-1]["speculation/eagle/accept_length"] != plain[-1]["speculation/eagle/accept_length"]


@pytest.mark.slow
def test_online_head_learns_in_another_process(tmp_path):
    """And is the better for it: what the worker drafts with is what was published last."""
    keys = [
        "rollout.mode=async",
        "rollout.max_lag=1",
        *(f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=1", "batch=2")),
    ]
    steps = learned(run(tmp_path, "apart", "run.steps=4", *keys))
    assert all(step["drafter/updates"] > 0 for step in steps)
    assert steps[-1]["drafter/drafting_version"] == 3


@pytest.mark.slow
def test_fresh_head_can_be_trained_in_the_run(tmp_path):
    keys = [
        "rollout.speculation.eagle_path=fresh",
        *(f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=1", "batch=2", "lr=3e-3")),
    ]
    steps = learned(run(tmp_path, "fresh", "run.steps=6", *keys))
    assert steps[-1]["drafter/overlap"] > steps[0]["drafter/overlap"] + 0.1, [
        step["drafter/overlap"] for step in steps
    ]
    head = load_eagle(
        str(tmp_path / "fresh" / "drafter"),
        load_policy(BUILTIN_POLICY, torch.float32),
        torch.float32,
    )
    assert head.config.draft_vocab == head.config.layer.vocab_size


@pytest.mark.slow
def test_resumed_run_continues_as_it_would_have(tmp_path):
    online_keys = (
        "rollout.speculation.online.when=always",
        "rollout.speculation.online.unroll=2",
        "checkpoint.every=1",
    )
    whole = learned(run(tmp_path, "whole", "run.steps=4", *online_keys))
    first = run(tmp_path, "cut", "run.steps=2", *online_keys)
    config = load_config(None, [*SMALL, f"run.root={tmp_path}", "run.name=cut", "run.steps=4", *online_keys])
    train(config, resume=first)
    assert learned(first) == whole
    card = (first / "drafter" / "README.md").read_text()
    assert "| 0 |" in card and "| 3 |" in card, "how it started, and its last rollout"
    kept = [path.name for path in sorted((first / "drafter_training").iterdir())]
    assert kept[-1] == "step_000004.safetensors" and all(name.startswith("step_") for name in kept)


@pytest.mark.slow
def test_checkpoint_exists_only_when_its_head_does(tmp_path, monkeypatch):
    """Killed between the two, a run would resume with another head than the one it had."""
    rename, seen = os.rename, []

    def watched(source, target) -> None:
        target = Path(target)
        if target.parent.name == "checkpoints" and target.name.startswith("step_"):
            saves = target.parent.parent / "drafter_training"
            seen.append((target.name, sorted(path.stem for path in saves.glob("*.safetensors"))))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    run(
        tmp_path,
        "order",
        "run.steps=3",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "rollout.speculation.online.when=always",
        "rollout.speculation.online.tokens=64",
    )
    assert [name for name, _ in seen] == ["step_000001", "step_000002", "step_000003"]
    assert all(name in saves for name, saves in seen)
    assert seen[1][1] == ["step_000001", "step_000002"], "until the older checkpoint is gone its head stays"
    assert [p.name for p in sorted((tmp_path / "order" / "drafter_training").iterdir())] == [
        "step_000003.json",
        "step_000003.safetensors",
    ]


def said_of(capsys) -> str:
    said = capsys.readouterr()
    return " ".join((said.out + said.err).split())


@pytest.mark.parametrize(
    "first_accepted, when, verdict",
    [
        (0.999, "auto", "less than expected"),
        pytest.param(0.1, "drift", "as expected", marks=pytest.mark.slow),
        pytest.param(0.1, "auto", "", marks=pytest.mark.slow),
    ],
)
def test_run_reports_expected_and_measured_acceptance_of_its_head(
    tmp_path, capsys, first_accepted, when, verdict
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
            f"rollout.speculation.online.when={when}",
        ],
    )
    train(config, console=Console())
    text = said_of(capsys)
    assert ("other sums" in text) == bool(verdict) and verdict in text


@pytest.mark.slow
def test_run_that_did_not_ask_for_learning_reports_and_saves_none(tmp_path, capsys):
    """Its steps are far too short for an update; and it may be asked for when the run is resumed."""
    keys = [*SMALL, f"run.root={tmp_path}", "run.name=quiet"]
    train(load_config(None, [*keys, "run.steps=2", "checkpoint.every=1"]), console=Console())
    folder = tmp_path / "quiet"
    assert all("drafter/updates" in step for step in learned(folder))
    assert not (folder / "drafter").exists() and not (folder / "drafter_training").exists()
    train(load_config(None, [*keys, "run.steps=3"]), resume=folder, console=Console())
    assert "eagle head" not in said_of(capsys)
    never = [*keys, "run.steps=4", "rollout.speculation.online.when=never"]
    train(load_config(None, never), resume=folder, console=Console())
    assert "drafter/updates" not in learned(folder)[-1]
    asked = [f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=1", "tokens=64")]
    train(load_config(None, [*keys, "run.steps=5", *asked]), resume=folder, console=Console())
    assert learned(folder)[-1]["drafter/updates"] > 0 and (folder / "drafter" / "config.json").exists()


@pytest.mark.slow
def test_fresh_head_without_time_to_learn_warns(tmp_path, capsys):
    fresh = "rollout.speculation.eagle_path=fresh"
    train(
        load_config(None, [*SMALL, fresh, f"run.root={tmp_path}", "run.name=fresh", "run.steps=2"]),
        console=Console(),
    )
    assert "the eagle head does not learn" in said_of(capsys)


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
            ["rollout.speculation.drafters=[history]", "rollout.speculation.online.when=drift"],
            "online.when = 'drift' does not apply.*lacks 'eagle'",
        ),
        (
            ["rollout.speculation.online.when=always", "rollout.speculation.online.budget=0.1"],
            "online.budget = 0.1 does not apply.*Use when=auto.*online.budget=0.01",
        ),
        (
            ["rollout.speculation.online.when=never", "rollout.speculation.online.lr=2e-3"],
            "online.lr = 0.002 does not apply: rollout.speculation.online.when = 'never'.*online.lr=0.001",
        ),
        (
            ["rollout.speculation.drafters=[history]", "rollout.speculation.online.budget=0.02"],
            "online.budget = 0.02 does not apply.*lacks 'eagle'",
        ),
    ],
)
def test_config_refuses_speculation_keys_that_would_not_be_read(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, [*SMALL, *overrides])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["eagle_path=fresh", "online.when=drift"],
            "'fresh' starts from nothing.*'drift': nothing would train",
        ),
        (
            ["eagle_path=fresh", "online.when=never"],
            "'fresh' starts from nothing.*'never': nothing would train",
        ),
        (
            ["eagle_path=fresh", "replicas=1"],
            "'fresh' starts from nothing.* cluster.replicas = 1: replicas teach",
        ),
        (["online.when=always", "replicas=1"], "^cluster.replicas = 1: .*no others .*online.when = 'always'"),
        (["online.when=drift", "replicas=1"], "^cluster.replicas = 1: .*Use cluster.replicas=2 or more"),
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
    fresh = ["rollout.speculation.eagle_path=fresh", "rollout.speculation.online.when=always"]
    told: list[str] = []
    config = load_config(None, [*SMALL, *fresh, f"cluster.replicas={replicas}"])
    check_teaching(config, resumes=True, warn=told.append)
    assert len(told) == len(says) and all(t.startswith(s) for t, s in zip(told, says, strict=True))


def test_always_refuses_a_policy_without_a_head(tmp_path):
    from tests.loop_helpers import make_tiny_policy

    folder = make_tiny_policy(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="no eagle head drafts for this policy.*paceline drafter train"):
        run(
            tmp_path, "none", f"policy.path={folder}", "run.steps=1", "rollout.speculation.online.when=always"
        )
    steps = learned(run(tmp_path, "auto", f"policy.path={folder}", "run.steps=1"))
    assert steps and "drafter/updates" not in steps[0], "by default a head learns where there is one"


@pytest.mark.gpu
def test_published_head_is_where_the_graphs_read_it():
    """Drafts of an engine whose graphs were captured before the head learned are those of a new engine."""
    policy = load_policy(BUILTIN_POLICY, torch.bfloat16, torch.device("cuda"))
    head = load_eagle("builtin-eagle", policy, torch.bfloat16, torch.device("cuda"))

    def engine() -> Engine:
        settings = EngineSettings(max_running=8, kv_tokens=4096, deterministic=True)
        return Engine(policy, settings, drafters=[EagleDrafter(head)], pacer=FixedPacer(Strategy("eagle", 3)))

    def accepted(engine: Engine) -> list[int]:
        requests = [
            Request(str(i), (3 + i, 9, 4, 8), i, SamplingParams(max_tokens=60, ignore_eos=True))
            for i in range(8)
        ]
        engine.submit(requests)
        assert len(list(engine.completions())) == 8
        return engine.take_stats().drafts["eagle"].accepted_at

    old = engine()
    before = accepted(old)
    config = OnlineDrafterConfig(when="always", lr=1e-2, unroll=2, batch=2)
    drafter = OnlineDrafter(policy, head, config, 0, print, drafting=old)
    drafter.probation = Probation(proven=True)  # however it drafts
    follow(drafter, 1, groups_of(policy, 16))
    assert drafter.publisher.current.version == 1
    assert accepted(old) == accepted(engine()) != before


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
    run(tmp_path, "sleeps", "run.steps=2", "rollout.speculation.online.when=always")
    expected = [*(["sleep", "wake"] if armed else []), "sleep", "drafter", "wake"] * 2
    assert calls[: len(expected)] == expected and "wake" not in calls[len(expected) :], "it ends asleep"


@pytest.mark.parametrize("gives_memory", [False, True])
def test_run_connects_its_head_with_the_learners_pass_and_idle_time_by_default(gives_memory, monkeypatch):
    """Where the KV pool has the memory meanwhile, waiting for rewards is no time to learn in."""
    monkeypatch.setattr(Session, "gives_memory", gives_memory)
    config = load_config(None, SMALL)
    assert config.rollout.speculation.online.when == "auto"
    session = open_session(config, learns=True)
    learner = session.learning_home(print)
    drafter = make_run_drafter(session, learner, Console(quiet=True))
    assert isinstance(drafter.online, OnlineDrafter)
    assert learner.learner.capture_states == drafter.online.texts.tap.watch
    monkeypatch.setattr(OnlineDrafter, "has_work", True)
    offered = []
    drafter.online.learn_while = lambda waiting: offered.append(waiting())
    session.sampler.idle_work(lambda: True)
    assert offered == ([] if gives_memory else [True])
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


def test_checkpoint_is_renamed_only_after_its_head_is_written(tmp_path):
    seen = []
    state = TrainingState(step=6, optimiser_steps=6, task_position=3, best_reward=0.0)
    beside = Beside(written_elsewhere=lambda: seen.append(checkpoint_steps(tmp_path)))
    final = write_checkpoint(tmp_path, lambda partial: {}, state, 2, beside)
    assert seen == [[]] and checkpoint_steps(tmp_path) == [6] and final.is_dir()


def test_model_card_shows_the_acceptance_of_rollouts(tmp_path):
    """Of the first rollout and the last one, whichever step saves."""
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle("builtin-eagle", policy, torch.float32)
    online = OnlineDrafter(policy, head, OnlineDrafterConfig(when="always"), 0, print)
    drafter = RunDrafter(online, Recorded(), load_config(None, SMALL), print)
    drafter.begin(tmp_path, 0)
    for step, right in ((0, 9), (4, 7)):
        drafter.observe(step, {"eagle": DraftStats(10, 30, 16, [right, 5, 2], 10)})
    online.publish(5)
    drafter.save(5, [])
    drafter.close()
    found = [read_acceptance(tmp_path / "drafter", which) for which in ("first", "last")]
    assert [(one.step, one.first_accepted) for one in found] == [(0, 0.9), (4, 0.7)]
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "| 0 | 10 | 2.60 | 90.0% | 90.0%, 50.0%, 20.0% |" in card and "| 4 | 10 | 2.60 | 70.0% |" in card
