"""Ranks as forked processes: they start in milliseconds, because everything is imported already."""

import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.learning.checkpoint import PARTIAL, TrainingState, write_checkpoint
from paceline.learning.distributed.group import RankGroup, join_ranks
from paceline.learning.distributed.rank_learner import RankLearner
from tests.ports import free_port

# Long: the machine may have much else to do.
TIMEOUT_SECONDS = 240.0


class Outcome(NamedTuple):
    """What became of a rank's process: the function's result, or the error that it raised."""

    pid: int
    result: Any
    error: str
    code: int  # negative: the signal that ended it


def start_ranks(
    count: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    timeout: float = TIMEOUT_SECONDS,
) -> list[int]:
    """Forks `count` processes that join and call `function(group, *arguments)`; returns their ids."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            _become(rank, count, port, function, folder, arguments, timeout)
        pids.append(pid)
    return pids


def end_ranks(
    pids: list[int], folder: Path, hung: int | None = None, seconds: float = 300.0
) -> list[Outcome]:
    """Waits for the processes and returns what became of each; who does not end is killed, and that fails.

    The rank `hung` is not waited for, but killed when the others have ended.
    """
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    expected = {pid for rank, pid in enumerate(pids) if rank != hung}
    while expected - set(codes) and time.monotonic() < deadline:
        for pid in expected - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    hanging = expected - set(codes)
    for pid in set(pids) - set(codes):
        os.kill(pid, signal.SIGKILL)
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert not hanging, f"ranks {[pids.index(pid) for pid in hanging]} did not end within {seconds:g} s"
    outcomes = []
    for rank, pid in enumerate(pids):
        result, error = None, ""
        with suppress(FileNotFoundError):
            result, error = pickle.loads((folder / f"outcome-{rank}").read_bytes())
        outcomes.append(Outcome(pid, result, error, codes[pid]))
    return outcomes


def run_ranks(count: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Returns what `function(group, *arguments)` returned on each of `count` processes of their own."""
    outcomes = end_ranks(start_ranks(count, function, folder, *arguments), folder)
    failed = [f"rank {rank}: {o.error or o.code}" for rank, o in enumerate(outcomes) if o.error or o.code]
    assert not failed, "\n".join(failed)
    assert len({os.getpid(), *(outcome.pid for outcome in outcomes)}) == count + 1
    return [outcome.result for outcome in outcomes]


def save_by_ranks(
    learner: RankLearner, folder: Path, state: TrainingState, tokenizer_from: Path, keep: int
) -> Path:
    """Writes a checkpoint as the process above the ranks does, with the first of them in its place."""
    path = folder / f"step_{state.step:06d}"
    if learner.group.rank == 0:
        write_checkpoint(folder, lambda partial: learner.write(partial, tokenizer_from), state, keep)
    else:
        learner.write(path.with_name(f"{PARTIAL}{path.name}"), tokenizer_from)
    learner.group.texts("")  # it has its name
    return path


def _become(
    rank: int,
    count: int,
    port: int,
    function: Callable[..., Any],
    folder: Path,
    arguments: tuple,
    timeout: float,
) -> None:
    code = 1
    try:
        gc.freeze()  # what other tests left is not for this process to end: it has none of their threads
        torch.set_num_threads(1)
        outcome: tuple[Any, str] = (None, "")
        try:
            group: RankGroup = join_ranks("127.0.0.1", port, rank, count, timeout=timeout)
            outcome = (function(group, *arguments), "")
            group.leave()
        except Exception as error:
            outcome = (None, "".join(traceback.format_exception_only(error)) + traceback.format_exc()[-3000:])
        (folder / f"outcome-{rank}").write_bytes(pickle.dumps(outcome))
        code = 0
    finally:
        os._exit(code)
