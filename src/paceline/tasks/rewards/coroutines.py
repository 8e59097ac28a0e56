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
    Asked,
    Failed,
    Reply,
    Target,
    keyword_arguments,
    load_function,
    read_result,
    wanted_arguments,
)

BEAT = 0.2  # seconds between signs of life
GRACE = 5.0  # a loop that is silent for longer than the time limit and this is blocked


@dataclass(frozen=True)
class CoroutineReward:
    target: Target
    function: Callable[..., Any]
    wanted: list[str]
    concurrency: int

    @classmethod
    def load(cls, target: Target, concurrency: int) -> "CoroutineReward":
        function = load_function(target.function)
        return cls(target, function, wanted_arguments(function, target.options, target.function), concurrency)

    async def call(self, asked: Sequence[Asked], places: asyncio.Semaphore) -> Reply:
        async with places:  # the time limit does not run while a call waits for its turn
            try:
                task = asyncio.ensure_future(
                    self.function(**keyword_arguments(self.target, self.wanted, asked))
                )
                # Not `wait_for`, which would wait for a coroutine that refuses to be cancelled.
                done, _ = await asyncio.wait({task}, timeout=self.target.time_limit)
                if not done:
                    task.cancel()
                    return Failed("timeout", f"no result after {self.target.time_limit:g} s")
                return read_result(self.target, task.result(), len(asked))
            except (Exception, asyncio.CancelledError) as error:
                return Failed("error", f"{type(error).__name__}: {error}")


class EventLoop:
    """Where coroutine rewards run; a future's result is their scores, or `Failed`. It never raises."""

    def __init__(self) -> None:
        self.thread = _LoopThread()

    def submit(self, reward: CoroutineReward, asked: Sequence[Asked]) -> "Future[Reply]":
        if self.thread.blocked:
            self.thread = _LoopThread()
        return self.thread.submit(reward, asked)

    def close(self) -> None:
        self.thread.stop()


class _LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.places: dict[Target, asyncio.Semaphore] = {}
        self.pending: dict[Future[Reply], float] = {}  # with the silence each one bears
        self.lock = threading.Lock()
        self.last_beat = time.monotonic()
        self.blocked = False
        for work in (self._run, self._watch):
            threading.Thread(target=work, name=f"async-rewards{work.__name__}", daemon=True).start()

    def submit(self, reward: CoroutineReward, asked: Sequence[Asked]) -> "Future[Reply]":
        future: Future[Reply] = Future()
        with self.lock:
            self.pending[future] = reward.target.time_limit + GRACE
        self.loop.call_soon_threadsafe(self._begin, reward, asked, future)
        return future

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed already
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _begin(self, reward: CoroutineReward, asked: Sequence[Asked], future: "Future[Reply]") -> None:
        places = self.places.setdefault(reward.target, asyncio.Semaphore(reward.concurrency))
        task = self.loop.create_task(reward.call(asked, places))
        task.add_done_callback(
            lambda done: self._settle(
                future, Failed("died", "the run ended") if done.cancelled() else done.result()
            )
        )

    def _run(self) -> None:
        self._beat()
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(BEAT))  # lets cancelled coroutines clean up
        self._settle_all(Failed("died", "the run ended"))
        self.loop.close()

    def _beat(self) -> None:
        self.last_beat = time.monotonic()
        self.loop.call_later(BEAT, self._beat)

    def _watch(self) -> None:
        while not self.loop.is_closed():
            time.sleep(BEAT)
            with self.lock:
                patience = max(self.pending.values(), default=None)
            if patience is not None and time.monotonic() - self.last_beat > patience:
                self.blocked = True
                self.stop()  # once it comes back, if it ever does
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
        with contextlib.suppress(InvalidStateError):  # given up on, and finished after all
            future.set_result(reply)
