"""Every planted bug is caught by the check that it names; docs/certify.md shows some."""

import importlib
from pathlib import Path

import pytest

from paceline.certify import scenes
from tests.certify.checks import CHECKS
from tests.certify.mutants import MUTANTS
from tests.certify.mutation import Mutant, find, planted

PAGE = Path(__file__).parents[2] / "docs" / "certify.md"

# One of every kind, for every change.
OF_EVERY_KIND = {
    "top-k keeps k + 1",
    "a rejected token's cache slot is not overwritten",
    "a stop text in the middle of a run is missed",
    "cached prompts outlive a weight update",
    "draft probabilities of the wrong position",
    "a step's samples share their seed",
    "a path's keys stay where its nodes were",
}


def caught(mutant: Mutant) -> bool:
    """Returns whether the check that a mutant names fails; that something raises says nothing of a check."""
    if mutant.caught_by in CHECKS:
        return any(not check.raised for check in CHECKS[mutant.caught_by]().failed)
    path, _, name = mutant.caught_by.partition("::")
    test = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
    try:
        test()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=pytest.mark.ci if mutant.name in OF_EVERY_KIND else ())
        for mutant in MUTANTS
    ],
)
@pytest.mark.slow
def test_planted_bug_is_caught(mutant, monkeypatch):
    monkeypatch.setattr(scenes, "PATIENCE", 60.0)  # it may hang
    with planted(mutant):
        assert caught(mutant), f"{mutant.caught_by!r} passed"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("tokens", "reference") else pytest.mark.slow)
        for name in CHECKS
    ],
)
def test_sound_engine_passes_what_mutants_fail(name):
    certificate = CHECKS[name]()
    assert not certificate.failed, certificate.table()


def test_planting_that_only_raises_is_not_caught():
    share = "paceline.engine.blocks:BlockPool.share"
    mutant = Mutant("raises", share, "self._references[block] += 1", "raise IndexError(block)", "tokens")
    with planted(mutant):
        assert not caught(mutant)


def test_planted_bug_is_removed_afterwards():
    mutant = MUTANTS[0]
    code = find(mutant.target).__code__
    with pytest.raises(RuntimeError), planted(mutant):
        assert find(mutant.target).__code__ is not code
        raise RuntimeError
    assert find(mutant.target).__code__ is code


def test_mutants_all_still_apply():
    """A fragment that the source no longer has is an error, not a bug that is never planted."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 50
    assert {mutant.name for mutant in MUTANTS} >= OF_EVERY_KIND
    for mutant in MUTANTS:
        with planted(mutant):
            pass


def test_certify_page_shows_bugs_that_are_planted():
    section = PAGE.read_text().partition("## It can fail")[2].partition("\n## ")[0]
    shown = [line.split("|")[2].strip() for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(shown) > 5 and set(shown) <= {mutant.name for mutant in MUTANTS}
