"""New weights for every replica at once, whichever way they travel."""

from collections.abc import Sequence
from concurrent.futures import Executor

from paceline.cluster.replica import Replica
from paceline.worker.process import WorkerFailed
from paceline.worker.readers import TransferInterrupted, Weights
from paceline.worker.wire import Message

# How often a transfer begins again because one of its replicas was lost; each time there is one less.
TRIES = 5


def hand_over(weights: Weights, replicas: Sequence[Replica], executor: Executor) -> None:
    """Hands the newest weights to these replicas, and returns when they generate with them.

    Where replicas receive together, one that is lost interrupts the others: it is left out, since its
    successor gets the weights before anything else, and the others are sent them again.
    """
    left = list(replicas)
    for _ in range(TRIES):
        if not left:
            return
        weights.begin_reading()
        try:
            notices = weights.notices([str(replica.client.worker.id) for replica in left])
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


def _tell(replica: Replica, notice: dict, weights: Weights) -> bool:
    """Tells one replica of new weights; returns whether it must be told again."""
    try:
        answer = replica.client.ask(Message("update_weights", notice))
    except TransferInterrupted:
        return True
    except WorkerFailed:
        answer = None  # the pool has heard of it
    if answer is None:
        weights.cancel(notice)
        return False
    replica.client.description = answer.fields
    return False
