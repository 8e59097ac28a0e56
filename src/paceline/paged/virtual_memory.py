"""GPU memory whose address outlives it: reserved once, backed by physical memory only while it is needed.

CUDA graphs keep the addresses they captured. The KV pool is reserved here, so that `sleep` can release its
memory for learning and `wake` can back the same addresses again. This uses the driver API (CUDA driver
manual, "Virtual Memory Management"), which torch has loaded already.
"""

import ctypes

import torch

# Values of the driver's enumerations: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE,
# CU_MEM_ACCESS_FLAGS_PROT_READWRITE and CU_MEM_ALLOC_GRANULARITY_MINIMUM.
_PINNED = 1
_DEVICE = 1
_READ_WRITE = 3
_MINIMUM = 0


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _DeviceArray:
    """The interface by which `torch.as_tensor` wraps memory that torch did not allocate."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class ReservedMemory:
    """A range of GPU addresses; its `tensor` may be read and written only between `back` and `release`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.init()
        self.device = torch.device(
            "cuda", device.index if device.index is not None else torch.cuda.current_device()
        )
        self._driver = ctypes.CDLL("libcuda.so.1")
        location = _Location(_DEVICE, self.device.index)
        self._properties = _AllocationProperties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            _MINIMUM,
        )
        self._size = ctypes.c_size_t(-(-num_bytes // granularity.value) * granularity.value)
        self._address = ctypes.c_uint64()
        self._handle: ctypes.c_uint64 | None = None
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            self._size,
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self.back()
        self.tensor = torch.as_tensor(_DeviceArray(self._address.value, num_bytes), device=self.device)

    def back(self) -> None:
        """Backs the addresses with physical memory; its content is undefined."""
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate",
            ctypes.byref(handle),
            self._size,
            ctypes.byref(self._properties),
            ctypes.c_uint64(0),
        )
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._call(
            "cuMemSetAccess", self._address, self._size, ctypes.byref(self._access), ctypes.c_size_t(1)
        )
        self._handle = handle

    def release(self) -> None:
        """Releases the physical memory, if there is any, and keeps the addresses."""
        if self._handle is None:
            return
        torch.cuda.synchronize(self.device)
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._handle)
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.release()
        if getattr(self, "_address", None) is not None and self._address.value:
            self._driver.cuMemAddressFree(self._address, self._size)

    def _call(self, function: str, *arguments) -> None:
        error = getattr(self._driver, function)(*arguments)
        if error:
            message = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(message))
            gigabytes = self._size.value / 1e9 if hasattr(self, "_size") else 0
            raise RuntimeError(
                f"{function} failed for {gigabytes:.1f} GB of KV memory: {(message.value or b'?').decode()}"
            )
