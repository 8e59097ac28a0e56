"""Who is missing when a collective fails.

A collective that fails says little: a connection was closed, or nothing came. So a rank that raises leaves
its reason in the store that all joined through, and closes its connections, which makes the others' fail at
once; each of them answers a roll call there. Who has neither answered nor given a reason is gone or hangs.

    rank 0   in a collective ── connection closed ──▶ present ── asks ──▶ RanksLost: rank 1 raised ValueError
    rank 1   ValueError ──▶ reason
    rank 2   (killed)                                            ──▶      ... and rank 2 does not answer

Nothing waits longer than the group's timeout and the roll call's own.
"""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

# How long ranks have for answering a roll call once one has noticed that something is wrong.
ROLL_CALL_SECONDS = 5.0
POLL_SECONDS = 0.05
LONGEST_REASON = 2000


class RanksLost(RuntimeError):
    """Ranks that raised, or that do not answer; the message names them."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks  # those that are at fault


class RollCall:
    """The store's record of which ranks came, raised, or answered."""

    def __init__(self, store: dist.Store, rank: int, count: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.count = count
        self.timeout = timeout
        # An error that all ranks raise alike, so that none is left behind.
        self.agreed: BaseException | None = None
        self._watching = False

    def all_present(self) -> None:
        """Waits for all ranks to come."""
        self.store.set(f"came/{self.rank}", b"1")
        missing = self._missing("came", self.timeout)
        if missing:
            raise RanksLost(
                f"{_ranks(missing)} of {self.count} did not come within {self.timeout:g} s: "
                "look at their own output, and whether they reach the address of rank 0",
                missing,
            )

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Names the ranks at fault where a collective fails, and tells the others of one's own error."""
        if self._watching:  # the outermost says what was going on
            yield
            return
        self._watching = True
        try:
            yield
        except BaseException as error:
            if error is self.agreed:
                raise
            reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            own_fault = not _is_of_collective(error)
            with contextlib.suppress(Exception):
                self.store.set(f"{'raised' if own_fault else 'present'}/{self.rank}", reason.encode())
            _close_connections()
            if own_fault:
                raise
            raise self._lost(what, reason) from error
        finally:
            self._watching = False

    def close(self) -> None:
        """Closes the connections to other ranks."""
        _close_connections()

    def _lost(self, what: str, reason: str) -> RanksLost:
        """Holds the roll call and returns the error for its result."""
        try:
            silent = self._missing("present", ROLL_CALL_SECONDS, unless="raised")
            raised = [rank for rank in range(self.count) if self.store.check([f"raised/{rank}"])]
            reasons = [f"rank {rank} raised {self.store.get(f'raised/{rank}').decode()}" for rank in raised]
        except (RuntimeError, OSError):  # the store went with the first rank
            silent, raised, reasons = (0,), [], []
        if silent:
            reasons.append(f"{_ranks(silent)} of {self.count} does not answer: killed, hung or cut off")
        if not reasons:
            reasons.append(f"all {self.count} ranks answer, but a collective failed: {reason}")
        return RanksLost(f"{what} on rank {self.rank}: " + "; ".join(reasons), (*raised, *silent))

    def _missing(self, kind: str, seconds: float, unless: str = "") -> tuple[int, ...]:
        """Returns the ranks that have left no such word after so many seconds."""
        kinds = [kind] + ([unless] if unless else [])
        deadline = time.monotonic() + seconds
        missing = tuple(range(self.count))
        while True:
            missing = tuple(r for r in missing if not any(self.store.check([f"{k}/{r}"]) for k in kinds))
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(POLL_SECONDS)


def _close_connections() -> None:
    if not dist.is_initialized():
        return
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _is_of_collective(error: BaseException) -> bool:
    """Tells an error of communication from one of this rank's own; gloo raises plain RuntimeErrors."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "nccl" in text)
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
