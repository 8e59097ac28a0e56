"""A rank that raises, dies, hangs or never comes: no rank waits for ever, and the others name it."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from paceline.learning.distributed.faults import RanksLost
from paceline.learning.distributed.group import RankGroup, join_ranks
from paceline.learning.distributed.rank_learner import RankLearner
from paceline.learning.learner import Learner
from tests.learning.rank_processes import end_ranks, start_ranks
from tests.learning.test_ranks import CASES
from tests.ports import free_port

VICTIM = 1
# Of a collective, in the tests in which it must run out.
SHORT_SECONDS = 15.0


def raise_error() -> None:
    raise ValueError("this rank has had enough")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop() -> None:
    time.sleep(3600)


def fault_on(group: RankGroup, victim: int, fault) -> tuple[str, tuple[int, ...], float]:
    """One good update, then one in which the victim fails; returns the error, who is blamed, and the time."""
    case = CASES["dense"]
    learner = RankLearner(case.policy(), case.config(), group)
    learner.update(case.groups(0))
    if group.rank == victim:
        real = Learner._backward

        def backward(self, batch, *totals):
            fault()
            return real(self, batch, *totals)

        Learner._backward = backward
    start = time.monotonic()
    try:
        learner.update(case.groups(1))
    except RanksLost as error:
        return str(error), error.ranks, time.monotonic() - start
    raise AssertionError("the update went through")


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim, fault, message",
    [
        (1, raise_error, "an update, on rank 0: rank 1 raised ValueError: this rank has had enough"),
        (2, die, "rank 2 of 3 does not answer"),
    ],
)
def test_rank_failure_is_named_by_the_other_ranks(victim, fault, message, tmp_path):
    outcomes = end_ranks(start_ranks(3, fault_on, tmp_path, victim, fault), tmp_path)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.code == -signal.SIGKILL or "ValueError: this rank has had enough" in outcome.error
            continue
        assert not outcome.error
        said, blamed, _ = outcome.result
        assert message.replace("on rank 0", f"on rank {rank}") in said and blamed == (victim,)


@pytest.mark.slow
def test_rank_out_of_memory_names_the_rank_and_the_remedy(tmp_path):
    outcomes = end_ranks(start_ranks(2, fault_on, tmp_path, 1, run_out_of_memory), tmp_path)
    assert "set learning.micro_batch_tokens=32" in outcomes[1].error
    assert "rank 1 raised OutOfMemoryError: rank 1 of 2" in outcomes[0].result[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_first_rank_death_is_reported_by_the_others(victim, tmp_path):
    outcomes = end_ranks(start_ranks(3, fault_on, tmp_path, victim, die), tmp_path)
    for rank in {0, 1, 2} - {victim}:
        said, blamed, _ = outcomes[rank].result
        assert f"rank {victim} of 3 does not answer" in said and blamed == (victim,)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [hang, loop])
def test_hung_rank_is_awaited_no_longer_than_the_timeout(fault, tmp_path):
    """One that is stopped has no heartbeat; one that does something else has, but comes to no roll call."""
    pids = start_ranks(3, fault_on, tmp_path, VICTIM, fault, timeout=SHORT_SECONDS)
    outcomes = end_ranks(pids, tmp_path, hung=VICTIM)
    for rank in (0, 2):
        assert not outcomes[rank].error
        said, blamed, seconds = outcomes[rank].result
        assert seconds > 0.9 * SHORT_SECONDS and blamed == (VICTIM,)
        assert ("rank 1 of 3 does not answer" if fault is hang else "rank 1 did not come: an update") in said


def test_missing_rank_is_named_when_joining():
    start = time.monotonic()
    with pytest.raises(RanksLost, match=r"ranks 1, 2 of 3 did not come within 0.5 s") as raised:
        join_ranks("127.0.0.1", free_port(), 0, 3, timeout=0.5)
    assert raised.value.ranks == (1, 2) and time.monotonic() - start < 60


def test_unreachable_address_is_named_when_joining():
    with pytest.raises(RanksLost, match=r"rank 1 of 2 does not reach .* 127.0.0.1:\d+ within 1 s"):
        join_ranks("127.0.0.1", free_port(), 1, 2, timeout=1)


def elsewhere_on(group: RankGroup, folder: Path) -> str:
    """The second rank never calls what the first one waits in."""
    if group.rank == 1:
        time.sleep(SHORT_SECONDS + 20)
        return ""
    with pytest.raises(RanksLost) as raised, group.together("an update"):
        group.texts("anybody?")
    return str(raised.value)


@pytest.mark.slow
def test_idle_rank_is_named_by_a_rank_that_waits_for_it(tmp_path):
    pids = start_ranks(2, elsewhere_on, tmp_path, tmp_path, timeout=SHORT_SECONDS)
    assert "rank 1 did not come: waiting for work" in end_ranks(pids, tmp_path)[0].result
