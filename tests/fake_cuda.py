"""Stand-ins for CUDA devices, whose streams run only when they have to, and for the libraries that use them.

Work on a stream is delayed until the host waits for it, or until the test runs the stream. Device memory is
NumPy memory, which is filled with junk when it is allocated and when it is freed, so a read that comes too
early or too late gives junk. Pools reuse a freed block at once for the next allocation of its size on its
stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.machinery
import itertools
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

# Private: the package's record of this process's use of CUDA. Only this module of the tests uses it.
from spdl_media import cuda_driver, devices
from spdl_media.cuda import color
from spdl_media.cuda_driver import HISTORY
from spdl_media.handover import KEEPER

JUNK, FREED = 0x5A, 0xDD


class FakeOutOfMemoryError(RuntimeError):
    """PyTorch's error, recognized by its name."""


FakeOutOfMemoryError.__name__ = "OutOfMemoryError"


def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process count as one that has not used CUDA and was not forked from one that has.

    The driver is that of the card of the last stand-in library; before that, there is none.
    """
    monkeypatch.setattr(HISTORY, "used", False)
    monkeypatch.setattr(HISTORY, "lost", False)
    # A class with streams of its own, which threads of this test give back, even if they end later.
    streams = type("_Streams", (devices._Streams,), {"idle": {}})
    monkeypatch.setattr(devices, "_Streams", streams)
    monkeypatch.setattr(devices, "_THREAD", devices._Thread())
    KEEPER._start()
    transfer = importlib.import_module("spdl_media.transfer")  # the package exports functions only
    monkeypatch.setattr(transfer, "_WINDOW", transfer._Window())
    monkeypatch.setattr(cuda_driver, "driver", _driver_of_card)
    # After the driver, so that they are put back before it, and what they keep is freed by this driver.
    for module, name in _CACHED:
        cached = getattr(module, name)
        fresh = functools.lru_cache(**cached.cache_parameters())(cached.__wrapped__)
        monkeypatch.setattr(module, name, fresh)
    _CARDS.clear()


def install(monkeypatch: pytest.MonkeyPatch, fake: Any) -> Any:
    """Make a stand-in for a library what its name imports, and return it."""
    monkeypatch.setitem(sys.modules, fake.__spec__.name, fake)
    return fake


_CACHED = (
    *((cuda_driver, name) for name in ("_primary_context", "_keep_memory", "_function")),
    (color, "_tables"),
)


_CARDS: list[Card] = []
_EVENTS = itertools.count(1)


def _driver_of_card() -> Driver:
    if not _CARDS:
        raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
    return _CARDS[-1].driver


class Event:
    """A point in a stream. ``block`` and ``blocking`` mean that waiting takes no CPU time."""

    def __init__(self, card: Card, *, blocking: bool) -> None:
        assert blocking, "to wait for this event would keep a core busy"
        self.card = card
        self.fired = threading.Event()

    def reach(self) -> bool:
        self.fired.set()
        return True

    def synchronize(self) -> None:
        if self.card.runs_by_itself:
            self.card.run()
        assert self.fired.wait(10), "this event is never reached"
        if self.card.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")


class Stream:
    """Queued work, done in order. A function that returns False is not done yet, and stops the stream."""

    def __init__(self, card: Card, device: int, address: int) -> None:
        self.card, self.device, self.address = card, device, address
        self.work: deque[Callable[[], bool]] = deque()
        self.is_destroyed = False

    def put(self, what: str, do: Callable[[], bool]) -> None:
        assert not self.is_destroyed, "cudaErrorInvalidResourceHandle: invalid resource handle"
        self.card.log.append(f"{what} on {self}")
        self.work.append(do)
        if self.card.is_eager:
            self.card.run()

    def record(self, event: Event) -> None:
        self.put("event", event.reach)

    def wait(self, event: Event) -> None:
        self.put("wait", event.fired.is_set)

    def destroy(self) -> None:
        self.is_destroyed = True

    def run(self) -> bool:
        """Do all work that can be done; return whether there was any."""
        moved = False
        while self.work and self.work[0]():
            self.work.popleft()
            moved = True
        return moved

    def __str__(self) -> str:
        return f"stream {self.address:#x} of device {self.device}"


class Card:
    """Devices with their streams and memory.

    Args:
        devices: Number of devices.
        nbytes: Bytes of memory of each device.
    """

    def __init__(self, devices: int = 1, nbytes: int = 1 << 20) -> None:
        self.devices, self.total = devices, nbytes
        self.used = [0] * devices
        self.log: list[str] = []
        self.streams: dict[tuple[int, int], Stream] = {}
        self.pools: dict[tuple[int, int, int], list[np.ndarray]] = {}
        self.blocks: dict[int, tuple[np.ndarray, tuple[int, int, int]]] = {}
        self.read: list[tuple[int, list[Event]]] = []
        self.runs_by_itself = True
        self.is_eager = False
        self.broken = False
        self.pinned: list[tuple[int, int]] = []
        self._next = 0x1000
        self._lock = threading.RLock()
        self.driver = Driver(self)

    def stream(self, device: int, address: int) -> Stream:
        key = device, address or 1
        if key not in self.streams:
            self.streams[key] = Stream(self, *key)
        return self.streams[key]

    def new_stream(self, device: int) -> Stream:
        self._next += 0x100
        return self.stream(device, self._next)

    def run(self) -> None:
        """Run all streams as far as possible."""
        with self._lock:
            while sum(stream.run() for stream in list(self.streams.values())):
                pass

    def allocate(self, nbytes: int, device: int, stream: int) -> int:
        key = device, stream or 1, nbytes
        with self._lock:
            done = [one for one in self.read if all(event.fired.is_set() for event in one[1])]
            for one in done:
                self.read.remove(one)
        for address, _ in done:
            self.free(address)
        with self._lock:
            free = self.pools.setdefault(key, [])
            if not free:
                if self.used[device] + nbytes > self.total:
                    raise FakeOutOfMemoryError("CUDA out of memory.")
                self.used[device] += nbytes
                free.append(np.full(max(1, nbytes), JUNK, np.uint8))
            # A reused block has its old values until the stream has overwritten it.
            block = free.pop()
        self.blocks[block.ctypes.data] = block, key
        return block.ctypes.data

    def pin(self, nbytes: int) -> np.ndarray:
        """Allocate pinned host memory, of which there is as much as device memory."""
        if nbytes > self.total:
            raise FakeOutOfMemoryError("cudaErrorMemoryAllocation: out of memory")
        self.log.append(f"{nbytes} bytes pinned")
        memory = np.full(nbytes + 64, JUNK, np.uint8)
        start = -memory.ctypes.data % 64
        self.pinned.append((memory.ctypes.data, memory.ctypes.data + len(memory)))
        return memory[start : start + nbytes]

    def free_after(self, address: int, readers: set[int]) -> None:
        """Free a block when the streams that use it have reached this point, as PyTorch does."""
        device = self.blocks[address][1][0]
        events = [Event(self, blocking=True) for _ in readers]
        for event, stream in zip(events, readers, strict=True):
            self.stream(device, stream).record(event)
        self.read.append((address, events))

    def free(self, address: int) -> None:
        block, key = self.blocks.pop(address)

        def spoil() -> bool:
            block[:] = FREED
            return True

        # The next owner writes to it on the same stream, after the work that is queued now.
        self.stream(key[0], key[1]).put("reuse", spoil)
        self.pools[key].append(block)


class HostBytes:
    """Host memory at an address, as an array for NumPy."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = {
            key: value for key, value in interface.items() if key != "stream"
        }
        self.owner = owner


class DeviceArray:
    """An array on a device, of either library."""

    def __init__(self, card: Card, device: int, values: np.ndarray, owner: object) -> None:
        self.card, self.index, self.values, self.owner = card, device, values, owner
        self.shape, self.dtype, self.strides = values.shape, values.dtype, values.strides
        self.readers: set[int] = set()
        self.device = SimpleNamespace(type="cuda", index=device, id=device)
        self.data = SimpleNamespace(ptr=values.ctypes.data)
        self.exports: list[int | None] = []

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.values.__array_interface__, "stream": 99, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __dlpack__(self, *, stream: int | None = None) -> DeviceArray:
        self.exports.append(stream)
        return self

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def record_stream(self, stream: TorchStream) -> None:
        self.card.log.append(f"memory kept for {stream.stream}")
        self.readers.add(stream.stream.address)

    def copy_(self, source: Any, *, non_blocking: bool) -> None:
        raise NotImplementedError


def values_of(buffer: Any) -> np.ndarray:
    """Return the current values of a buffer on a device."""
    return np.asarray(HostBytes(buffer.array.__cuda_array_interface__, buffer.array))


class _Capsule:
    """A DLPack capsule of device memory, which NumPy accepts as host memory."""

    def __init__(self, capsule: Any, index: int) -> None:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
        place = (ctypes.c_int32 * 2).from_address(pointer(capsule, b"dltensor") + 8)
        assert list(place) == [2, index]
        place[:] = 1, 0
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def by_dlpack(array: Any, index: int, stream: int) -> tuple[np.ndarray, object]:
    """Return the values of an array by DLPack, and the object that keeps them alive."""
    given = array.__dlpack__(stream=stream)
    if hasattr(given, "values"):
        return given.values, given
    values = np.from_dlpack(_Capsule(given, index))
    return values, values


class TorchStream:
    def __init__(self, torch: FakeTorch, stream: Stream) -> None:
        self._torch, self.stream = torch, stream
        self.cuda_stream = 0 if stream.address == 1 else stream.address

    def wait_event(self, event: TorchEvent) -> None:
        self.stream.wait(event)

    def record_event(self) -> TorchEvent:
        event = TorchEvent(self.stream.card, blocking=True)
        event.record(self)
        return event


class TorchEvent(Event):
    def record(self, stream: TorchStream) -> None:
        stream.stream.record(self)


class Driver:
    """The functions of libcuda that the package uses. Addresses and sizes are Python integers."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.events: dict[int, Event] = {}
        self.started: set[int] = set()
        self.library: ctypes.CDLL | None = None
        self.launches: list[SimpleNamespace] = []
        self._functions: list[str] = []
        self._local = threading.local()

    @property
    def contexts(self) -> list[int]:
        """Stack of devices that are current in this thread."""
        return self._local.__dict__.setdefault("contexts", [])

    def _stream(self, address: int | None) -> Stream:
        assert self.contexts, "CUDA_ERROR_INVALID_CONTEXT: no device is the current one"
        return self.card.stream(self.contexts[-1], address or 1)

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802  # the driver's names, as all below
        version._obj.value = 12040
        return 0

    def cuGetErrorName(self, status: int, text: Any) -> int:  # noqa: N802
        words = {2: "OUT_OF_MEMORY (out of memory)"}.get(status, str(status))
        text._obj.value = f"CUDA_ERROR_{words}".encode()
        return 0

    cuGetErrorString = cuGetErrorName  # noqa: N815

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0 if index < self.card.devices else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        self.started.add(device)
        context._obj.value = 1 + device
        return 0

    def cuStreamGetCtx(self, stream: int, context: Any) -> int:  # noqa: N802
        found = [device for device, address in self.card.streams if address == stream]
        context._obj.value = 1 + found[0] if found else 0
        return 0 if found else 400

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.append(getattr(context, "value", context) - 1)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = self.contexts[-1]
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        self.card.log.append("all waited for")
        self.card.run()
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1, "it would wait for the default stream"
        stream._obj.value = self.card.new_stream(self.contexts[-1]).address
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        assert flags == 3, (
            "to wait for this event would keep a core busy, or it has a time, which costs"
        )
        event._obj.value = next(_EVENTS)
        self.events[event._obj.value] = Event(self.card, blocking=True)
        return 0

    def cuEventRecord(self, event: int, stream: int) -> int:  # noqa: N802
        if self._stream(stream).is_destroyed:
            return 400
        self._stream(stream).record(self.events[event])
        return 0

    def cuEventQuery(self, event: int) -> int:  # noqa: N802
        return 0 if self.events[event].fired.is_set() else 600

    def cuEventSynchronize(self, event: int) -> int:  # noqa: N802
        try:
            self.events[event].synchronize()
        except RuntimeError:
            return 719
        return 0

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self._stream(stream).wait(self.events[event])
        return 0

    def cuEventDestroy_v2(self, event: int) -> int:  # noqa: N802
        self.events.pop(event, None)  # it may belong to the card of an earlier test
        return 0

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, nbytes: int, stream: int) -> int:  # noqa: N802
        return self._copy("copy in", target, source, nbytes, stream)

    def cuMemcpyDtoHAsync_v2(self, target: int, source: int, nbytes: int, stream: int) -> int:  # noqa: N802
        return self._copy("copy out", target, source, nbytes, stream)

    def cuMemcpyDtoDAsync_v2(self, target: int, source: int, nbytes: int, stream: int) -> int:  # noqa: N802
        return self._copy("copy", target, source, nbytes, stream)

    def cuDeviceGetDefaultMemPool(self, pool: Any, device: int) -> int:  # noqa: N802
        pool._obj.value = 1 + device
        return 0

    def cuMemPoolSetAttribute(self, pool: Any, attribute: int, value: Any) -> int:  # noqa: N802
        assert (attribute, value._obj.value) == (4, 2**64 - 1), "memory is not kept for later"
        return 0

    def cuMemAllocAsync(self, address: Any, nbytes: int, stream: int) -> int:  # noqa: N802
        assert nbytes, "CUDA_ERROR_INVALID_VALUE"
        try:
            address._obj.value = self.card.allocate(nbytes, self.contexts[-1], stream)
        except FakeOutOfMemoryError:
            return 2
        return 0

    def cuMemFreeAsync(self, address: int, stream: int) -> int:  # noqa: N802
        if address not in self.card.blocks:
            return 400  # it belongs to the card of an earlier test
        _, (device, own, _) = self.card.blocks[address]
        assert (device, own) == (self.contexts[-1], stream or 1), "freed on another stream"
        self.card.free(address)
        return 0

    def _copy(self, what: str, target: int, source: int, nbytes: int, stream: int) -> int:
        if self.card.broken:
            return 719

        def do() -> bool:
            ctypes.memmove(target, source, nbytes)
            return True

        self._stream(stream).put(what, do)
        return 0

    def cuPointerGetAttribute(self, kind: Any, attribute: int, address: int) -> int:  # noqa: N802
        assert attribute == 2
        kind._obj.value = 1
        return 0 if any(start <= address < stop for start, stop in self.card.pinned) else 1

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:  # noqa: N802
        total._obj.value = self.card.total
        free._obj.value = self.card.total - self.card.used[self.contexts[-1]]
        return 0

    def cuModuleLoadData(self, module: Any, ptx: bytes) -> int:  # noqa: N802
        assert b".target sm_75" in ptx
        module._obj.value = 0x77
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        assert module == 0x77
        self._functions.append(name.decode())
        function._obj.value = len(self._functions)
        return 0

    def cuLaunchKernel(self, function: int, *rest: Any) -> int:  # noqa: N802
        *dims, shared, stream, arguments, extra = rest
        assert (shared, extra) == (0, None)
        name, library = self._functions[function - 1], self.library
        dtype = color.CONVERSION
        argument = np.frombuffer(ctypes.string_at(arguments[0], dtype.itemsize), dtype).copy()
        dims_array = (ctypes.c_uint * 6)(*dims)

        def run() -> bool:
            if library is not None:
                run = getattr(library, f"run_{name}")
                run(dims_array, ctypes.c_void_p(argument.ctypes.data))
            return True

        self.launches.append(
            SimpleNamespace(
                name=name,
                grid=tuple(dims[:3]),
                block=tuple(dims[3:]),
                argument=argument,
                frames=argument["frames"][0][: dims[2]],
                device=self.contexts[-1],
                stream=stream,
            )
        )
        self._stream(stream).put(name, run)
        return 0


class HostTensor:
    """A stand-in for a CPU tensor of PyTorch.

    PyTorch keeps its own memory until copies are done; the caller has to keep borrowed memory of NumPy.
    """

    is_borrowed = False

    def __init__(self, torch: FakeTorch, values: np.ndarray, *, pinned: bool = False) -> None:
        self._torch, self.values, self._pinned = torch, values, pinned
        self.dtype, self.shape = values.dtype, values.shape
        self.device = SimpleNamespace(type="cpu", index=None)

    def is_pinned(self) -> bool:
        return self._pinned

    def pin_memory(self) -> HostTensor:
        return HostTensor(self._torch, self.values.copy(), pinned=True)

    def numel(self) -> int:
        return self.values.size

    def element_size(self) -> int:
        return self.values.itemsize

    def numpy(self) -> np.ndarray:
        return self.values

    def to(self, device: str, *, non_blocking: bool) -> DeviceArray:
        assert non_blocking
        assert self._pinned, "a copy from pageable memory is not in the background"
        target = self._torch.empty(self.shape, dtype=self.dtype, device=device)
        target.copy_(self, non_blocking=True)
        return target

    def copy_(self, source: TorchTensor, *, non_blocking: bool) -> None:
        target = self.values
        if self.is_borrowed:
            target = HostBytes(target.__array_interface__, None)
        self._torch.copy(target, source.values, "copy out")


class TorchTensor(DeviceArray):
    torch: FakeTorch

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.values.__array_interface__, "version": 2}

    def __dlpack__(self, *, stream: int | None = None) -> DeviceArray:
        if self.index != self.torch.selected:
            raise BufferError("Can't export tensors on a different CUDA device index.")
        return super().__dlpack__(stream=stream)

    def detach(self) -> TorchTensor:
        """Another tensor over the same memory."""
        tensor = self.torch._tensor(self.index, self.values, self)
        tensor.readers = self.readers
        return tensor

    def copy_(self, source: HostTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        values: Any = source.values
        if source.is_borrowed:
            values = HostBytes(values.__array_interface__, None)
        self.torch.copy(self.values, values, "copy in")


class FakeTorch:
    """The parts of PyTorch that the package uses for devices."""

    def __init__(self, card: Card) -> None:
        self.card = card
        _CARDS.append(card)
        self.__spec__ = importlib.machinery.ModuleSpec("torch", None)
        self._local = threading.local()
        self._current: dict[tuple[int, int], TorchStream] = {}
        self.cuda = SimpleNamespace(
            is_available=lambda: card.devices > 0,
            device_count=lambda: card.devices,
            mem_get_info=lambda index: (card.total - card.used[index], card.total),
            Stream=lambda device: TorchStream(self, card.new_stream(device)),
            ExternalStream=self._external,
            default_stream=lambda index: TorchStream(self, card.stream(index, 1)),
            current_stream=self._current_stream,
            stream=self._use,
            device=self._select,
            Event=lambda blocking=False: TorchEvent(card, blocking=blocking),
            caching_allocator_alloc=card.allocate,
            caching_allocator_delete=card.free,
        )
        self.Tensor = (HostTensor, TorchTensor)
        self.uint8 = np.uint8
        self.__version__ = "0.fake"
        self.version = SimpleNamespace(cuda="99.1")
        self.backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True))

    def _external(self, address: int, device: int) -> TorchStream:
        assert address > 1, "PyTorch gives any stream of its pool for address 0"
        return TorchStream(self, self.card.stream(device, address))

    def _current_stream(self, index: int) -> TorchStream:
        key = threading.get_ident(), index
        return self._current.get(key) or self.cuda.default_stream(index)

    @contextlib.contextmanager
    def _use(self, stream: TorchStream) -> Iterator[None]:
        key = threading.get_ident(), stream.stream.device
        before = self._current.get(key)
        self._current[key] = stream
        try:
            yield
        finally:
            self._current.pop(key)
            if before:
                self._current[key] = before

    @property
    def selected(self) -> int:
        """The current device of this thread."""
        return self._local.__dict__.get("selected", 0)

    @contextlib.contextmanager
    def _select(self, index: int) -> Iterator[None]:
        assert 0 <= index < self.card.devices
        before, self._local.selected = self.selected, index
        try:
            yield
        finally:
            self._local.selected = before

    def copy(self, target: Any, source: Any, what: str) -> None:
        index = next(iter(key[1] for key in self._current if key[0] == threading.get_ident()))

        def do() -> bool:
            np.asarray(target)[...] = np.asarray(source)
            return True

        self._current_stream(index).stream.put(what, do)

    def from_numpy(self, array: np.ndarray) -> HostTensor:
        if array.dtype == np.longdouble:
            raise TypeError("can't convert np.ndarray of type numpy.longdouble")
        tensor = HostTensor(self, array, pinned=True)
        tensor.is_borrowed = True
        return tensor

    def empty(
        self,
        shape: tuple[int, ...] | int,
        *,
        dtype: Any,
        device: str = "cpu",
        pin_memory: bool = False,
    ) -> Any:
        if isinstance(shape, int):
            assert (device, pin_memory) == ("cpu", True)
            return HostTensor(self, self.card.pin(shape), pinned=True)
        index = int(device.partition(":")[2])
        stream = self._current_stream(index).stream
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        address = self.card.allocate(nbytes, index, stream.address)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        tensor = self._tensor(index, np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape))
        weakref.finalize(tensor, self._freed, address, tensor.readers)
        return tensor

    def _freed(self, address: int, readers: set[int]) -> None:
        if readers:
            self.card.free_after(address, readers)
        else:
            self.card.free(address)

    def _tensor(self, index: int, values: np.ndarray, owner: object = None) -> TorchTensor:
        tensor = TorchTensor(self.card, index, values, owner)
        tensor.torch = self
        return tensor

    def empty_like(self, tensor: TorchTensor, *, device: str, pin_memory: bool) -> HostTensor:
        assert (device, pin_memory) == ("cpu", True)
        return HostTensor(self, np.full(tensor.shape, JUNK, tensor.dtype), pinned=True)

    def from_dlpack(self, array: Any) -> TorchTensor:
        kind, index = array.__dlpack_device__()
        assert kind == 2
        address = self._current_stream(index).stream.address
        return self._tensor(index, *by_dlpack(array, index, address))


class CupyStream:
    def __init__(self, cupy: FakeCupy, stream: Stream) -> None:
        self._cupy, self.stream = cupy, stream
        self.ptr = 0 if stream.address == 1 else stream.address

    def __enter__(self) -> Self:
        self._cupy.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._cupy.current.pop() is self


class CupyDefaultStream(CupyStream):
    """A default stream, which belongs to the device that is current when it is used."""

    def __init__(self, cupy: FakeCupy, address: int) -> None:
        self._cupy, self.address = cupy, address
        self.ptr = address if address > 1 else 0

    @property
    def stream(self) -> Stream:  # type: ignore[override]  # of a device that is known later
        return self._cupy.card.stream(self._cupy.selected, self.address)


class CupyDeviceBlock:
    """CuPy's ``Device``. Entering it may do nothing, but leaving it always selects a device."""

    def __init__(self, cupy: FakeCupy, index: int) -> None:
        self._cupy, self._index = cupy, index
        self._before: list[int] = []

    def use(self) -> None:
        self._cupy.select(self._index)

    def __enter__(self) -> Self:
        self._before.append(self._cupy.selected)
        if self._index != self._cupy.selected:
            self.use()
        return self

    def __exit__(self, *_: object) -> None:
        self._cupy.select(self._before.pop())


def own_streams(cupy: FakeCupy, base: type[CupyStream]) -> Any:
    """Return a stand-in for CuPy's class of streams, which destroys a stream together with its object."""

    class Stream(base):  # type: ignore[misc, valid-type]
        def __init__(self, *, non_blocking: bool) -> None:
            assert non_blocking
            super().__init__(cupy, cupy.card.new_stream(cupy.selected))

        def __del__(self) -> None:
            self.stream.destroy()

    return Stream


class FakeCupy:
    """The parts of CuPy that transfers use."""

    def __init__(self, card: Card) -> None:
        self.card = card
        _CARDS.append(card)
        self.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        self.ndarray: Any = DeviceArray
        self._local = threading.local()
        self.started: set[int] = set()
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDeviceCount=self._count),
            Device=partial(CupyDeviceBlock, self),
            get_current_stream=lambda: self.current[-1] if self.current else self.cuda.Stream.null,
            alloc_pinned_memory=card.pin,
        )
        self.cuda.Stream = own_streams(self, CupyStream)
        self.cuda.Stream.null = CupyDefaultStream(self, 1)

    @property
    def current(self) -> list[CupyStream]:
        """Stack of streams that are current in this thread."""
        return self._local.__dict__.setdefault("current", [])

    @property
    def selected(self) -> int:
        """The current device of this thread."""
        return self._local.__dict__.get("selected", 0)

    def _count(self) -> int:
        if not self.card.devices:
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.card.devices

    def stream_at(self, address: int, index: int) -> CupyStream:
        """Return the stream with an address, for tests."""
        return CupyStream(self, self.card.stream(index, address))

    def select(self, index: int) -> None:
        """Make a device current as the CUDA runtime does; since CUDA 12, this initialises the device."""
        self._local.selected = index
        self.started.add(index)

    def from_dlpack(self, array: Any) -> DeviceArray:
        kind, index = array.__dlpack_device__()
        assert kind == 2
        address = self.cuda.get_current_stream().stream.address
        return DeviceArray(self.card, index, *by_dlpack(array, index, address))
