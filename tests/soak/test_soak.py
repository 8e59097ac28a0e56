"""The soak, shortly and at length, and that it finds what it is there to find."""

import os

import pytest

from paceline.learning import checkpoint
from paceline.learning.optimiser import MasterAdamW
from paceline.report.run_directory import RunDirectory
from paceline.runs import lock
from tests.soak.__main__ import soak
from tests.soak.case import SoakFailure

# Of the first case, the same every time, as everywhere in the tests; `make soak` plays others.
SEED = int(os.environ.get("PACELINE_TEST_SEED") or 1000)


@pytest.mark.slow
def test_soak_passes_a_few_cases(tmp_path):
    assert soak(1800, 4, tmp_path, most=5) == 5


@pytest.mark.slow
def test_soak_passes_for_ten_minutes(tmp_path, capsys):
    seconds = float(os.environ.get("PACELINE_SOAK_SECONDS", "600"))
    with capsys.disabled():
        assert soak(seconds, SEED, tmp_path, workers=2) > 0


def no_optimiser_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MasterAdamW, "load_state", lambda self, tensors, steps: None)


def no_damage_is_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "damage", lambda path: None)


def nothing_is_cut_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunDirectory, "cut_back", lambda self, step, with_evaluation: None)


def nothing_is_locked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lock.fcntl, "flock", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [no_optimiser_state, no_damage_is_found, nothing_is_cut_back, nothing_is_locked],
    ids=lambda f: f.__name__,
)
def test_soak_finds_a_planted_bug(bug, tmp_path, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(SoakFailure):
        soak(1800, 0, tmp_path, most=60, say=lambda text: None)
