"""What transfers need of a device, and what is the same for PyTorch and CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._devices.forks import HISTORY
from spdl_media._devices.memory import Block, Event
from spdl_media.config import Allocator
from spdl_media.errors import TransferError

HostArray: TypeAlias = npt.NDArray[Any]

LEGACY_DEFAULT, PER_THREAD_DEFAULT = 1, 2
"""CUDA's addresses of the default streams. The first is 0, too."""


def one_name(stream: int) -> int:
    """The address of a stream, of which the default one has two."""
    return stream or LEGACY_DEFAULT


class Device(Protocol):
    """One stream of one device.

    Attributes:
        index: Number of the device.
        stream: Address of the ``cudaStream_t``.
    """

    @property
    def index(self) -> int: ...
    @property
    def stream(self) -> int: ...

    def on(self, stream: int) -> Device:
        """Another stream of the same device."""

    def empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], allocator: Allocator | None = None
    ) -> Block:
        """Memory for a C-contiguous array, to be written on the stream.

        Raises:
            TransferError: There is not enough.
        """

    def view(self, array: Any) -> Any:
        """Another library's array on this device, without a copy. The stream waits for what fills it."""

    def copy_in(self, target: Any, source: HostArray) -> None:
        """Begin to copy an array to the device. It is to be kept until then."""

    def copy_out(self, target: HostArray, source: Any) -> None:
        """Begin to copy an array to host memory."""

    def record(self) -> Event:
        """An event behind all that was put on the stream. To wait for it on the host takes no CPU time."""

    def is_done(self, event: Event) -> bool:
        """Whether the event has been reached."""

    def wait(self, event: Event) -> None:
        """Wait on the host for the event, in any thread."""

    def wait_and_stay(self, event: Event) -> None:
        """The same, in a thread that works for no other device from now on."""

    def make_wait(self, stream: int, event: Event) -> None:
        """Let later work on another stream of the device wait for the event; the host does not wait."""

    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all of them."""


def no_such_device(index: int, count: int) -> ValueError:
    """The error for a number that no device has."""
    there = "is one" if count == 1 else f"are {count}"
    return ValueError(
        f"CUDA device {index} was asked for, and there {there}, counted from 0. CUDA_VISIBLE_DEVICES hides "
        "devices"
    )


@contextmanager
def out_of_memory_said(device: Device, nbytes: int) -> Iterator[None]:
    """Say in figures that a device has no memory left, whichever library found out."""
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
    """Whether an error of PyTorch or CuPy says that memory is short."""
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    return "out of memory" in str(error).lower()


def own_address(allocator: Allocator, nbytes: int, device: Device) -> int:
    """Memory of the caller's allocator.

    Raises:
        TransferError: It gave none.
    """
    address = allocator[0](nbytes, device.index, device.stream)
    if nbytes and not address:
        raise TransferError(
            f"the allocator gave no memory for {nbytes} bytes on CUDA device {device.index}: it returned "
            f"{address!r}, not an address"
        )
    return int(address or 0)


def freed_after(device: Device, free: Callable[[], object]) -> Callable[[set[int]], None]:
    """What gives memory back: the stream that it was made on first waits for those that read it.

    Args:
        device: The stream that it was made on.
        free: Gives it back.
    """

    def release(streams: set[int]) -> None:
        if HISTORY.lost:
            return  # the parent's memory, and this process has no driver to ask
        own = one_name(device.stream)
        try:
            for stream in set(map(one_name, streams)) - {own}:
                device.make_wait(own, device.on(stream).record())
        finally:  # a stream that is gone, or a device that has failed, is no reason to keep memory for ever
            free()

    return release
