"""What a client keeps of its worker's capabilities, for a worker that takes over."""

from dataclasses import dataclass, field

import torch

from paceline.worker.capabilities import RemoteSpeculation
from paceline.worker.codec import read_tensors
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


def test_a_published_head_is_kept_with_its_version_while_the_head_learns_on():
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
