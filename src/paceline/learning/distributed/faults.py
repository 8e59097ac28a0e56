"""Which rank is missing when a collective fails.

The error of a failed collective says little: a connection was closed, or a timeout passed. So every rank
leaves two things in the store that all joined through: what it is doing, with a heartbeat from a thread of
its own, and the reason, when it raises. A rank whose collective fails looks there.

    rank 0   an update ── connection closed ──▶ looks ──▶ RanksLost: rank 1 raised ValueError: ...;
    rank 1   an update ── ValueError                                 rank 2 does not answer
    rank 2   an update ── (killed: its heart has stopped)

A rank that is killed closes its connections, so the others know at once; one that hangs, or raised and lives
on, keeps them waiting for the group's timeout and no longer. The first rank serves the store, and takes its
own reason along.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

BEAT_SECONDS = 1.0
# A heart that has not beaten for so long has stopped.
SILENCE_SECONDS = 10.0
POLL_SECONDS = 0.1
LONGEST_REASON = 2000
IDLE = "waiting for work"


class RanksLost(RuntimeError):
    """Ranks that raised, that do not answer, or that do something else; the message names them."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks  # those that are at fault


class RollCall:
    """The store's record of which ranks came, what they do, and why they raised."""

    def __init__(
        self,
        store: dist.Store,
        beat_store: dist.Store,
        rank: int,
        count: int,
        timeout: float,
    ) -> None:
        """`beat_store` is another connection to the same store: a wait on one would hold up the other."""
        self.store = store
        self.beat_store = beat_store
        self.rank = rank
        self.count = count
        self.timeout = timeout
        # An error that all ranks raise alike, so that none is left waiting.
        self.agreed: BaseException | None = None
        self.doing = IDLE
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"heartbeat of rank {rank}", daemon=True)
        self._heart.start()

    def all_present(self) -> None:
        self.store.set(f"came/{self.rank}", b"1")
        deadline = time.monotonic() + self.timeout
        missing = tuple(range(self.count))
        while missing := tuple(r for r in missing if not self.store.check([f"came/{r}"])):
            if time.monotonic() > deadline:
                raise RanksLost(
                    f"{_ranks(missing)} of {self.count} did not come within {self.timeout:g} s: "
                    "look at their own output, and whether they reach the address of rank 0",
                    missing,
                )
            time.sleep(POLL_SECONDS)

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Names the ranks at fault if a collective fails; posts an error of this rank for the others."""
        if self.doing != IDLE:  # the outermost context names the activity
            yield
            return
        self.doing = what
        try:
            yield
        except BaseException as error:
            if error is self.agreed:
                raise
            if _is_of_collective(error):
                raise self._lost(error) from error
            with contextlib.suppress(Exception):  # the store may be what failed
                reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
                if isinstance(error, GeneratorExit):
                    reason = f"an error elsewhere, and left {what} before its end"
                self.store.set(f"raised/{self.rank}", reason.encode())
            raise
        finally:
            self.doing = IDLE

    def close(self) -> None:
        """Stops the heart and leaves the process group."""
        self._ended.set()
        self._heart.join()
        with contextlib.suppress(Exception):  # of ranks that are gone
            dist.destroy_process_group()

    def _beat(self) -> None:
        number = 0
        with contextlib.suppress(Exception):  # the store went with the first rank
            while not self._ended.wait(BEAT_SECONDS if number else 0):
                number += 1
                self.beat_store.set(f"beat/{self.rank}", json.dumps([number, self.doing]).encode())

    def _lost(self, error: BaseException) -> RanksLost:
        try:
            raised, silent, absent = self._look()
        except (RuntimeError, OSError):
            return RanksLost(
                f"{self.doing}, on rank {self.rank}: rank 0 of {self.count} does not answer, and it "
                "serves the ranks' store: killed, hung, or ended by an error that its own output shows",
                (0,),
            )
        found = [f"rank {rank} raised {reason}" for rank, reason in raised.items()]
        if silent:
            found.append(f"{_ranks(silent)} of {self.count} does not answer: killed, hung or cut off")
        if not found:
            found = [f"rank {rank} did not come: {doing}" for rank, doing in absent.items()]
        if not found:
            found.append(f"all {self.count} ranks answer, but a collective failed: {error}")
        at_fault = (*raised, *silent) or tuple(absent)
        return RanksLost(f"{self.doing}, on rank {self.rank}: " + "; ".join(found), at_fault)

    def _look(self) -> tuple[dict[int, str], tuple[int, ...], dict[int, str]]:
        """Returns ranks that raised, with reasons; silent ranks; and absent ones, with their activity."""
        self.store.set(f"looking/{self.rank}", b"1")
        others = [rank for rank in range(self.count) if rank != self.rank]
        raised = {
            rank: self.store.get(f"raised/{rank}").decode()
            for rank in others
            if self.store.check([f"raised/{rank}"])
        }
        before = {rank: self._heard(rank) for rank in others if rank not in raised}
        living: dict[int, str] = {}
        for _ in self._polls(SILENCE_SECONDS):
            now = {rank: self._heard(rank) for rank in before}
            living = {
                rank: doing
                for rank, (number, doing) in now.items()
                if number != before[rank][0] or self.store.check([f"looking/{rank}"])
            }
            if len(living) == len(before):
                break
        silent = tuple(rank for rank in before if rank not in living)
        absent = living
        if not (raised or silent):  # ranks that wait in the same collective will look, too
            absent = self._without(living, "looking")
        self.store.set(f"looked/{self.rank}", b"1")
        if self.rank == 0:  # the store must not go before they have
            self._without(living, "looked")
        return raised, silent, absent

    def _without(self, ranks: dict[int, str], word: str) -> dict[int, str]:
        """Returns the ranks that have not posted this key, after some time to do so."""
        for _ in self._polls(SILENCE_SECONDS):
            ranks = {rank: doing for rank, doing in ranks.items() if not self.store.check([f"{word}/{rank}"])}
            if not ranks:
                break
        return ranks

    def _polls(self, seconds: float) -> Iterator[None]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield
            time.sleep(POLL_SECONDS)

    def _heard(self, rank: int) -> tuple[int, str]:
        key = f"beat/{rank}"
        return tuple(json.loads(self.store.get(key))) if self.store.check([key]) else (0, IDLE)


def _is_of_collective(error: BaseException) -> bool:
    """Whether an error is of communication, not of this rank; gloo raises plain RuntimeErrors."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "nccl" in text)
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
