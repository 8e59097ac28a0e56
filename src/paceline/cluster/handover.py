"""Weight updates of all replicas at once, over any transport."""

from collections.abc import Sequence
from concurrent.futures import Executor

from paceline.worker.client import WorkerClient
from paceline.worker.process import WorkerFailed
from paceline.worker.readers import TransferInterrupted, Weights
from paceline.worker.wire import Message

# How often a transfer is retried because one of its replicas was lost; each time there is one less.
TRIES = 5


def hand_over(weights: Weights, replicas: Sequence[WorkerClient], executor: Executor) -> None:
    """Updates these replicas to the newest weights; returns when they generate with them.

    Where replicas receive together, one that is lost interrupts the others: it is left out, since its
    replacement gets the weights before anything else, and the transfer to the others is retried.
    """
    left = list(replicas)
    for _ in range(TRIES):
        if not left:
            return
        weights.begin_reading()
        try:
            notices = weights.notices([str(replica.worker.id) for replica in left])
            asked = [
                executor.submit(_tell, replica, notice, weights)
                for replica, notice in zip(left, notices, strict=True)
            ]
            interrupted = [future.result() for future in asked]
        finally:
            weights.end_reading()
        left = [replica for replica, again in zip(left, interrupted, strict=True) if again]
    raise WorkerFailed(
        f"weights did not reach {len(left)} replicas in {TRIES} tries, because replicas keep being lost"
    )


def _tell(replica: WorkerClient, notice: dict, weights: Weights) -> bool:
    """Notifies one replica of new weights; returns whether to retry."""
    try:
        answered = replica.ask(Message("update_weights", notice)) is not None
    except TransferInterrupted:
        return True
    except WorkerFailed:
        answered = False  # the pool already knows
    if not answered:
        weights.cancel(notice)
    return False
