"""Track when a device array is ready, which streams read it, and when its memory can be reused."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._threads import when_dropped
from spdl_media.cuda_driver import HISTORY, Event, one_name, wait_for

# Seconds that process exit waits for pending copies. Limited, so that a hung device cannot block the exit.
_EXIT_LIMIT = 10.0

# Seconds without copies after which a waiting thread ends.
_IDLE = 10.0

CUDA_DEVICE = 2
"""DLPack's number of the device type CUDA."""


@dataclass(frozen=True, slots=True)
class Block:
    """An array on a device, and a function that records the streams that read it.

    Attributes:
        array: A PyTorch tensor, or a :class:`Guard`.
        used_on: Has to be called with the address of each stream that will read the array.
    """

    array: Any
    used_on: Callable[[int], object]

    def first(self, count: int) -> Block:
        """Return the same memory as an array of ``count`` rows. This block must not be used afterwards."""
        if not isinstance(self.array, Guard):
            return Block(self.array[:count], self.used_on)
        interface = self.array.__cuda_array_interface__
        interface["shape"] = (count, *interface["shape"][1:])
        return self


class Guard:
    """Device memory that is freed once no array uses it, after the work of all streams that read it.

    A pool may reuse a freed block at once for work on the stream that allocated it, because that work runs
    later in stream order. The pool does not know of other streams, so before the memory is freed, the
    allocating stream is made to wait for them. Arrays created through ``__cuda_array_interface__`` or DLPack
    keep this object alive.

    Args:
        index: Number of the device.
        stream: The stream on which the memory was allocated.
        address: Address of the first byte.
        shape: Shape of the array.
        dtype: Type of its elements.
        free: Called once to free the memory.
    """

    __slots__ = ("__cuda_array_interface__", "__weakref__", "_end", "_index", "_streams")

    def __init__(
        self,
        index: int,
        stream: int,
        address: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        free: Callable[[], object],
    ) -> None:
        self._index = index
        self._streams: dict[int, object] = {}
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(shape),
            "typestr": dtype.str,
            "data": (address, False),
            "strides": None,
            # None means that the consumer need not synchronize: its stream was made to wait before.
            "stream": None,
            "version": 3,
        }
        self._end = when_dropped(free_after, index, stream, self._streams, free)

    def used_on(self, stream: int) -> None:
        """Record that work on this stream reads the memory."""
        self._streams[one_name(stream)] = kept_stream(stream)

    def __dlpack__(self, *, stream: int | None = None) -> Any:  # the stream was made to wait before
        # NumPy makes the capsule, which keeps this object alive, but marks it as host memory. Device type and
        # number, which follow the first pointer of the struct, are overwritten.
        capsule = in_place(self).__dlpack__()
        place = (ctypes.c_int32 * 2).from_address(_tensor_of(capsule, b"dltensor") + 8)
        place[:] = [CUDA_DEVICE, self._index]
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICE, self._index


_tensor_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Memory:
    """Device memory with NumPy's array interface, for arithmetic on addresses and strides only."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = {**interface, "version": 3}
        self.owner = owner


def in_place(array: Any) -> npt.NDArray[Any]:
    """Return a NumPy array over device memory, for slicing and for its address. It must not be read.

    Raises:
        AttributeError: The array is not in device memory.
    """
    interface = array.__cuda_array_interface__
    names = ("shape", "typestr", "data", "strides")
    return array_at({name: interface.get(name) for name in names}, array)


def array_at(interface: dict[str, Any], owner: object) -> npt.NDArray[Any]:
    """Return such an array from an array interface dictionary; ``owner`` keeps the memory alive."""
    if 0 in interface["shape"]:
        return np.empty(interface["shape"], interface["typestr"])
    return np.asarray(_Memory(interface, owner))


def kept_stream(address: int) -> object:
    """Return CuPy's object of a stream if it is the current one: CuPy destroys a stream with its object."""
    cupy: Any = sys.modules.get("cupy")
    # CuPy raises various errors without a device, or while another thread is importing it.
    with suppress(Exception):
        stream = cupy.cuda.get_current_stream()
        return stream if stream.ptr == address else None
    return None


def free_after(
    index: int, stream: int, readers: dict[int, object], free: Callable[[], object]
) -> None:
    """Free memory after the stream that allocated it was made to wait for the streams that read it.

    Raises:
        TransferError: The driver is missing. The memory is freed nevertheless.
    """
    if HISTORY.lost:
        return  # forked child: the memory is the parent's, and the driver cannot be used here
    try:
        wait_for(index, stream, readers)
    finally:  # also if the device has failed, to not leak the memory
        free()


class Handover:
    """Tells when an array is ready, and records the streams that read it.

    Args:
        index: Number of the device.
        stream: The stream that fills the array.
        used_on: As for :class:`Block`.

    Attributes:
        event: Recorded after the work that fills the array.
        used_on: Keeps the memory for work on a stream, whose user waits for the array.

    Thread safety: safe.
    """

    __slots__ = ("_stream", "event", "used_on")

    def __init__(self, index: int, stream: int, used_on: Callable[[int], object]) -> None:
        self.event = Event(index, stream)
        self._stream = one_name(stream)
        self.used_on = used_on

    @property
    def stream(self) -> int | None:
        """The stream to wait for; ``None`` if the array is ready.

        Raises:
            TransferError: The work that fills the array failed.
        """
        return None if self.event.is_done() else self._stream

    def hand_to(self, stream: int) -> None:
        """Make later work on this stream wait for the array, and keep its memory for that work.

        Raises:
            TransferError: The stream no longer exists.
        """
        if one_name(stream) != self._stream:
            self.event.delay(stream)
            self.used_on(stream)


_Pending: TypeAlias = deque[tuple[Event, object] | None]


class Keeper:
    """Keeps host memory, and the lease of its pool, until the device has read it.

    A thread for each stream waits for the events. Checking only at the next copy would never release the
    last block, and a pool that waits for a free block would deadlock.

    Thread safety: safe.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._changed = threading.Condition()
        # Pending copies of each stream that has a thread. Events of one stream complete in order.
        self._pending: dict[Hashable, _Pending] = {}

    @property
    def num_kept(self) -> int:
        """Number of objects that are kept now."""
        return sum(map(len, list(self._pending.values())))

    def keep(self, stream: Hashable, event: Event, kept: object) -> None:
        """Keep an object until an event of the stream completes."""
        with self._changed:
            if (pending := self._pending.get(stream)) is None:
                # A daemon thread inside PyTorch's C++ code would abort the process at exit. This one waits in
                # ctypes, where it just ends.
                name, pending = f"spdl_media {stream}", deque()
                post = (self._changed, self._pending, stream, pending)
                threading.Thread(target=_release, args=post, name=name, daemon=True).start()
                self._pending[stream] = pending
            pending.append((event, kept))
            self._changed.notify_all()

    def drain(self, limit: float) -> bool:
        """Wait at most ``limit`` seconds until nothing is kept. Return whether that was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.num_kept, limit)


def _release(
    changed: threading.Condition,
    streams: dict[Hashable, _Pending],
    stream: Hashable,
    pending: _Pending,
) -> None:
    """Release the objects of one stream as their events complete, until no more come."""
    while True:
        with changed:
            if not changed.wait_for(lambda: pending, _IDLE):
                del streams[stream]
                return
        # A failed device no longer reads the memory, and its next user gets the error. The thread continues,
        # because the next objects must be released, too.
        with suppress(Exception):
            pending[0][0].synchronize()  # type: ignore[index]  # only this thread sets it to None
        pending[0] = None  # outside of the lock, and before it is no longer counted
        with changed:
            pending.popleft()
            changed.notify_all()


KEEPER = Keeper()
atexit.register(lambda: KEEPER.drain(_EXIT_LIMIT))

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    # The child process does not have these threads, so it drops the kept objects: leases return to pools.
    os.register_at_fork(after_in_child=KEEPER._start)
