"""The worker's end of drafter training: work comes first, and what waited for it is counted."""

import queue
import threading
import time

import pytest
import torch

from paceline.types import Request, SamplingParams
from paceline.worker.codec import submit_message, tensors_message, tensors_of
from paceline.worker.host import Host
from paceline.worker.wire import Message
from tests.worker.slow_backend import SlowBackend


class Line:
    """A connection to a client in the same process."""

    def __init__(self) -> None:
        self.inbound: queue.Queue[Message] = queue.Queue()
        self.outbound: queue.Queue[Message] = queue.Queue()

    def receive(self) -> Message:
        return self.inbound.get()

    def send(self, message: Message) -> None:
        self.outbound.put(message)

    def ask(self, message: Message) -> Message:
        self.inbound.put(Message(message.kind, message.fields, message.arrays, call=1))
        while (answer := self.outbound.get(timeout=120)).call != 1:
            pass
        return answer


class Weights:
    """Weights that are there already."""

    def read(self, fields):
        return [("w", torch.tensor([1.0]))]


class Learner(SlowBackend):
    """A generator whose slices take 20 ms, or end at once if they are told to; it records its calls.

    With `endless`, slices end only if they are told to; `within_slice` is set while one waits for that.
    """

    def __init__(self) -> None:
        super().__init__(0.0, "")
        self.heard: list[str] = []
        self.tokens, self.updates, self.overlap = 0.0, 0, 0.0
        self.slices = 0
        self.endless, self.within_slice = False, threading.Event()
        self.pacer, self.keeps_tokens = None, True
        self.slice_trainer = self.speculation = self

    slice_trainer = speculation = None

    def begin(self, term: int) -> None:
        self.heard.append(f"begin {term}")

    def slice(self, should_stop) -> bool:
        self.slices += 1
        steps = 0
        while self.endless or steps < 20:
            if should_stop():
                return True
            if self.endless:
                self.within_slice.set()
            time.sleep(0.001)
            steps += 1
        self.tokens += 64.0
        self.updates += 1
        return True

    def weights(self):
        return {"head": torch.full((2,), 3.0)}

    def take_head(self, weights) -> None:
        self.heard.append("take_head")

    def note_weights(self, version: int) -> None:
        self.heard.append(f"note {version} before {self.version}")

    def publish_drafter(self, version, weights) -> None:
        self.heard.append(f"publish {version}")

    def sleep(self) -> None:
        self.heard.append("sleep")


@pytest.fixture
def hosted():
    line, learner = Line(), Learner()
    host = Host(learner, line, Weights())
    thread = threading.Thread(target=host.serve, daemon=True)
    thread.start()
    assert line.outbound.get(timeout=120).fields["trains"]
    yield line, learner, host
    line.inbound.put(Message("close"))
    thread.join(120)
    assert not thread.is_alive()


def train(line: Line, learner: Learner) -> None:
    """Lets it train until it has made some slices."""
    line.ask(Message("train", {"term": 4}))
    while learner.updates < 2:
        time.sleep(0.005)


def test_host_runs_work_that_arrives_within_a_training_slice_first(hosted):
    line, learner, host = hosted
    train(line, learner)
    learner.endless = True
    assert learner.within_slice.wait(120)
    line.inbound.put(submit_message([Request("a", (1, 2), 7, SamplingParams(max_tokens=3))]))
    while line.outbound.get(timeout=120).kind != "completion":
        pass
    slices = learner.slices
    time.sleep(0.1)
    assert learner.slices == slices, "it does not resume by itself: the head decides"
    answer = line.ask(Message("stop_training"))
    assert answer.fields["tokens"] == learner.tokens and answer.fields["updates"] == learner.updates
    assert 0.04 < answer.fields["seconds"] < 120 and not answer.arrays, "its weights only when asked for"
    assert 0 < answer.fields["waited"] < answer.fields["seconds"]
    sent = line.ask(Message("trained_drafter"))
    assert tensors_of(sent)["head"].tolist() == [3.0, 3.0]


def test_ping_interrupts_training_without_ending_it(hosted):
    line, learner, host = hosted
    train(line, learner)
    slices = learner.slices
    line.ask(Message("ping"))
    while learner.slices < slices + 3:
        time.sleep(0.005)
    line.ask(Message("sleep"))
    slices = learner.slices
    time.sleep(0.1)
    assert learner.slices == slices and learner.heard[-1] == "sleep", "where others have the memory"


def test_host_with_work_does_not_train(hosted):
    line, learner, host = hosted
    learner.seconds = 0.01
    line.inbound.put(submit_message([Request("a", (1, 2), 7, SamplingParams(max_tokens=10**9))]))
    line.ask(Message("train", {"term": 1}))
    line.inbound.put(Message("abort", {"ids": ["a"]}))  # until then it has work, however long that takes
    while line.outbound.get(timeout=120).kind != "completion":
        pass
    assert learner.slices == 0 and learner.heard == ["begin 1"]


def test_trainer_is_notified_of_weight_updates_and_published_heads(hosted):
    line, learner, host = hosted
    line.ask(Message("update_weights", {"version": 9}))
    line.ask(tensors_message("publish_drafter", {"head": torch.ones(2)}, version=2))
    assert learner.heard == ["note 9 before 0", "publish 2", "take_head"] and learner.version == 9


def test_outstanding_requests_wait_while_the_host_sleeps(hosted):
    """A step would write into a cache that is not there."""
    line, learner, host = hosted
    learner.seconds = 0.01
    line.inbound.put(submit_message([Request("a", (1, 2), 7, SamplingParams(max_tokens=200))]))
    while not learner.rows or not learner.rows[0][1]:
        time.sleep(0.005)
    line.ask(Message("sleep"))
    written = len(learner.rows[0][1])
    line.inbound.put(submit_message([Request("b", (1, 2), 8, SamplingParams(max_tokens=2))]))
    line.ask(Message("ping"))
    time.sleep(0.1)
    assert len(learner.rows[0][1]) == written and not learner.rows[1][1]
    line.ask(Message("wake"))
    assert line.outbound.get(timeout=120).kind == "completion", "it resumes by itself"


def test_published_head_is_loaded_while_the_host_sleeps(hosted):  # noqa: F811
    """A head learns while the pool's memory is the learner's, and is published before that comes back."""
    line, learner, host = hosted
    line.ask(Message("sleep"))
    line.ask(tensors_message("publish_drafter", {"head": torch.ones(2)}, version=2))
    assert learner.heard == ["sleep", "publish 2", "take_head"]


def test_replacement_worker_without_memory_to_train_answers_train_requests():
    line, learner = Line(), Learner()
    learner.slice_trainer = None
    thread = threading.Thread(target=Host(learner, line, Weights()).serve, daemon=True)
    thread.start()
    assert not line.outbound.get(timeout=120).fields["trains"]
    assert line.ask(Message("train", {"term": 1})).kind == "done"
    assert line.ask(Message("stop_training")).fields["tokens"] == 0
    line.inbound.put(Message("close"))
    thread.join(120)
    assert not thread.is_alive()
