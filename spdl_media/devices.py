"""CUDA devices: streams of a thread's own, and memory, which is PyTorch's or the driver's.

Nothing is imported before it is used.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_size_t
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._optional import is_available, require
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


def cuda_library() -> tuple[str | None, str]:
    """The package that finds a CUDA device here, PyTorch before CuPy; or ``None`` and the reason."""
    if HISTORY.lost:
        return None, f"this process was forked from one that had used CUDA. {REMEDY}"
    reasons = []
    # PyTorch first: where both are, arrays are mostly its own, and so is most of the memory.
    for package, count in (("torch", _torch_count), ("cupy", _cupy_count)):
        if not is_available(package):
            continue
        number, reason = count()
        if number:
            # To count devices has started the driver, which a child that is forked now does not get.
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
    # CuPy fails already at its import where the libraries of CUDA are missing.
    except Exception as error:  # noqa: BLE001  # cupy's error types come from the module that failed
        wheel = _versions("cupy is for the CUDA of its wheel")
        return 0, f"cupy finds no CUDA device ({error}){wheel}"


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
    torch = require("torch", purpose) if package == "torch" else None
    return Device(torch, config.device_index, config.stream)


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


class _Streams(dict[int, int]):
    """A thread's own streams by the number of their device.

    None is ever destroyed: buffers know streams by their address, and may outlive the thread that made them.
    When a thread ends, its streams go to the next one that needs some, and with them what pools hold for
    each.
    """

    idle: dict[int, deque[int]] = {}  # noqa: RUF012  # of all threads

    def __missing__(self, index: int) -> int:
        try:
            stream = self.idle.setdefault(index, deque()).pop()
        except IndexError:  # no look beforehand would hold among threads
            stream = new_stream(index)
        self[index] = stream
        return stream

    def __del__(self) -> None:  # the thread alone holds this
        for index, stream in self.items():
            self.idle[index].append(stream)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.streams = _Streams()


_THREAD = _Thread()


class Device:
    """One stream of one device, and who gives memory there.

    Args:
        torch: PyTorch, if it finds the device; ``None``: the driver gives memory.
        index: Number of the device.
        stream: Address of a ``cudaStream_t``; ``None``: the calling thread's own.

    Thread safety: safe.
    """

    def __init__(self, torch: Any, index: int, stream: int | None = None) -> None:
        self.torch, self.index = torch, index
        self.stream = _THREAD.streams[index] if stream is None else stream

    def torch_stream(self, address: int) -> Any:
        """PyTorch's object of a stream."""
        # ExternalStream(0) is not the default stream, but one out of PyTorch's pool.
        if one_name(address) == LEGACY_DEFAULT:
            return self.torch.cuda.default_stream(self.index)
        return self.torch.cuda.ExternalStream(address, device=self.index)

    def empty(
        self, shape: Sequence[int], dtype: npt.DTypeLike, allocator: Allocator | None = None
    ) -> Block:
        """Memory for a C-contiguous array, to be written on the stream.

        Args:
            shape: Of the array.
            dtype: Of the same.
            allocator: Who gives the memory; ``None``: PyTorch's pool where it is there, else the driver's.

        Raises:
            TransferError: There is not enough, or PyTorch has no such type.
        """
        dtype = np.dtype(dtype)
        # Not of NumPy's product, which wraps around.
        nbytes = math.prod(shape) * dtype.itemsize
        with out_of_memory_said(self, nbytes):
            if allocator is None and self.torch is not None:
                return self._tensor(tuple(shape), dtype)
            # The driver refuses to give no bytes.
            address, free = self._memory(nbytes, allocator) if nbytes else (0, int)
            guard = Guard(self.index, self.stream, address, shape, dtype, free)
            return Block(guard, guard.used_on)

    def _tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        try:
            # PyTorch has no table of NumPy's types that is public.
            kind = self.torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError as error:
            raise TransferError(
                f"PyTorch has no tensors of {dtype}, so such an array cannot be copied to CUDA device "
                f"{self.index}: {error}"
            ) from error
        with self.torch.cuda.stream(self.torch_stream(self.stream)):
            tensor = self.torch.empty(shape, dtype=kind, device=f"cuda:{self.index}")
        # PyTorch's own pool can be told of readers, and so it can by whoever takes the tensor.
        return Block(tensor, lambda reader: tensor.record_stream(self.torch_stream(reader)))

    def _memory(self, nbytes: int, allocator: Allocator | None) -> tuple[int, Callable[[], object]]:
        """An address, and what gives it back."""
        if allocator is None:
            allocator = allocate, partial(free, index=self.index, stream=self.stream)
        given = allocator[0](nbytes, self.index, self.stream)
        if not given:
            raise TransferError(
                f"the allocator gave no memory for {nbytes} bytes on CUDA device {self.index}: it returned "
                f"{given!r}, not an address"
            )
        # It gets back what it gave, which may be more than a number to it.
        return int(given), partial(allocator[1], given)

    def copy(
        self, way: Literal["HtoD", "DtoH", "DtoD"], target: HostArray, source: HostArray
    ) -> None:
        """Begin to copy an array from or to the device, or on it. Both are to be kept until it is done.

        Args:
            way: As the driver calls it, ``"HtoD"`` for host to device.
            target: As large as the source; on the device as :func:`in_place` has it, as is the next.
            source: Contiguous.

        Raises:
            TransferError: The driver refuses the copy.
        """
        if target.nbytes:  # an array without elements has no address
            places = target.ctypes.data, source.ctypes.data, target.nbytes
            with current(self.index):
                call(f"cuMemcpy{way}Async_v2", *places, self.stream)

    def record(self) -> Event:
        """An event behind all that was put on the stream.

        Raises:
            TransferError: The stream is gone, or the device.
        """
        return Event(self.index, self.stream)


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
        free, total = c_size_t(), c_size_t()
        with current(device.index):
            call("cuMemGetInfo_v2", byref(free), byref(total))
        raise TransferError(
            f"{nbytes} bytes do not fit into the memory of CUDA device {device.index}, which has "
            f"{total.value} bytes and {free.value} of them free (pools of other libraries may hold more). "
            "Use smaller batches, or drop buffers earlier"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of PyTorch, CuPy, DALI or the driver says that memory is short."""
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    return "out of memory" in str(error).lower()
