"""What the two ends of CUDA IPC tell each other, over memory of the host in place of a GPU's."""

import json

import pytest
import torch

from paceline.worker import cuda_ipc
from paceline.worker.cuda_ipc import IpcReader, IpcWeights
from paceline.worker.readers import WeightsDamaged


class SharedMemory:
    """Storages that a handle opens; both ends are in this process."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self._storages: list[torch.UntypedStorage] = []

    def share(self, storage: torch.UntypedStorage) -> tuple[bytes, int]:
        self._storages.append(storage)
        return bytes([len(self._storages) - 1]), storage.nbytes()

    def open(self, handle: bytes, nbytes: int) -> torch.UntypedStorage:
        self.opened.append(handle[0])
        assert self._storages[handle[0]].nbytes() == nbytes
        return self._storages[handle[0]]


@pytest.fixture
def memory(monkeypatch) -> SharedMemory:
    memory = SharedMemory()
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: memory.share(storage))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", memory.open)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return memory


def notice_of(writer: IpcWeights) -> dict:
    (notice,) = writer.notices(["worker"])
    return json.loads(json.dumps(notice))


def assert_same(found, expected) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, tensor), (_, other) in zip(found, expected, strict=True):
        assert torch.equal(tensor, other) and tensor.dtype == other.dtype, name


def test_ipc_notice_is_complete_and_mapped_tensors_stay(memory):
    large = torch.randn(30, 10).to(torch.bfloat16)
    weights = [("large", large), ("view", large[7:11].T), ("small", torch.arange(5.0))]
    writer, reader = IpcWeights(), IpcReader()
    for version in range(3):
        large.normal_()
        writer.write(version, weights)
        assert_same(reader.read(notice_of(writer)), weights)
    assert memory.opened == [0, 1]
    assert_same(IpcReader().read(notice_of(writer)), weights)  # a worker that came late


def test_ipc_layout_is_written_and_read_once(memory, monkeypatch):
    counts = {"_packed": 0, "_unpacked": 0}
    for name in counts:

        def counted(layout, name=name, call=getattr(cuda_ipc, name)):
            counts[name] += 1
            return call(layout)

        monkeypatch.setattr(cuda_ipc, name, counted)
    writer, reader = IpcWeights(), IpcReader()
    for version in range(3):
        writer.write(version, [("w", torch.full((4,), version))])
        ((_, found),) = reader.read(notice_of(writer))
        assert found.tolist() == [version] * 4
    assert counts == {"_packed": 1, "_unpacked": 1}


def test_ipc_transfers_a_tensor_that_joins_and_one_that_moves(memory):
    writer, reader = IpcWeights(), IpcReader()
    first = [("a", torch.arange(6.0))]
    writer.write(1, first)
    assert_same(reader.read(notice_of(writer)), first)
    both = [("a", torch.arange(6.0) * 2), ("b", torch.arange(3))]
    writer.write(2, both)
    assert_same(reader.read(notice_of(writer)), both)


def test_ipc_write_is_complete_after_one_that_broke_off(memory):
    def breaks_off():
        yield "a", torch.arange(6.0)
        raise OSError("a rank is gone")

    writer = IpcWeights()
    with pytest.raises(OSError, match="gone"):
        writer.write(1, breaks_off())
    weights = [("a", torch.arange(6.0) * 2)]
    writer.write(1, weights)
    assert_same(IpcReader().read(notice_of(writer)), weights)


def test_ipc_reader_remaps_another_writer_with_the_same_addresses(memory):
    """A learner that was restarted may have something else where the one before had this."""
    at_home = torch.arange(8.0)
    reader = IpcReader()
    for version in (1, 2):
        writer = IpcWeights()
        writer.write(version, [("w", at_home)])
        reader.read(notice_of(writer))
    assert memory.opened == [0, 1]


def test_ipc_weights_changed_behind_the_writers_back_are_noticed_and_reread(memory):
    weight = torch.arange(8.0)
    writer, reader = IpcWeights(), IpcReader()
    writer.write(1, [("w", weight)])
    notice = notice_of(writer)
    weight[3] += 1
    assert writer.changed_in_place()
    for _ in range(2):
        with pytest.raises(WeightsDamaged, match="version 1 arrived with digest"):
            reader.read(notice)
    weight[3] -= 1
    assert_same(reader.read(notice), [("w", weight)])
