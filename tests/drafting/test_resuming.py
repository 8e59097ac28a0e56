"""A head that learns, saved and resumed: as if uninterrupted, or with a warning."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import OnlineDrafterConfig, load_config
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.online_state import load_early_state, load_online_state, online_state
from paceline.drafting.publishing import Probation
from paceline.drafting.run_drafter import RunDrafter
from paceline.drafting.saving import cut_back_saves, saved_steps
from paceline.loop import train
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.report.console import Console
from tests.drafting.online_helpers import SMALL, Recorded, follow, groups_of, online


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_online_state_is_complete(dtype):
    """One that resumes from a saved state takes the very same steps; also where masters are not the
    parameters.
    """
    policy = load_policy(BUILTIN_POLICY, dtype)
    head = load_eagle("builtin-eagle", policy, dtype)
    first, second = (online(policy, head, when="drift", unroll=2, batch=4) for _ in range(2))
    # A CPU multiplies bf16 slowly.
    groups = groups_of(policy, 6 if dtype == torch.float32 else 2)
    first.observe(0.9, 5000)
    first.observe(0.8, 5000)
    first.learning.slice_rows //= 2
    follow(first, 1, groups[:1])
    load_online_state(second, {name: tensor.clone() for name, tensor in online_state(first).items()})
    assert second.drift == first.drift and second.auto == first.auto and second.due
    assert second.learning.slice_rows == first.learning.slice_rows
    ours, theirs = (
        {k: v for k, v in follow(o, 2, groups).items() if "time" not in k} for o in (first, second)
    )
    assert ours == theirs and ours["drafter/updates"] > 0
    assert all(
        torch.equal(a, b) for a, b in zip(first.head.parameters(), second.head.parameters(), strict=True)
    )
    assert all(torch.equal(mean, second.average.mean[name]) for name, mean in first.average.mean.items())


def test_resumed_run_keeps_watching_a_head_that_got_worse(moved):
    """A clear fall after a head was published is looked into in the next step, by whichever run makes it."""
    policy, head = moved
    groups = groups_of(policy, 4)

    def watching() -> OnlineDrafter:
        drafter = online(policy, head, unroll=1, batch=4)
        drafter.probation = Probation(proven=True)
        return drafter

    first = watching()
    for step, share in enumerate((0.9, 0.9), 1):
        follow(first, step, groups)
        first.observe(share, 5000)
    saved = {name: tensor.clone() for name, tensor in online_state(first).items()}
    follow(first, 3, groups)
    second = watching()
    load_online_state(second, saved)
    follow(second, 3, groups)
    for drafter in (first, second):
        drafter.observe(0.5, 5000)
        assert drafter.publisher.suspect
    early = watching()  # saved between the fall and what is made of it
    load_online_state(early, {name: tensor.clone() for name, tensor in online_state(first).items()})
    for drafter in (first, second, early):
        before = drafter.publisher.before.weights["fc.weight"]
        drafter._judge = lambda weights, best=before: float(weights["fc.weight"] is best)
        follow(drafter, 4, groups)
        assert drafter.publisher.rollbacks == 1 and drafter.publisher.current.weights["fc.weight"] is before


@pytest.mark.parametrize("harm", ["flipped", "shape", "key", "missing"])
def test_damaged_save_of_a_head_is_skipped_with_a_warning(moved, tmp_path, harm):
    policy, head = moved
    said: list[str] = []
    drafter = online(policy, head, unroll=1, batch=4)
    run_drafter = RunDrafter(drafter, Recorded(), load_config(None, SMALL), warn=said.append)
    run_drafter.begin(tmp_path, 0)
    follow(drafter, 1, groups_of(policy, 4))
    for step in (1, 2):
        run_drafter.save(step, [1])
        run_drafter.flush()
    file = tmp_path / "drafter_training" / "step_000002.safetensors"
    digest = file.with_suffix(".json")
    if harm == "flipped":
        content = bytearray(file.read_bytes())
        content[-9] ^= 64
        file.write_bytes(content)
    elif harm == "missing":
        file.unlink()
        digest.unlink()
    else:
        tensors = load_file(file)
        if harm == "shape":
            tensors["online.head.fc.weight"] = tensors["online.head.fc.weight"][:1].clone()
        else:
            del tensors["online.counter.version"]
        save_file(tensors, file)
        digest.unlink()
    again = RunDrafter(online(policy, head), Recorded(), load_config(None, SMALL), warn=said.append)
    eagle = {f"eagle.{name}": p.detach() for name, p in head.named_parameters()}
    again.restore(tmp_path, 2, eagle)
    expected = {
        "flipped": "is damaged and left out",
        "shape": "head.fc.weight is (1, ",
        "key": "counter.version is missing",
        "missing": "has no save of step 2: the eagle head resumes from step 1",
    }
    assert any(expected[harm] in line for line in said), said


def test_run_that_has_lost_its_folder_saves_no_head_in_it(moved, tmp_path):
    policy, head = moved

    def lost() -> None:
        raise LookupError("somebody else's")

    run_drafter = RunDrafter(online(policy, head, unroll=1), Recorded(), load_config(None, SMALL), warn=print)
    run_drafter.begin(tmp_path, 0, lost)
    with pytest.raises(LookupError):
        run_drafter.save(1, [1])
    assert not [*tmp_path.iterdir()]
    said: list[str] = []
    gone = RunDrafter(online(policy, head, unroll=1), Recorded(), load_config(None, SMALL), warn=said.append)
    gone.begin(tmp_path / "gone", 0)
    gone.save(1, [1])
    gone.flush()
    assert not (tmp_path / "gone").exists() and all("could not be" in line for line in said) and said


def test_head_that_learned_nothing_is_saved_for_resuming_but_not_for_engines(moved, tmp_path):
    policy, head = moved
    drafter = online(policy, head, unroll=1, batch=4)
    run_drafter = RunDrafter(drafter, Recorded(), load_config(None, SMALL), warn=print)
    run_drafter.begin(tmp_path, 0)
    for step in (1, 2):
        run_drafter.save(step, [step])
        run_drafter.flush()
        assert saved_steps(tmp_path / "drafter_training") == [step]
        assert (tmp_path / "drafter").exists() == (step == 2)
        follow(drafter, step, groups_of(policy, 4))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["never", "drift"])
def test_head_that_began_fresh_resumes_without_learning(tmp_path, when):
    """It drafts as it did: who resumes has a head that was taught."""
    keys = [*SMALL, f"run.root={tmp_path}", "run.name=fresh", "rollout.speculation.eagle_path=fresh"]
    learns = [
        f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=1", "batch=2", "lr=3e-3")
    ]
    train(load_config(None, [*keys, *learns, "run.steps=4"]))
    folder = tmp_path / "fresh"
    rests = [*keys, "run.steps=5", f"rollout.speculation.online.when={when}"]
    train(load_config(None, rests), resume=folder)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "train"]
    assert not any(step.get("drafter/updates", 0) for step in steps[4:])
    lengths = [step["speculation/eagle/accept_length"] for step in steps]
    assert lengths[4] > lengths[0] + 0.2, lengths


def test_load_online_state_uses_the_masters_of_another_optimiser():
    """A state with AdamW's moments, as it was saved before, in a type that rounds them."""
    policy = load_policy(BUILTIN_POLICY, torch.bfloat16)
    head = load_eagle("builtin-eagle", policy, torch.bfloat16)
    said: list[str] = []
    first, second = (
        OnlineDrafter(policy, head, OnlineDrafterConfig(when="always"), seed=0, warn=said.append)
        for _ in range(2)
    )
    for master in first.trainer.optimiser.masters().values():
        master += 2.0**-12 * master.abs()
    state = {n: t for n, t in online_state(first).items() if "momentum" not in n and "probation" not in n}
    load_online_state(second, state)
    assert "begins anew" in said[-1] and second.probation == Probation() and second.average.updates == 0
    ours, theirs = (drafter.trainer.optimiser.masters() for drafter in (first, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_load_early_state_uses_the_head_of_an_early_checkpoint(moved):
    policy, head = moved
    said: list[str] = []
    drafter = OnlineDrafter(policy, head, OnlineDrafterConfig(when="always"), seed=0, warn=said.append)
    load_early_state(drafter, {})
    assert not said, "there is none"
    early = {f"eagle.{name}": p.detach() + 1 for name, p in head.named_parameters()}
    load_early_state(drafter, {**early, "online.counters": torch.zeros(7)})
    assert all(torch.equal(p, early[f"eagle.{name}"]) for name, p in drafter.head.named_parameters())
    assert "begin anew" in said[0]


def saved_drafter(policy, head, said, when="auto", **settings):
    """A drafter and its place in a run."""
    config = OnlineDrafterConfig(when=when, unroll=1, **settings)
    drafter = OnlineDrafter(policy, head, config, 0, said.append)
    return drafter, RunDrafter(drafter, Recorded(), load_config(None, SMALL), said.append)


@pytest.mark.parametrize(("before", "now"), [("auto", "always"), ("drift", "auto")])
def test_resumed_run_follows_a_changed_when(moved, before, now):
    """The head rested; `always` never does, and `auto` begins with a trial."""
    policy, head = moved
    first, second = online(policy, head, when=before), online(policy, head, when=now)
    first._rest()
    load_online_state(second, online_state(first))
    assert second.due and second.auto.learning
    follow(second, 1, groups_of(policy, 4), 1e6, recorded=True)
    second.observe(0.5, 5000)
    assert second.due


def test_always_learns_from_a_save_without_its_when(moved):
    """Of an earlier version, in which another `when` was no reason to begin anew."""
    policy, head = moved
    first, second = online(policy, head, when="auto"), online(policy, head, when="always")
    first._rest()
    state = {name: tensor for name, tensor in online_state(first).items() if ".when." not in name}
    load_online_state(second, state)
    assert second.due


def test_resting_head_rests_when_its_run_is_resumed(moved):
    policy, head = moved
    first, second = (online(policy, head, when="auto") for _ in range(2))
    first._rest()
    load_online_state(second, online_state(first))
    assert not second.due and not second.auto.learning


@pytest.mark.slow
@pytest.mark.parametrize("when", ["never", "always"])
def test_resumed_run_drops_saves_of_steps_that_it_reruns(tmp_path, when):
    """A run that was killed between two checkpoints had saved its head; whether one learns now or not."""
    keys = [*SMALL, f"run.root={tmp_path}", "run.name=cut", "checkpoint.every=1", "report.closing_pairs=0"]
    learns = ["rollout.speculation.online.when=always", "rollout.speculation.online.tokens=64"]
    train(load_config(None, [*keys, *learns, "run.steps=1"]), console=Console(quiet=True))
    run = tmp_path / "cut"
    saves = run / "drafter_training"
    for suffix in (".safetensors", ".json"):
        shutil.copy(saves / f"step_000001{suffix}", saves / f"step_000009{suffix}")
    again = [*keys, "run.steps=2", f"rollout.speculation.online.when={when}"]
    train(load_config(None, again), resume=run, console=Console(quiet=True))
    kept = {int(path.stem.split("_")[1]) for path in saves.iterdir()}
    assert kept == ({1, 2} if when == "always" else {1})


def test_resumed_run_drops_a_head_without_a_save_of_the_steps_that_stay(moved, tmp_path):
    """It was the head of steps that are made again, and may never come about this time."""
    policy, head = moved
    drafter, run = saved_drafter(policy, head, [], when="always")
    run.begin(tmp_path, 0)
    drafter.publish(1)
    for step in (10, 12):
        run.save(step, [10])
        run.flush()
    cut_back_saves(tmp_path, 10)
    assert saved_steps(tmp_path / "drafter_training") == [10] and (tmp_path / "drafter").is_dir()
    cut_back_saves(tmp_path, -1)
    assert not [*(tmp_path / "drafter_training").iterdir()] and not (tmp_path / "drafter").exists()
