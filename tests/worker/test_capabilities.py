"""What a client keeps of its worker's capabilities, for a worker that takes over."""

from dataclasses import fields
from types import SimpleNamespace

import torch

from paceline.records import parse, plain
from paceline.stats import RolloutStats
from paceline.worker.client import Restored, WorkerClient
from paceline.worker.codec import tensors_message


class Written:
    """Weights that were handed over and are as they were."""

    version = 4

    def changed_in_place(self) -> bool:
        return False

    def notices(self, names) -> list[dict]:
        return [{"version": self.version}]


def test_replacement_worker_gets_the_published_head_before_its_first_request():
    """With the precision that was fallen back to, the newest weights, and sleep at last."""
    published = tensors_message("publish_drafter", {"fc.weight": torch.ones(2)}, version=7)
    pool = SimpleNamespace(restored=Restored(True, published, {"k": 3}, asleep=True))
    client = WorkerClient.__new__(WorkerClient)
    client.pool, client.weights, client.worker = pool, Written(), SimpleNamespace(id=1)
    messages = client.restored_messages()
    kinds = ["fall_back", "update_weights", "publish_drafter", "load_pacing", "sleep"]
    assert [message.kind for message in messages] == kinds
    assert messages[2] is published


def test_drafter_version_is_part_of_the_serialised_statistics():
    names = {field.name for field in fields(RolloutStats)}
    assert "drafter_version" in names
    for version in (None, 0, 12):
        assert parse(RolloutStats, plain(RolloutStats(drafter_version=version))).drafter_version == version
