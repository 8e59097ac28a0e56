"""One event loop in a thread for rewards that are coroutines: judges, reward models behind a server.

Hundreds wait at the same time. A coroutine that exceeds its limit is cancelled; one that blocks the loop
cannot be, so the loop is abandoned with everything on it and the next call gets a new one.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from paceline.tasks.rewards.functions import (
    Failed,
    Reply,
    ScoringInput,
    Target,
    keyword_arguments,
    load_function,
    read_result,
    wanted_arguments,
)

# Seconds between two heartbeats of an event loop.
HEARTBEAT_SECONDS = 0.2

# A loop without a heartbeat for the time limit plus this many seconds is blocked.
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class CoroutineReward:
    """A loaded coroutine reward, with the arguments it takes."""

    target: Target
    function: Callable[..., Any]
    wanted: list[str]
    concurrency: int

    @classmethod
    def load(cls, target: Target, concurrency: int) -> "CoroutineReward":
        """Imports the function; raises ValueError where it cannot be used."""
        function = load_function(target.function)
        return cls(target, function, wanted_arguments(function, target.options, target.function), concurrency)

    async def call(self, inputs: Sequence[ScoringInput], places: asyncio.Semaphore) -> Reply:
        """Awaits one call once a place is free; any failure is returned as `Failed`."""
        async with places:  # the time limit excludes the wait for a place
            try:
                task = asyncio.ensure_future(
                    self.function(**keyword_arguments(self.target, self.wanted, inputs))
                )
                # Not `wait_for`, which would wait for a coroutine that refuses to be cancelled.
                done, _ = await asyncio.wait({task}, timeout=self.target.time_limit)
                if not done:
                    task.cancel()
                    return Failed("timeout", f"no result after {self.target.time_limit:g} s")
                return read_result(self.target, task.result(), len(inputs))
            except (Exception, asyncio.CancelledError) as error:
                return Failed("error", f"{type(error).__name__}: {error}")


class EventLoop:
    """Runs coroutine rewards; a future's result is their scores, or `Failed`, and it never raises."""

    def __init__(self) -> None:
        self.thread = _LoopThread()

    def submit(self, reward: CoroutineReward, inputs: Sequence[ScoringInput]) -> "Future[Reply]":
        """Starts a call, in a new loop where a coroutine has blocked the old one."""
        if self.thread.blocked:
            self.thread = _LoopThread()
        return self.thread.submit(reward, inputs)

    def close(self) -> None:
        """Stops the loop; calls that are still running fail."""
        self.thread.stop()


class _LoopThread:
    """An event loop in a thread, and a second thread that watches whether it is blocked."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.places: dict[Target, asyncio.Semaphore] = {}
        self.pending: dict[Future[Reply], float] = {}  # with the seconds without a heartbeat that each allows
        self.lock = threading.Lock()
        self.last_heartbeat = time.monotonic()
        self.blocked = False
        for work in (self._run, self._watch):
            threading.Thread(target=work, name=f"async-rewards{work.__name__}", daemon=True).start()

    def submit(self, reward: CoroutineReward, inputs: Sequence[ScoringInput]) -> "Future[Reply]":
        future: Future[Reply] = Future()
        with self.lock:
            self.pending[future] = reward.target.time_limit + GRACE_SECONDS
        self.loop.call_soon_threadsafe(self._begin, reward, inputs, future)
        return future

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed already
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _begin(
        self, reward: CoroutineReward, inputs: Sequence[ScoringInput], future: "Future[Reply]"
    ) -> None:
        places = self.places.setdefault(reward.target, asyncio.Semaphore(reward.concurrency))
        task = self.loop.create_task(reward.call(inputs, places))
        task.add_done_callback(
            lambda done: self._settle(
                future, Failed("died", "the run ended") if done.cancelled() else done.result()
            )
        )

    def _run(self) -> None:
        self._heartbeat()
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(HEARTBEAT_SECONDS))  # lets cancelled coroutines clean up
        self._settle_all(Failed("died", "the run ended"))
        self.loop.close()

    def _heartbeat(self) -> None:
        self.last_heartbeat = time.monotonic()
        self.loop.call_later(HEARTBEAT_SECONDS, self._heartbeat)

    def _watch(self) -> None:
        while not self.loop.is_closed():
            time.sleep(HEARTBEAT_SECONDS)
            with self.lock:
                allowed = max(self.pending.values(), default=None)
            if allowed is not None and time.monotonic() - self.last_heartbeat > allowed:
                self.blocked = True
                self.stop()  # once the coroutine returns, if it ever does
                self._settle_all(
                    Failed(
                        "timeout", "a coroutine blocked the event loop; it must await, or be a plain function"
                    )
                )
                return

    def _settle_all(self, reply: Reply) -> None:
        with self.lock:
            futures = list(self.pending)
        for future in futures:
            self._settle(future, reply)

    def _settle(self, future: "Future[Reply]", reply: Reply) -> None:
        with self.lock:
            self.pending.pop(future, None)
        with contextlib.suppress(InvalidStateError):  # timed out, and finished after all
            future.set_result(reply)
