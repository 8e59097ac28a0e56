"""Memory that is lent out and comes back at the same address.

Without a GPU the driver is a fake that refuses whatever CUDA's manual forbids (mapping what is mapped,
freeing addresses that are backed, sizes off the granularity); with one, the real driver is asked.
"""

import ctypes
import gc

import pytest
import torch

from paceline.paged.storage import PagedStorage
from paceline.paged.virtual_memory import ReservedMemory

GRANULARITY = 2 << 20
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
ADDRESS = 0x7F00_0000_0000


class FakeDriver:
    """CUDA's virtual memory of one range: what is reserved, created, mapped and accessible."""

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}  # size by address
        self.created: dict[int, int] = {}  # size by handle
        self.mapped: dict[int, int] = {}  # handle by address
        self.accessible: set[int] = set()
        self.free_bytes = 1 << 30
        self.handles = 0
        self.synchronised = False

    def cuMemGetAllocationGranularity(self, granularity, properties, option) -> int:
        granularity._obj.value = GRANULARITY
        return 0

    def cuMemAddressReserve(self, address, size, alignment, hint, flags) -> int:
        if size.value % GRANULARITY or not size.value:
            return INVALID_VALUE
        address._obj.value = ADDRESS
        self.reserved[ADDRESS] = size.value
        return 0

    def cuMemCreate(self, handle, size, properties, flags) -> int:
        if size.value % GRANULARITY:
            return INVALID_VALUE
        if size.value > self.free_bytes:
            return OUT_OF_MEMORY
        self.free_bytes -= size.value
        self.handles += 1
        handle._obj.value = self.handles
        self.created[self.handles] = size.value
        return 0

    def cuMemMap(self, address, size, offset, handle, flags) -> int:
        if address.value in self.mapped or self.created.get(handle.value) != size.value:
            return INVALID_VALUE
        self.mapped[address.value] = handle.value
        return 0

    def cuMemSetAccess(self, address, size, access, count) -> int:
        if address.value not in self.mapped or access._obj.flags != 3:
            return INVALID_VALUE
        self.accessible.add(address.value)
        return 0

    def cuMemUnmap(self, address, size) -> int:
        if address.value not in self.mapped or not self.synchronised:
            return INVALID_VALUE
        del self.mapped[address.value]
        self.accessible.discard(address.value)
        return 0

    def cuMemRelease(self, handle) -> int:
        if handle.value in self.mapped.values() or handle.value not in self.created:
            return INVALID_VALUE
        self.free_bytes += self.created.pop(handle.value)
        return 0

    def cuMemAddressFree(self, address, size) -> int:
        if address.value in self.mapped or self.reserved.get(address.value) != size.value:
            return INVALID_VALUE
        del self.reserved[address.value]
        return 0

    def cuGetErrorString(self, error, message) -> int:
        message._obj.value = {OUT_OF_MEMORY: b"out of memory", INVALID_VALUE: b"invalid argument"}[error]
        return 0


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver()

    def synchronise(device: torch.device) -> None:
        fake.synchronised = True

    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronise)
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: array.__cuda_array_interface__)
    return fake


@pytest.mark.parametrize("num_bytes", [1, GRANULARITY, GRANULARITY + 1])
def test_reserved_memory_is_backed_released_and_backed_again(driver, num_bytes):
    before = driver.free_bytes
    memory = ReservedMemory(num_bytes, torch.device("cuda"))
    whole = -(-num_bytes // GRANULARITY) * GRANULARITY
    assert memory.tensor["data"] == (ADDRESS, False) and memory.tensor["shape"] == (num_bytes,)
    assert memory.device == torch.device("cuda", 0)
    for _ in range(3):
        assert driver.accessible == {ADDRESS} and before - driver.free_bytes == whole
        driver.synchronised = False  # kernels are in flight again
        memory.release()
        assert not driver.mapped and not driver.created and driver.free_bytes == before
        assert driver.reserved == {ADDRESS: whole}, "the address stays"
        memory.back()
    del memory
    gc.collect()
    assert not driver.reserved and not driver.created and driver.free_bytes == before


def test_reserved_memory_is_not_released_twice(driver):
    memory = ReservedMemory(1, torch.device("cuda"))
    memory.release()
    del memory
    gc.collect()
    assert not driver.reserved and driver.free_bytes == 1 << 30


def test_out_of_memory_error_names_the_call_and_the_size(driver):
    driver.free_bytes = 1 << 28
    with pytest.raises(RuntimeError, match=r"cuMemCreate failed for 0.5 GB of KV memory: out of memory"):
        ReservedMemory(1 << 29, torch.device("cuda"))
    gc.collect()
    assert not driver.reserved, "what had been reserved is free again"


def test_cpu_storage_sleeps_and_wakes_with_zeros():
    storage = PagedStorage((2, 3), torch.float32, torch.device("cpu"))
    assert storage.num_bytes == 24
    storage.tensor.fill_(1.0)
    storage.sleep()
    assert storage.tensor is None
    storage.wake()
    assert torch.equal(storage.tensor, torch.zeros(2, 3))


@pytest.mark.gpu
def test_real_driver_keeps_the_address_and_releases_the_memory():
    num_bytes = 256 << 20
    storage = PagedStorage((num_bytes // 4,), torch.float32, torch.device("cuda"))
    address = storage.tensor.data_ptr()
    storage.tensor.fill_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        storage.tensor.add_(1.0)
    awake = torch.cuda.mem_get_info()[0]
    storage.sleep()
    assert torch.cuda.mem_get_info()[0] - awake >= num_bytes, "its memory is free for others"
    storage.wake()
    assert storage.tensor.data_ptr() == address
    assert not storage.tensor.any(), "zeros, not what was there"
    graph.replay()
    assert storage.tensor.eq(1.0).all(), "a captured graph finds it again"


@pytest.mark.gpu
def test_real_driver_refuses_more_memory_than_the_device_has():
    with pytest.raises(RuntimeError, match="of KV memory: out of memory"):
        ReservedMemory(1 << 42, torch.device("cuda"))
