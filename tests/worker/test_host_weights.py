"""A new worker while the learner changes its weights in place: it waits for the next and uses no others."""

import queue
import threading
from types import SimpleNamespace

import pytest
import torch

from paceline.types import Request, SamplingParams
from paceline.worker.client import Restored, WorkerClient
from paceline.worker.codec import submit_message
from paceline.worker.cuda_ipc import IpcWeights
from paceline.worker.host import Host
from paceline.worker.wire import Message
from tests.worker.slow_backend import SlowBackend
from tests.worker.test_host_training import Line, Weights


def test_requests_wait_for_weights_that_are_whole():
    line = Line()
    thread = threading.Thread(target=Host(SlowBackend(0.0, ""), line, Weights()).serve, daemon=True)
    thread.start()
    line.outbound.get(timeout=120)
    # As a client tells a new worker: there are no weights now, and these requests are under way.
    line.inbound.put(Message("await_weights"))
    line.inbound.put(submit_message([Request("a", (1, 2), 7, SamplingParams(max_tokens=3))]))
    line.ask(Message("ping"))
    with pytest.raises(queue.Empty):
        line.outbound.get(timeout=0.3)
    line.ask(Message("update_weights", {"version": 4}))
    while (message := line.outbound.get(timeout=120)).kind != "completion":
        pass
    assert message.fields["completion"]["segments"][0]["weight_version"] == 4
    line.inbound.put(Message("close"))
    thread.join(120)


def test_weights_are_released_when_the_gpu_has_read_them(monkeypatch):
    """The writer changes its memory in place as soon as it is answered."""
    order = []
    line = Line()
    backend = SlowBackend(0.0, "")
    monkeypatch.setattr(backend, "update_weights", lambda version, weights: order.append("launched"))
    monkeypatch.setattr(line, "send", lambda message: order.append(message.kind))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("read"))
    Host(backend, line, Weights())._handle(Message("update_weights", {"version": 4}, call=1))
    assert order == ["launched", "read", "description"]


def test_new_worker_is_told_to_wait_only_while_weights_change(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(IpcWeights, "_entry", lambda self, name, tensor: {"name": name})
    parameter = torch.arange(5.0)
    client = WorkerClient.__new__(WorkerClient)
    client.pool, client.weights, client.worker = (
        SimpleNamespace(restored=Restored()),
        IpcWeights(),
        SimpleNamespace(id=1),
    )
    client.weights.write(3, [("w", parameter)])
    assert [message.kind for message in client.restored_messages()] == ["update_weights"]
    parameter.add_(1)  # the optimiser
    assert [message.kind for message in client.restored_messages()] == ["await_weights"]
    client.weights.write(4, [("w", parameter)])
    assert [message.kind for message in client.restored_messages()] == ["update_weights"]
