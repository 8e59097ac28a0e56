"""What a client keeps of its worker's capabilities, for a worker that takes over."""

from dataclasses import dataclass, field, fields

import torch

from paceline.stats import RolloutStats
from paceline.types import Request, SamplingParams
from paceline.worker.capabilities import RemoteSpeculation
from paceline.worker.client import WorkerBackend
from paceline.worker.codec import publish_message, read_stats, read_tensors, stats_record
from paceline.worker.wire import Message


@dataclass
class RecordingCaller:
    description: dict = field(default_factory=dict)
    published: Message | None = None
    fell_back: bool = False
    calls: list[Message] = field(default_factory=list)

    def call(self, message: Message) -> Message:
        self.calls.append(message)
        return Message("done")


def test_published_head_is_kept_with_its_version_while_training_continues():
    caller = RecordingCaller()
    head = torch.nn.Linear(3, 2)
    published = head.weight.detach().clone()
    RemoteSpeculation(caller).publish_drafter(7, dict(head.named_parameters()))
    with torch.no_grad():
        head.weight.add_(1)
    assert caller.calls == [caller.published]
    assert caller.published.fields["version"] == 7
    kept = read_tensors(caller.published.fields["tensors"], caller.published.arrays)
    assert torch.equal(kept["weight"], published)


class Written:
    """Weights that were handed over and are as they were."""

    version = 4

    def changed_in_place(self) -> bool:
        return False

    def notices(self, names) -> list[dict]:
        return [{"version": self.version}]


def test_replacement_worker_gets_the_published_head_before_its_first_request():
    """With the precision that was fallen back to, the newest weights, and sleep at last."""
    client = WorkerBackend.__new__(WorkerBackend)
    client.weights, client.fell_back, client.pacing, client.asleep = Written(), True, {"k": 3}, True
    client.worker = type("Named", (), {"id": 1})
    client.outstanding = {"a": Request("a", (1, 2), 7, SamplingParams(max_tokens=3))}
    client.published = publish_message(7, {"fc.weight": torch.ones(2)})
    messages = client._restored_messages()
    kinds = ["fall_back", "update_weights", "publish_drafter", "load_pacing", "submit", "sleep"]
    assert [message.kind for message in messages] == kinds
    assert messages[2] is client.published


def test_drafter_version_is_part_of_the_serialised_statistics():
    plain = {field.name for field in fields(RolloutStats)}
    assert "drafter_version" in plain
    for version in (None, 0, 12):
        assert read_stats(stats_record(RolloutStats(drafter_version=version))).drafter_version == version
