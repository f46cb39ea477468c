"""CUDA devices: which library gives their memory, PyTorch or CuPy.

Streams, events and copies are the driver's (:mod:`spdl_media.cuda_driver`). Nothing is imported before it is
used.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import byref, c_size_t
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._optional import is_available, require
from spdl_media.config import Allocator, CUDAConfig
from spdl_media.cuda_driver import (
    HISTORY,
    LEGACY_DEFAULT,
    PER_THREAD_DEFAULT,
    REMEDY,
    Event,
    call,
    current,
    device_of_stream,
    driver_version,
    new_stream,
    one_name,
)
from spdl_media.errors import TransferError
from spdl_media.handover import Block, Guard

HostArray: TypeAlias = npt.NDArray[Any]

NEITHER = "neither torch nor cupy is installed"
WITHOUT_CUDA = "is built without CUDA"


def cuda_library() -> tuple[str | None, str]:
    """The package that finds a CUDA device here, PyTorch before CuPy; or ``None`` and the reason."""
    if HISTORY.lost:
        return None, f"this process was forked from one that had used CUDA. {REMEDY}"
    reasons = []
    for package, count in (("torch", _torch_count), ("cupy", _cupy_count)):
        if not is_available(package):
            continue
        number, reason = count()
        if number:
            HISTORY.used = True
            return package, ""
        reasons.append(reason)
    return None, " and ".join(reasons) or NEITHER


def _torch_count() -> tuple[int, str]:
    torch: Any = require("torch", "using a CUDA device")
    if torch.cuda.is_available():
        return int(torch.cuda.device_count()), ""
    if not torch.backends.cuda.is_built():
        return 0, f"torch {torch.__version__} {WITHOUT_CUDA}"
    return 0, f"torch finds no CUDA device{_versions(f'torch is for CUDA {torch.version.cuda}')}"


def _cupy_count() -> tuple[int, str]:
    try:
        cupy: Any = require("cupy", "using a CUDA device")
        return int(cupy.cuda.runtime.getDeviceCount()), "cupy finds no CUDA device"
    except Exception as error:  # noqa: BLE001  # cupy's error types come from the module that failed
        return (
            0,
            f"cupy finds no CUDA device ({error}){_versions('cupy is for the CUDA of its wheel')}",
        )


def _versions(wheel: str) -> str:
    """What the wheel and the driver are for, as one may be too old for the other."""
    serves = driver_version()
    return f" ({wheel}, and the driver serves CUDA {serves})" if serves else ""


def open_device(config: CUDAConfig, purpose: str) -> Device:
    """A stream of a device: the config's, or one of the calling thread's own.

    Raises:
        TransferError: No device can be used here; the message says why. Or the stream is of another device.
        ValueError: There are devices, but not this one.
    """
    HISTORY.check(purpose)
    package, reason = cuda_library()
    if package is None:
        raise TransferError(
            f"{purpose} needs a CUDA device, and there is none: {reason}. {_hint(reason)}"
        )
    count = (_torch_count if package == "torch" else _cupy_count)()[0]
    if config.device_index >= count:
        raise no_such_device(config.device_index, count)
    check_stream(config)
    return Device(require(package, purpose), config.device_index, config.stream)


def no_such_device(index: int, count: int) -> ValueError:
    """The error for a number that no device has."""
    there = "is one" if count == 1 else f"are {count}"
    return ValueError(
        f"CUDA device {index} was asked for, and there {there}, counted from 0. CUDA_VISIBLE_DEVICES hides "
        "devices"
    )


def _hint(reason: str) -> str:
    if reason == NEITHER:
        return (
            "pip install torch brings one, and so does pip install cupy-cuda12x (or cupy-cuda13x, as the "
            "driver is)"
        )
    if reason.endswith(WITHOUT_CUDA):
        return (
            "Install one that has it (https://pytorch.org/get-started/locally), or beside it CuPy: pip "
            "install cupy-cuda12x (or cupy-cuda13x, as the driver is)"
        )
    return "nvidia-smi shows whether the driver sees one, and CUDA_VISIBLE_DEVICES whether this process may"


def check_stream(config: CUDAConfig) -> None:
    """Refuse a stream of another device, on which copies would fail or go astray.

    Raises:
        TransferError: It is of another device.
    """
    found = None if config.stream is None else device_of_stream(config.stream)
    if found not in (None, config.device_index):
        raise TransferError(
            f"the stream {config.stream:#x} belongs to CUDA device {found}, and device {config.device_index} "
            "was asked for. Make the stream on the device: torch.cuda.Stream(device="
            f"{config.device_index})"
        )


class _Streams(threading.local):
    """Streams of each device that belong to a thread for as long as it lives.

    None is ever destroyed: buffers know streams by their address, and may outlive the thread that made them.
    When a thread ends, its streams go to the next one that needs some.
    """

    idle: dict[int, deque[int]] = {}  # noqa: RUF012  # of all threads

    def __init__(self) -> None:
        self._lent: dict[int, _Lent] = {}

    def of(self, index: int) -> int:
        """The calling thread's stream of a device."""
        if index not in self._lent:
            idle = self.idle.setdefault(index, deque())
            try:
                stream = idle.pop()
            except IndexError:  # no look beforehand would hold among threads
                stream = new_stream(index)
            self._lent[index] = _Lent(stream, idle)
        return self._lent[index].stream


@dataclass(slots=True)
class _Lent:
    """A stream that goes back when the thread, which alone holds this, has ended."""

    stream: int
    idle: deque[int]

    def __del__(self) -> None:
        self.idle.append(self.stream)


_STREAMS = _Streams()


class _Torch:
    """What is asked of PyTorch."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def stream(self, index: int, address: int) -> Any:
        # ExternalStream(0) is not the default stream, but one out of PyTorch's pool.
        if one_name(address) == LEGACY_DEFAULT:
            return self.module.cuda.default_stream(index)
        return self.module.cuda.ExternalStream(address, device=index)

    def active(self, index: int, stream: int) -> AbstractContextManager[object]:
        block: AbstractContextManager[object] = self.module.cuda.stream(self.stream(index, stream))
        return block

    def empty(self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        try:
            kind = self.module.from_numpy(np.empty(0, dtype)).dtype
        except TypeError as error:
            raise TransferError(
                f"PyTorch has no tensors of {dtype}, so such an array cannot be copied to CUDA device "
                f"{device.index}: {error}"
            ) from error
        tensor = self.module.empty(shape, dtype=kind, device=f"cuda:{device.index}")
        # PyTorch's own pool can be told.
        return Block(tensor, lambda reader: tensor.record_stream(self.stream(device.index, reader)))

    def over(self, guard: Guard, index: int) -> Any:
        return self.module.as_tensor(guard, device=f"cuda:{index}")

    def address(self, array: Any) -> int:
        return int(array.data_ptr())


class _Cupy:
    """What is asked of CuPy."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @contextmanager
    def active(self, index: int, stream: int) -> Iterator[None]:
        with self.module.cuda.Device(index), self._stream_at(index, stream):
            yield

    def _stream_at(self, index: int, address: int) -> Any:
        cuda = self.module.cuda
        if one_name(address) == LEGACY_DEFAULT:
            return cuda.Stream.null
        if address == PER_THREAD_DEFAULT:
            return cuda.Stream.ptds
        if not hasattr(cuda.Stream, "from_external"):  # CuPy 13; later ones warn of ExternalStream
            return cuda.ExternalStream(address, index)
        # It is of the device that is the current one, which active() has set.
        return _foreign_streams(cuda.Stream).from_external(_Address(address))

    def empty(self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        kept = [self.module.empty(shape, dtype)]
        # CuPy's pool cannot be told of other streams.
        guard = Guard(device.index, device.stream, self.address(kept[0]), shape, dtype, kept.clear)
        return Block(self.module.asarray(guard), guard.used_on)

    def over(self, guard: Guard, _index: int) -> Any:
        return self.module.asarray(guard)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)


class _Address:
    """The address of a stream in the form that CuPy takes streams of others in."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@lru_cache(maxsize=4)
def _foreign_streams(streams: Any) -> Any:
    """CuPy's class of streams, but for those that are another's to destroy: CuPy 14.0 would."""
    return type("ForeignStream", (streams,), {"__del__": lambda _: None})


class Device:
    """One stream of one device, and the library that gives memory there.

    Args:
        library: The module ``torch`` or ``cupy``.
        index: Number of the device.
        stream: Address of a ``cudaStream_t``; ``None``: the calling thread's own.

    Thread safety: safe.
    """

    __slots__ = ("_arrays", "index", "stream")

    def __init__(self, library: Any, index: int, stream: int | None = None) -> None:
        is_torch = hasattr(library, "from_numpy")
        self._arrays: _Torch | _Cupy = _Torch(library) if is_torch else _Cupy(library)
        self.index = index
        self.stream = _STREAMS.of(index) if stream is None else stream

    @property
    def library(self) -> Any:
        """The module ``torch`` or ``cupy``."""
        return self._arrays.module

    def active(self) -> AbstractContextManager[object]:
        """A block in which device and stream are the ones that the library uses in this thread."""
        return self._arrays.active(self.index, self.stream)

    def empty(
        self, shape: Sequence[int], dtype: npt.DTypeLike, allocator: Allocator | None = None
    ) -> Block:
        """Memory for a C-contiguous array, to be written on the stream: the library's, or the allocator's.

        Raises:
            TransferError: There is not enough.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        with out_of_memory_said(self, nbytes), self.active():
            if allocator is None or not nbytes:
                return self._arrays.empty(self, tuple(shape), dtype)
            address = allocator[0](nbytes, self.index, self.stream)
            if not address:
                raise TransferError(
                    f"the allocator gave no memory for {nbytes} bytes on CUDA device {self.index}: it "
                    f"returned {address!r}, not an address"
                )
            free = partial(allocator[1], address)
            guard = Guard(self.index, self.stream, int(address), shape, dtype, free)
            return Block(self._arrays.over(guard, self.index), guard.used_on)

    def from_dlpack(self, array: Any) -> Any:
        """Another library's array as the library's own, in place; the stream waits for what fills it."""
        with self.active():
            return self.library.from_dlpack(array)

    def copy_in(self, target: Any, source: HostArray, offset: int = 0) -> None:
        """Begin to copy an array to the device, ``offset`` bytes behind the start of one of the library's.

        The source is to be kept until then.
        """
        if source.nbytes:
            address = self._arrays.address(target) + offset
            with current(self.index):
                call(
                    "cuMemcpyHtoDAsync_v2", address, source.ctypes.data, source.nbytes, self.stream
                )

    def copy_out(self, target: HostArray, address: int) -> None:
        """Begin to copy memory of the device to an array."""
        if target.nbytes:
            with current(self.index):
                call(
                    "cuMemcpyDtoHAsync_v2", target.ctypes.data, address, target.nbytes, self.stream
                )

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Begin to copy memory of the device to other memory of it."""
        with current(self.index):
            call("cuMemcpyDtoDAsync_v2", target, source, nbytes, self.stream)

    def zero(self, address: int, nbytes: int) -> None:
        """Begin to set memory of the device to zeros."""
        with current(self.index):
            call("cuMemsetD8Async", address, 0, nbytes, self.stream)

    def record(self) -> Event:
        """An event behind all that was put on the stream."""
        return Event(self.index, self.stream)

    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all of them."""
        free, total = c_size_t(), c_size_t()
        with current(self.index):
            call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value


@contextmanager
def out_of_memory_said(device: Device, nbytes: int) -> Iterator[None]:
    """Say in figures that a device has no memory left, whichever library found out.

    Raises:
        TransferError: The memory is full.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free, total = device.memory_info()
        raise TransferError(
            f"{nbytes} bytes do not fit into the memory of CUDA device {device.index}, which has "
            f"{total} bytes and {free} of them free (pools of other libraries may hold more). Use smaller "
            "batches, or drop buffers earlier"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of PyTorch, CuPy, DALI or the driver says that memory is short."""
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    return "out of memory" in str(error).lower()
