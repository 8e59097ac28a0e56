"""The learner ranks, seen from the head: one call that all of them answer, and the weights they have.

Every call goes to all ranks at once, since they work together; what one of them cannot do, none has done.
Where a rank dies, hangs or raises, its share of the policy is gone: the others are ended, too, and
`LearnersLost` names the rank. The run then restarts all of them from the last checkpoint.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from paceline.cluster.group_codec import groups_message
from paceline.learning.mismatch import Mismatch, MismatchCheck
from paceline.records import parse
from paceline.types import Group
from paceline.worker.process import Launch, Place, Worker
from paceline.worker.readers import ReadersLock
from paceline.worker.wire import Disconnected, Message

# How long the other ranks have to report what they know once one is lost.
LAST_WORDS_SECONDS = 12.0


class LearnersLost(RuntimeError):
    """A learner rank is gone and its shards with it; the message names it."""


@dataclass(frozen=True)
class RankLaunch:
    """What rank processes are made of."""

    factory: str  # `module:function`
    recipe: str

    def of(self, rank: int, count: int) -> Launch:
        return Launch(self.factory, json.dumps({"recipe": self.recipe, "rank": rank, "count": count}))


class LearnerRanks:
    """All ranks of a run; made when every one of them has joined the others."""

    def __init__(
        self,
        launch: RankLaunch,
        places: Sequence[Place],
        warn: Callable[[str], None] = lambda message: None,
        heartbeat_seconds: float = 120.0,
        start_seconds: float = 600.0,
    ) -> None:
        self.warn = warn
        self.heartbeat_seconds = heartbeat_seconds
        self.optimiser_steps = 0
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(len(places))
        self._veto: BaseException | None = None
        self.workers: list[Worker] = []
        count = len(places)
        try:
            started = [
                self._executor.submit(place, launch.of(rank, count), NO_WEIGHTS)
                for rank, place in enumerate(places)
            ]
            wait(started)
            self.workers = [future.result() for future in started if future.exception() is None]
            for future in started:
                future.result()
            self._say_hello(start_seconds)
            address = self.ask(0, Message("address")).fields
            self.ask_all(Message("join", address))
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[int]:
        return [worker.id for worker in self.workers]

    def update(
        self, groups: Sequence[Group], check: MismatchCheck = lambda mismatch: None
    ) -> dict[str, float]:
        """Updates the policy; `check` sees the mismatch before the weights move, as with a `Learner`."""
        answers = self.ask_all(groups_message("update", groups), check)
        self.optimiser_steps = answers[0].fields["optimiser_steps"]
        return answers[0].fields["metrics"]

    def ask(self, rank: int, message: Message) -> Message:
        """Makes a call that one rank answers without the others."""
        with self._lock:
            return self._settle([self._executor.submit(self._call, rank, message, None)])[0]

    def ask_all(self, message: Message, check: MismatchCheck | None = None) -> list[Message]:
        """Returns every rank's answer; raises what `check` raised, or `LearnersLost`."""
        with self._lock:
            self._veto = None
            calls = [
                self._executor.submit(self._call, rank, message, check) for rank in range(len(self.workers))
            ]
            answers = self._settle(calls)
        unwritten = [answer for answer in answers if answer.kind == "not_written"]
        if unwritten:
            raise OSError(unwritten[0].fields["problem"])
        if any(answer.kind == "vetoed" for answer in answers):
            assert self._veto is not None
            raise self._veto
        return answers

    def close(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(Disconnected):
                worker.connection.send(Message("close"))
        list(self._executor.map(lambda worker: worker.end(), self.workers))
        self.workers = []
        self._executor.shutdown()

    def _say_hello(self, seconds: float) -> None:
        for rank, worker in enumerate(self.workers):
            worker.connection.socket.settimeout(seconds)
            try:
                worker.connection.receive()
            except Disconnected as problem:
                raise LearnersLost(
                    f"learner rank {rank} of {len(self.workers)} did not start ({problem}); what it said is "
                    "above"
                ) from None
            worker.connection.socket.settimeout(self.heartbeat_seconds)

    def _call(self, rank: int, message: Message, check: MismatchCheck | None) -> Message:
        """Calls one rank and waits for its answer; handles the messages that it sends before."""
        connection = self.workers[rank].connection
        number = next(self._calls)
        connection.send(Message(message.kind, message.fields, message.arrays, number))
        while True:
            said = connection.receive()  # not a sign of life within the heartbeat: Disconnected
            if said.kind == "warning":
                self.warn(said.fields["text"])
            elif said.kind == "mismatch":
                connection.send(Message("verdict", {"problem": self._inspect(said, check)}))
            elif said.call == number:
                return said

    def _inspect(self, said: Message, check: MismatchCheck | None) -> str:
        """Returns why the head rejects the update; empty: it accepts."""
        try:
            if check is not None:
                check(parse(Mismatch, said.fields))
        except BaseException as veto:
            self._veto = veto
            return f"{type(veto).__name__}: {veto}"
        return ""

    def _settle(self, calls: list["Future[Message]"]) -> list[Message]:
        """Returns the answers; if a rank is lost, collects the others' reasons and ends all ranks."""
        done, _ = wait(calls, return_when=FIRST_EXCEPTION)
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        if any(call.exception() is not None or call.result().kind == "lost" for call in done):
            wait(calls, timeout=max(0.0, deadline - time.monotonic()))
        words = [_last_words(rank, call) for rank, call in enumerate(calls)]
        if any(words):
            for worker in self.workers:
                worker.kill()
            raise LearnersLost("; ".join(word for word in words if word))
        return [call.result() for call in calls]


class RankWeights(ReadersLock):
    """The ranks' weights (`worker/readers.py`): rank 0 hands them to replicas, past this process."""

    def __init__(self, ranks: LearnerRanks, transport: str) -> None:
        super().__init__()
        self.ranks = ranks
        self.transport = transport
        self.version: int | None = None
        self.descriptor: int | None = None
        self._notice: dict[str, Any] | None = None

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publishes the ranks' own weights; `weights` is ignored."""
        with self.writing():
            message = Message("publish", {"version": version, "transport": self.transport})
            self._notice = self.ranks.ask_all(message)[0].fields.get("notice")
            self.version = version

    def notices(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        if self._notice is not None:
            return [self._notice] * len(workers)
        return self.ranks.ask(0, Message("notices", {"workers": list(workers)})).fields["notices"]

    def cancel(self, notice: dict[str, Any]) -> None:
        if self._notice is None:
            self.ranks.ask(0, Message("cancel", {"notice": notice}))

    def close(self) -> None:
        """No-op: the ranks end by themselves."""


class _NoWeights(ReadersLock):
    """`Weights` for a process that reads none."""

    version: int | None = None
    descriptor: int | None = None

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("a rank reads no weights")

    def notices(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        raise AssertionError("a rank reads no weights")

    def cancel(self, notice: dict[str, Any]) -> None:
        raise AssertionError("a rank reads no weights")

    def close(self) -> None:
        """Does nothing."""


NO_WEIGHTS = _NoWeights()


def _last_words(rank: int, call: "Future[Message]") -> str:
    """Returns why a rank counts as lost; empty if it does not."""
    if not call.done():
        return f"learner rank {rank} does not answer"
    problem = call.exception()
    if isinstance(problem, Disconnected):
        return f"learner rank {rank} is gone ({problem})"
    if problem is not None:
        return f"learner rank {rank}: {problem!r}"
    answer = call.result()
    return f"learner rank {rank}: {answer.fields['problem']}" if answer.kind == "lost" else ""
