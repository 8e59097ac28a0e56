"""Whole runs whose replicas train the head in idle time: the same tokens, a newer head, no process left."""

import json
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import load_config
from paceline.loop import Trainer
from paceline.report.console import Console
from paceline.runs.interruption import Interruption
from tests.cluster.test_pool import is_running, pids
from tests.drafting.online_helpers import spoiled_head
from tests.loop_helpers import comparable_metrics

SMALL = [
    "run.device=cpu",
    "run.threads=1",
    "run.steps=6",
    "checkpoint.every=2",
    "task.train_problems=32",
    "task.eval_problems=4",
    "eval.every=0",
    "eval.problems=4",
    "eval.max_tokens=24",
    "report.closing_pairs=0",
    "rollout.prompts_per_step=6",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=200",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.tokens=3",
    "cluster.replicas=2",
]
ONLINE = ["rollout.speculation.online.share=0.02"]
# What depends on which requests ran together, and on how well was drafted.
OWN = ("drafter/", "speculation/", "cluster/", "rollout/decode_steps", "rollout/tail_steps")

pytestmark = pytest.mark.slow


def run(tmp_path, name: str, *overrides: str, resume=None, meanwhile=lambda pool: None):
    """Makes a run; `meanwhile` is called with its replicas in a thread of its own."""
    config = load_config(None, [*SMALL, f"run.root={tmp_path}", f"run.name={name}", *overrides])
    trainer = Trainer(config, "default", resume, None, Console(quiet=True))
    pool = trainer.session.backend
    before = pids(pool)
    thread = threading.Thread(target=meanwhile, args=(pool,), daemon=True)
    thread.start()
    with Interruption() as interruption:
        assert trainer.run(interruption).finished
    thread.join(120)
    assert not any(is_running(pid) for pid in {*before, *pids(pool)}), "no process is left"
    return tmp_path / name


def steps_of(run) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


def data_of(run) -> list[dict]:
    return [
        {key: value for key, value in record.items() if not key.startswith(OWN)}
        for record in comparable_metrics(run)
        if record["kind"] == "train"
    ]


def policy_of(run) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    return load_file(newest / "policy" / "model.safetensors")


def assert_same_run(ours, theirs) -> None:
    assert data_of(ours) == data_of(theirs)
    weights, expected = policy_of(ours), policy_of(theirs)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    for file in sorted((theirs / "samples").glob("*.jsonl")):
        assert file.read_text() == (ours / "samples" / file.name).read_text()


def accepted(steps: list[dict]) -> tuple[float, float]:
    """Returns the accepted tokens of a draft of three over these steps, and the number of drafts."""
    proposed = [step["speculation/proposed"] for step in steps]
    found = sum(step["speculation/accepted"] * n for step, n in zip(steps, proposed, strict=True))
    return 3 * found / sum(proposed), sum(proposed) / 3


def wait_for_successors(pool, killed: list[int]) -> None:
    """Lets no rollout begin while a killed replica has no successor that can generate."""
    begin_rollout = pool.idle_training.begin_rollout

    def begin() -> None:
        limit = time.monotonic() + 120
        while killed and not (killed[0] not in pids(pool) and all(r.ready for r in pool.replicas)):
            assert time.monotonic() < limit, "no worker took over"
            time.sleep(0.01)
        begin_rollout()

    pool.idle_training.begin_rollout = begin


@pytest.fixture(scope="module")
def bad_head(tmp_path_factory) -> str:
    """A head that a few updates improve: a good one would keep drafting."""
    folder = spoiled_head(tmp_path_factory.mktemp("heads") / "spoiled")
    return f"rollout.speculation.eagle_path={folder}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory, bad_head):
    return run(tmp_path_factory.mktemp("plain"), "plain", bad_head, "rollout.speculation.online.share=0")


@pytest.fixture(scope="module")
def taught(tmp_path_factory, bad_head):
    return run(tmp_path_factory.mktemp("taught"), "taught", *ONLINE, bad_head)


def test_idle_training_changes_a_run_only_in_its_drafts(plain, taught):
    assert_same_run(taught, plain)
    before, after = steps_of(plain), steps_of(taught)
    versions = [step["drafter/drafting_version"] for step in after]
    assert versions == sorted(versions) and versions[0] == 0 < versions[-1]
    assert sum(step["drafter/tokens"] for step in after) > 0 and after[-1]["drafter/version"] > 1
    (untaught, drafts), (followed, again) = accepted(before[2:]), accepted(after[2:])
    # A draft of three has a deviation of 1.5 at most; a ruined head accepts next to nothing.
    assert followed > untaught - 3 * 1.5 * (1 / drafts + 1 / again) ** 0.5, "it does not draft worse"
    for step in after:
        assert 0 <= step["time/unused_share"] <= step["time/idle_share"]
    assert sum(s["time/unused_share"] for s in after) < sum(s["time/idle_share"] for s in after)
    assert all(step["time/unused_share"] == step["time/idle_share"] for step in before)


def test_idle_training_tolerates_a_replica_killed_while_it_trains(plain, bad_head, tmp_path):
    """All steps after that begin when the victim's successor is there: one replica alone has no idle time."""
    killed = []

    def kill_one_that_trains(pool) -> None:
        wait_for_successors(pool, killed)
        while not killed:
            time.sleep(0.002)
            training = [*pool.idle_training.training]
            if training:
                victim = pool.replicas[training[0]].worker.id
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

    again = run(tmp_path, "killed", *ONLINE, bad_head, meanwhile=kill_one_that_trains)
    assert killed and not is_running(killed[0])
    assert_same_run(again, plain)
    last = steps_of(again)[-1]
    assert last["cluster/restarts"] == 1 and last["drafter/version"] > 0, "and others continue to learn"


def test_resumed_run_drafts_with_the_newest_head_on_every_replica(plain, bad_head, tmp_path):
    cut = run(tmp_path, "cut", *ONLINE, bad_head, "run.steps=4")
    published = steps_of(cut)[-1]["drafter/version"]
    assert published > 0
    newest = load_file(cut / "checkpoints" / "step_000004" / "drafters.safetensors")
    config = load_config(None, [*SMALL, *ONLINE, bad_head, f"run.root={tmp_path}", "run.name=cut"])
    trainer = Trainer(config, "default", cut, None, Console(quiet=True))
    pool = trainer.session.backend
    kept, heads = pool.restored.published, pool.speculation.drafter_state()
    with Interruption() as interruption:
        assert trainer.run(interruption).finished
    assert kept.fields["version"] == published, "for a process that takes over"
    for prefix in ("", "replica1."):
        assert torch.equal(heads[f"{prefix}eagle.fc.weight"], newest["online.mean.fc.weight"]), prefix
    steps = steps_of(cut)
    assert steps[4]["drafter/drafting_version"] == published and len(steps) == 6
    assert_same_run(cut, plain)
