"""A trained head reaches the engine by copy, keeps its place there, and comes back out when it is worse."""

import copy
import threading

import pytest
import torch
from safetensors import SafetensorError

from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.model_card import MeasuredAcceptance, read_acceptance
from paceline.drafting.publishing import HeadPublisher, snapshot
from paceline.drafting.saving import DrafterSaver
from paceline.engine.engine import Engine, EngineSettings
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.types import Precision


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


@pytest.fixture
def head(policy):
    return load_eagle("builtin-eagle", policy, torch.float32)


def engine_of(policy, head, **settings) -> Engine:
    made = EngineSettings(max_running=4, kv_tokens=2048, request_tokens=96, max_proposal=3, **settings)
    return Engine(policy, made, drafters=[EagleDrafter(head)], pacer=FixedPacer(Strategy("eagle", 3), 4))


def storages(tensors) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Quality:
    """How good a head is: that of the first time it is asked about some weights."""

    def __init__(self, by_scale: dict[float, float]) -> None:
        self.by_scale = by_scale

    def __call__(self, weights) -> float:
        return self.by_scale[round(float(weights["norm.weight"].mean()) / self.unit, 3)]


@pytest.mark.parametrize("before, now, rolls_back", [(0.8, 0.6, True), (0.6, 0.6, False), (0.5, 0.6, False)])
def test_publisher_rolls_back_a_worse_head_and_warns(policy, head, before, now, rolls_back):
    """Unless it drafts as well as the one before along the same texts: then the policy has changed."""
    said: list[str] = []
    trained = copy.deepcopy(head)
    publisher = HeadPublisher(trained, engine_of(policy, head), said.append)
    quality = Quality({1.0: before, 2.0: now})
    quality.unit = float(head.norm.weight.detach().mean())
    publisher.observe(0.80, 5000)
    with torch.no_grad():
        trained.norm.weight *= 2
    publisher.publish(1, snapshot(publisher.head))
    publisher.observe(0.79, 400)
    assert not publisher.suspect and not publisher.settle(2, quality), "chance"
    publisher.observe(0.60, 5000)
    assert publisher.suspect
    assert publisher.settle(2, quality) == rolls_back
    scale = 1.0 if rolls_back else 2.0
    assert float(trained.norm.weight.detach().mean()) == pytest.approx(scale * quality.unit)
    assert float(head.norm.weight.detach().mean()) == pytest.approx(scale * quality.unit), (
        "and where it drafts"
    )
    assert bool(said) == rolls_back == bool(publisher.rollbacks)
    if rolls_back:
        assert "version 1 drafts worse than that of version 0" in said[0] and "rolled back" in said[0]
    assert not publisher.settle(3, quality), "once"


# -- saving --------------------------------------------------------------------------------------------------

MEASURED = MeasuredAcceptance("builtin", "sums", 1.0, 3, 1000, 3.5, 0.81, (0.81, 0.7))


def test_saves_are_written_aside_and_found_by_their_step(tmp_path, policy, head):
    said: list[str] = []
    saver = DrafterSaver(tmp_path, said.append)
    saver.note(MEASURED)
    for step in (2, 3, 5):
        saver.save(step, head, {"online.x": torch.full((4,), float(step))}, keep=[2])
    saver.flush()
    names = sorted(path.name for path in (tmp_path / "drafter_training").iterdir())
    assert names == [f"step_00000{step}.{kind}" for step in (2, 5) for kind in ("json", "safetensors")]
    assert saver.load(1) is None
    assert saver.load(4)["online.x"].tolist() == [2.0] * 4
    assert saver.load(5)["online.x"].tolist() == [5.0] * 4
    loaded = load_eagle(str(tmp_path / "drafter"), policy, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), head.parameters(), strict=True))
    assert read_acceptance(tmp_path / "drafter") == MEASURED
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "| 3 | 1000 | 3.50 | 81.0% | 81.0%, 70.0% |" in card and "eagle3" in card
    assert len(said) == 1 and "has no save of step 4: the eagle head resumes from step 2" in said[0]
    assert read_acceptance(tmp_path) is None


def test_save_is_written_while_the_run_continues_and_is_not_changed(tmp_path, head, monkeypatch):
    release = threading.Event()
    saver = DrafterSaver(tmp_path, print, every_seconds=0.0)
    write = saver._write
    monkeypatch.setattr(saver, "_write", lambda *arguments: (release.wait(300), write(*arguments)))
    state = {"online.x": torch.ones(3)}
    assert saver.due
    saver.save(1, head, state, keep=[])
    assert not saver.due, "one at a time"
    with torch.no_grad():
        state["online.x"].zero_()
        before = head.fc.weight.clone()
        head.fc.weight.zero_()
    release.set()
    saver.flush()
    assert saver.due and saver.load(1)["online.x"].tolist() == [1.0] * 3
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    assert torch.equal(load_eagle(str(tmp_path / "drafter"), policy, torch.float32).fc.weight, before)


def test_save_survives_a_disk_that_fills_up(tmp_path, head, monkeypatch):
    """The library has an error of its own for that; nothing half-written stays."""
    said: list[str] = []

    def save(tensors, file) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("paceline.drafting.saving.save_tensors", save)
    saver = DrafterSaver(tmp_path, said.append)
    saver.save(1, head, {"online.x": torch.ones(3)}, keep=[])
    saver.flush()
    assert len(said) == 1 and "No space left" in said[0]
    assert not list((tmp_path / "drafter_training").iterdir())


def test_publishing_fills_the_storage_that_captured_steps_read(policy, head):
    """The publisher may keep writing to what was published."""
    engine = engine_of(policy, head)
    own = storages(head.parameters())
    published = {name: tensor + 1 for name, tensor in snapshot(head).items()}
    engine.publish_drafter(1, published)
    assert storages(head.parameters()) == own and not own & storages(published.values())
    kept = snapshot(head)
    for tensor in published.values():
        tensor.zero_()
    assert all(torch.equal(p, kept[name]) for name, p in head.named_parameters())


def test_published_head_survives_sleep_weights_and_another_precision(policy, head):
    """Its own parameters, bit for bit; what drafts with them is looked at in a longer test."""
    from paceline.policy.huggingface import exported_tensors

    engine = engine_of(copy.deepcopy(policy), head, precision=Precision.FP8)
    published = {name: tensor * 1.5 for name, tensor in snapshot(head).items()}
    engine.publish_drafter(3, published)
    weights = [(name, tensor.clone()) for name, tensor in exported_tensors(engine.policy)]
    for change in (
        engine.sleep,
        engine.wake,
        lambda: engine.update_weights(1, weights),
        engine.fall_back_to_base_precision,
    ):
        change()
        assert all(torch.equal(p, published[name]) for name, p in head.named_parameters())
        assert engine.take_stats().drafter_version == 3


MEASURED = MeasuredAcceptance("builtin", "sums", 1.0, 3, 1000, 3.5, 0.81, (0.81, 0.7))
