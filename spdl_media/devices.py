"""CUDA devices: a stream for each thread, and memory from PyTorch or the driver.

PyTorch and CuPy are imported at first use.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._optional import INSTALL, is_available, require
from spdl_media.config import Allocator, CUDAConfig
from spdl_media.cuda_driver import (
    HISTORY,
    LEGACY_DEFAULT,
    REMEDY,
    Event,
    allocate,
    call,
    current,
    device_of_stream,
    driver_version,
    free,
    new_stream,
    one_name,
)
from spdl_media.errors import TransferError
from spdl_media.handover import Block, Guard

HostArray: TypeAlias = npt.NDArray[Any]

NEITHER = "neither torch nor cupy is installed"
WITHOUT_CUDA = "is built without CUDA"
SEES_NO_DEVICE = (
    "nvidia-smi tells whether the driver sees one, CUDA_VISIBLE_DEVICES whether this process may"
)


def cuda_library() -> tuple[str | None, str]:
    """Return the package that finds a CUDA device, PyTorch before CuPy; or ``None`` and the reason.

    Raises:
        MissingDependencyError: PyTorch is installed, but its import fails.
    """
    if HISTORY.lost:
        return None, f"this process was forked from one that had used CUDA. {REMEDY}"
    reasons = []
    # PyTorch first: if both are installed, most arrays and most of the memory are PyTorch's.
    for package, count in (("torch", _torch_count), ("cupy", _cupy_count)):
        if not is_available(package):
            continue
        number, reason = count()
        if number:
            # Counting devices has initialized the driver, which a forked child cannot use.
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
    # Without CUDA's libraries, CuPy already fails at its import.
    except Exception as error:  # noqa: BLE001  # CuPy's error classes come from the module that fails
        wheel = _versions("cupy is for the CUDA of its wheel")
        return 0, f"cupy finds no CUDA device ({error}){wheel}"


def _versions(wheel: str) -> str:
    """Format the CUDA versions of wheel and driver for a message, because one may be too old."""
    serves = driver_version()
    return f" ({wheel}, and the driver serves CUDA {serves})" if serves else ""


def open_device(config: CUDAConfig, purpose: str) -> Device:
    """Return the device of a config, with its stream or that of the calling thread.

    Raises:
        TransferError: No device is usable (the message says why), or the stream is one of another device.
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
    torch = require("torch", purpose) if package == "torch" else None
    return Device(torch, config.device_index, config.stream)


def no_such_device(index: int, count: int) -> ValueError:
    """Return the error for an index that no device has."""
    there = "is one" if count == 1 else f"are {count}"
    return ValueError(
        f"CUDA device {index} was asked for, and there {there}, counted from 0. CUDA_VISIBLE_DEVICES hides "
        "devices"
    )


def _hint(reason: str) -> str:
    cupy = INSTALL["cupy"][1]
    if reason == NEITHER:
        return f"pip install torch brings one, and so does {cupy}"
    if reason.endswith(WITHOUT_CUDA):
        return f"Install one that has it (https://pytorch.org/get-started/locally), or CuPy: {cupy}"
    return SEES_NO_DEVICE


def check_stream(config: CUDAConfig) -> None:
    """Raise for a stream of another device, on which copies would fail or go to the wrong device.

    Raises:
        TransferError: The stream is one of another device.
    """
    found = None if config.stream is None else device_of_stream(config.stream)
    if found not in (None, config.device_index):
        raise TransferError(
            f"the stream {config.stream:#x} belongs to CUDA device {found}, and device {config.device_index} "
            "was asked for. Make the stream on the device: torch.cuda.Stream(device="
            f"{config.device_index})"
        )


class _Streams(dict[int, int]):
    """Streams of one thread by the index of the device.

    Streams are never destroyed, because buffers refer to them by address and may outlive the thread. When a
    thread ends, its streams are reused by other threads, together with the memory that pools keep for them.
    """

    idle: dict[int, deque[int]] = {}  # noqa: RUF012  # shared by all threads

    def __missing__(self, index: int) -> int:
        try:
            stream = self.idle.setdefault(index, deque()).pop()
        except IndexError:  # a test beforehand would be a race between threads
            stream = new_stream(index)
        self[index] = stream
        return stream

    def __del__(self) -> None:  # when the thread ends, which holds the only reference
        for index, stream in self.items():
            self.idle[index].append(stream)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.streams = _Streams()


_THREAD = _Thread()


class Device:
    """A stream of a device, with allocation and copies on it.

    Args:
        torch: The module ``torch``, if it finds the device; ``None``: memory is allocated by the driver.
        index: Index of the device.
        stream: Address of a ``cudaStream_t``; ``None``: the stream of the calling thread.

    Thread safety: safe.
    """

    def __init__(self, torch: Any, index: int, stream: int | None = None) -> None:
        self.torch, self.index = torch, index
        self.stream = _THREAD.streams[index] if stream is None else stream

    def torch_stream(self, address: int) -> Any:
        """Return PyTorch's object for a stream."""
        # ExternalStream(0) would not be the default stream, but one of PyTorch's pool.
        if one_name(address) == LEGACY_DEFAULT:
            return self.torch.cuda.default_stream(self.index)
        return self.torch.cuda.ExternalStream(address, device=self.index)

    def empty(
        self, shape: Sequence[int], dtype: npt.DTypeLike, allocator: Allocator | None = None
    ) -> Block:
        """Allocate memory for a C-contiguous array that is written on the stream.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.
            allocator: The allocator; ``None``: PyTorch's memory pool, or without PyTorch that of the driver.

        Raises:
            TransferError: The device is out of memory, or PyTorch does not have the dtype.
        """
        dtype = np.dtype(dtype)
        # Not numpy.prod, which overflows.
        nbytes = math.prod(shape) * dtype.itemsize
        with MemoryErrors(self, nbytes):
            if allocator is None and self.torch is not None:
                return self._tensor(tuple(shape), dtype)
            # The driver refuses allocations of 0 bytes.
            address, free = self._memory(nbytes, allocator) if nbytes else (0, int)
            guard = Guard(self.index, self.stream, address, shape, dtype, free)
            return Block(guard, guard.used_on)

    def _tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        try:
            # PyTorch has no public table of NumPy's dtypes.
            kind = self.torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError as error:
            raise TransferError(
                f"PyTorch has no tensors of {dtype}, so such an array cannot be copied to CUDA device "
                f"{self.index}: {error}"
            ) from error
        with self.torch.cuda.stream(self.torch_stream(self.stream)):
            tensor = self.torch.empty(shape, dtype=kind, device=f"cuda:{self.index}")
        # record_stream tells PyTorch's pool about readers. Consumers of the tensor can call it, too.
        return Block(tensor, lambda reader: tensor.record_stream(self.torch_stream(reader)))

    def _memory(self, nbytes: int, allocator: Allocator | None) -> tuple[int, Callable[[], object]]:
        """Allocate memory, and return its address and a function that frees it."""
        if allocator is None:
            allocator = allocate, partial(free, index=self.index, stream=self.stream)
        given = allocator[0](nbytes, self.index, self.stream)
        if not given:
            raise TransferError(
                f"the allocator gave no memory for {nbytes} bytes on CUDA device {self.index}: it returned "
                f"{given!r}, not an address"
            )
        # free() gets the object that allocate() returned, which may be more than an int.
        return int(given), partial(allocator[1], given)

    def copy(
        self, way: Literal["HtoD", "DtoH", "DtoD"], target: HostArray, source: HostArray
    ) -> None:
        """Queue the copy of an array to, from or on the device. Keep both arrays until it is done.

        Args:
            way: Direction in the driver's terms; ``"HtoD"`` is host to device.
            target: A contiguous array of the source's size; on the device, one of ``handover.in_place``.
            source: A contiguous array; on the device, one of ``handover.in_place``.

        Raises:
            TransferError: The driver refuses the copy.
        """
        if target.nbytes:  # an array without elements has no address
            places = target.ctypes.data, source.ctypes.data, target.nbytes
            with current(self.index):
                call(f"cuMemcpy{way}Async_v2", *places, self.stream)

    def record(self) -> Event:
        """Record an event after all work queued on the stream so far.

        Raises:
            TransferError: The stream or the device is invalid.
        """
        return Event(self.index, self.stream)


class MemoryErrors:
    """Turn out-of-memory errors of any library in a ``with`` block into TransferErrors with figures.

    Raises:
        TransferError: The device is out of memory.
    """

    # Not a generator: on CPython 3.12 and 3.13, its frame and the error form a cycle, which keeps the source.

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, RuntimeError | MemoryError) or not is_out_of_memory(error):
            return
        free, total = c_size_t(), c_size_t()
        with current(self._device.index):
            call("cuMemGetInfo_v2", byref(free), byref(total))
        raise TransferError(
            f"{self._nbytes} bytes do not fit into the memory of CUDA device {self._device.index}, which has "
            f"{total.value} bytes and {free.value} of them free (pools of other libraries may hold more). "
            "Use smaller batches, or drop buffers earlier"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of PyTorch, CuPy, DALI or the driver means that memory is exhausted."""
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    return "out of memory" in str(error).lower()
