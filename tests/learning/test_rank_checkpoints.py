"""Checkpoints of ranks: any number of ranks resumes from them alike; damage and full disks lose nothing."""

import errno
from pathlib import Path

import pytest
import torch

from paceline.learning.checkpoint import (
    TrainingState,
    damage,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from paceline.learning.distributed import export, saving
from paceline.learning.distributed.group import DecidedElsewhere, RankGroup
from paceline.learning.distributed.rank_learner import RankLearner
from paceline.learning.distributed.saving import NotWritten
from paceline.learning.distributed.sharding import whole
from paceline.learning.learner import Learner
from paceline.policy.huggingface import load_policy
from tests.learning.rank_processes import run_ranks, save_by_ranks
from tests.learning.test_ranks import BFLOAT16_NOISE, CASES, FLOAT64_NOISE, LORA, MOE, Case

# Every kind of tensor: masters, experts, adapters.
KINDS = {
    "bfloat16": CASES["bfloat16"],
    "experts": Case(shape=MOE),
    "adapters": Case(shape=MOE, lora=CASES["adapters, recomputed"].lora),
}
TOKENIZER = Path(__file__).parent  # where there is none


def state_after(step: int) -> TrainingState:
    return TrainingState(step, step, 16 * step, 0.5)


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    """Returns whole copies of the weights and of the optimiser's tensors."""
    optimiser = learner.optimiser
    found = {name: whole(p).clone() for name, p in learner.policy.named_parameters()}
    for name, tensor in optimiser.state().items():
        if learner.ranks.count == 1:
            found[name] = tensor.clone()
            continue
        values = sum(learner.ranks.gather([tensor.double().flatten()])[0], start=[])
        found[name] = torch.tensor(values, dtype=tensor.dtype).view(-1, *tensor.shape[1:])
    return found


def saved_on(group: RankGroup, case: Case, folder: Path) -> tuple[dict, dict]:
    """Saves after the first step; returns what was saved, and what the second step makes of it."""
    learner = RankLearner(case.policy(), case.config(), group)
    learner.update(case.groups(0))
    save_by_ranks(learner, folder, state_after(1), TOKENIZER, keep=3)
    saved = snapshot(learner.learner)
    learner.update(case.groups(1))
    return saved, snapshot(learner.learner)


def opened_on(group: RankGroup, case: Case, checkpoint: Path) -> tuple[dict, dict]:
    learner = RankLearner(case.policy(), case.config(), group)
    assert learner.load(checkpoint) == state_after(1)
    opened = snapshot(learner.learner)
    learner.update(case.groups(1))
    return opened, snapshot(learner.learner)


def opened_alone(case: Case, checkpoint: Path) -> tuple[dict, dict]:
    learner = Learner(case.policy(), case.config())
    assert load_checkpoint(checkpoint, learner.policy, learner.optimiser) == state_after(1)
    opened = snapshot(learner)
    learner.update(case.groups(1))
    return opened, snapshot(learner)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], noise: float) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=noise, msg=name)


def assert_reshards(kind: str, folder: Path) -> None:
    case = KINDS[kind]
    noise = BFLOAT16_NOISE if case.dtype == torch.bfloat16 else FLOAT64_NOISE
    (saved, after), *_ = run_ranks(2, saved_on, folder / "two", case, folder)
    checkpoint = folder / "step_000001"
    assert damage(checkpoint) is None
    files = {path.name for path in checkpoint.iterdir()}
    assert {"optimiser-00001-of-00002.safetensors", "optimiser-00002-of-00002.safetensors"} <= files
    for opened, next_step in (
        opened_alone(case, checkpoint),
        *run_ranks(3, opened_on, folder / "three", case, checkpoint),
    ):
        assert_equal(opened, saved)
        assert_near(next_step, after, noise)


@pytest.mark.slow
def test_checkpoint_of_two_ranks_opens_on_one_and_on_three(tmp_path):
    assert_reshards("bfloat16", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["experts", "adapters"])
def test_checkpoint_reshards_experts_and_adapters(kind, tmp_path):
    assert_reshards(kind, tmp_path)


@pytest.mark.slow
def test_checkpoint_of_one_process_opens_on_two_ranks(tmp_path):
    case = KINDS["bfloat16"]
    learner = Learner(case.policy(), case.config())
    learner.update(case.groups(0))
    save_checkpoint(tmp_path, learner.policy, learner.optimiser, state_after(1), TOKENIZER, keep=1)
    for opened, _ in run_ranks(2, opened_on, tmp_path / "two", case, tmp_path / "step_000001"):
        assert_equal(opened, snapshot(learner))


def folders_on(group: RankGroup, folder: Path) -> tuple[list[str], list[str]]:
    """Hugging Face folders in several files, a full disk on the second rank, then a disk with room again."""
    export.SMALLEST_FILE_BYTES = 1 << 10
    case = Case(lora=LORA, steps=1)
    learner = RankLearner(case.policy(), case.config(), group)
    learner.update(case.groups(0))
    learner.write_policy(folder / "exported", TOKENIZER)
    weights = {name: tensor.clone() for name, tensor in learner.exported_tensors()}
    loaded = dict(load_policy(folder / "exported", torch.float64).named_parameters())
    ours = {name: whole(p) for name, p in learner.policy.named_parameters() if ".adapters." not in name}
    assert_equal(loaded, ours)
    assert len(weights) > len(ours)
    save_by_ranks(learner, folder, state_after(1), TOKENIZER, keep=3)

    real = saving.save_tensors

    def full_disk(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if group.rank == 1:
        saving.save_tensors = full_disk
    with pytest.raises((NotWritten, DecidedElsewhere), match=r"rank 1 could not write.*No space left"):
        save_by_ranks(learner, folder, state_after(2), TOKENIZER, keep=3)
    group.texts("")
    left = sorted(path.name for path in folder.iterdir() if "step" in path.name)
    group.texts("")
    saving.save_tensors = real
    save_by_ranks(learner, folder, state_after(3), TOKENIZER, keep=3)
    assert learner.not_finite() == []
    return left, sorted(path.name for path in (folder / "exported").iterdir())


def test_rank_checkpoint_folders_survive_a_full_disk(tmp_path):
    for left, exported in run_ranks(2, folders_on, tmp_path / "ranks", tmp_path):
        assert left == ["step_000001"]
        assert "model.safetensors.index.json" in exported and "config.json" in exported
        assert len([name for name in exported if name.endswith(".safetensors")]) > 1
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001", "step_000003"]
    shard = tmp_path / "step_000003" / "optimiser-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0x10
    shard.write_bytes(content)
    warnings: list[str] = []
    assert newest_checkpoint(tmp_path, warnings.append).name == "step_000001"
    assert "optimiser-00002-of-00002.safetensors" in warnings[0]
    opened, _ = opened_alone(Case(lora=LORA, steps=1), tmp_path / "step_000001")
    assert opened
