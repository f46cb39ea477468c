"""When an array on a device is ready, who reads it, and when its memory may go back."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media.cuda_driver import HISTORY, Event, one_name, wait_for

# Seconds that the end of the process waits for copies under way; a device that hangs must not keep it.
_EXIT_LIMIT = 10.0

# Seconds after which a thread that waits for copies ends, if there are none.
_IDLE = 10.0

CUDA_DEVICE = 2
"""DLPack's number."""


@dataclass(frozen=True, slots=True)
class Block:
    """An array on a device, and how it learns of the streams that read it.

    Attributes:
        array: A tensor of PyTorch's, or a :class:`Guard`.
        used_on: To be called with the address of each stream that is going to read it.
    """

    array: Any
    used_on: Callable[[int], object]

    def first(self, count: int) -> Block:
        """The same memory as an array of so many rows, in place of this one."""
        if not isinstance(self.array, Guard):
            return Block(self.array[:count], self.used_on)
        interface = self.array.__cuda_array_interface__
        interface["shape"] = (count, *interface["shape"][1:])
        return self


class Guard:
    """Memory with an address, given back once nothing is over it, behind the work of all who read it.

    Pools give a freed block to whoever asks for memory on the stream that it was made on, at once: work on
    that stream comes later. Work on other streams is not known to them, so that stream waits for theirs.
    Arrays are made over it through ``__cuda_array_interface__`` and DLPack, and keep it.

    Args:
        index: Number of the device.
        stream: The stream that the memory was made on.
        address: Of its first byte.
        shape: Of the array that it is.
        dtype: Of the same.
        free: Called once, after which the memory may be used again.
    """

    __slots__ = ("__cuda_array_interface__", "__weakref__", "_index", "_streams")

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
            # Whoever reads it has been made to wait already, so nobody is to wait on the host.
            "stream": None,
            "version": 3,
        }
        # At exit nobody waits for the memory, and the driver may be gone.
        weakref.finalize(self, free_after, index, stream, self._streams, free).atexit = False

    def used_on(self, stream: int) -> None:
        """Say that work on this stream reads the memory."""
        self._streams[one_name(stream)] = kept_stream(stream)

    def __dlpack__(self, *, stream: int | None = None) -> Any:  # who was made to wait
        # NumPy makes the capsule, which keeps this object. That the memory is not the host's is written into
        # it: type and number of the device stand behind the first pointer.
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
    """Memory of a device in the form in which NumPy takes memory, for its address and strides alone."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = {**interface, "version": 3}
        self.owner = owner


def in_place(array: Any) -> npt.NDArray[Any]:
    """An array of a device as one of NumPy's, to be sliced and asked for its address, never to be read."""
    interface = array.__cuda_array_interface__
    names = ("shape", "typestr", "data", "strides")
    return array_at({name: interface.get(name) for name in names}, array)


def array_at(interface: dict[str, Any], owner: object) -> npt.NDArray[Any]:
    """Such an array by what NumPy calls an interface, over memory that the owner keeps."""
    if 0 in interface["shape"]:
        return np.empty(interface["shape"], interface["typestr"])
    return np.asarray(_Memory(interface, owner))


def kept_stream(address: int) -> object:
    """CuPy's object of a stream, if it is the current one: CuPy destroys a stream with its object."""
    cupy: Any = sys.modules.get("cupy")
    # Whatever CuPy, which may still be on its way in, raises without a device.
    with suppress(Exception):
        stream = cupy.cuda.get_current_stream()
        return stream if stream.ptr == address else None
    return None


def free_after(
    index: int, stream: int, readers: dict[int, object], free: Callable[[], object]
) -> None:
    """Give memory back: the stream that it was made on first waits for those that read it."""
    if HISTORY.lost:
        return  # the parent's memory, and this process has no driver to ask
    try:
        wait_for(index, stream, readers)
    finally:  # a device that has failed is no reason to keep memory for ever
        free()


class Handover:
    """When an array is ready, and who reads it.

    Args:
        index: Number of the device.
        stream: The stream that fills it.
        used_on: To be told of each stream that is going to read it.

    Attributes:
        event: Behind the work that fills it.

    Thread safety: safe.
    """

    __slots__ = ("_stream", "_used_on", "event")

    def __init__(self, index: int, stream: int, used_on: Callable[[int], object]) -> None:
        self.event = Event(index, stream)
        self._stream = one_name(stream)
        self._used_on = used_on

    @property
    def stream(self) -> int | None:
        """The stream to wait for; ``None``: the array is ready.

        Raises:
            TransferError: The work that fills it failed.
        """
        return None if self.event.is_done() else self._stream

    def synchronize(self) -> None:
        """Wait on the host until it is.

        Raises:
            TransferError: The work that fills it failed.
        """
        self.event.synchronize()

    def hand_to(self, stream: int) -> None:
        """Let later work on this stream find the array ready, and keep its memory for that work.

        Raises:
            TransferError: The stream is gone.
        """
        if one_name(stream) != self._stream:
            self.event.delay(stream)
            self._used_on(stream)

    def keep_for(self, stream: int) -> None:
        """Keep the memory for work on this stream, which waits by itself."""
        self._used_on(stream)


class _Line:
    """What waits for one stream, and how much of it there is."""

    __slots__ = ("num_kept", "queue", "thread")

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Event, object]] = SimpleQueue()
        self.num_kept = 0
        self.thread: threading.Thread | None = None


class Keeper:
    """Keeps host memory, and with it the lease of its pool, until a device has read it.

    A thread for each stream waits for the events, and idles between them. Polling at the next copy would
    leave the last block of a pool taken for ever, and a pool that waits for a block would wait for ever
    too.

    Thread safety: safe.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[Hashable, _Line] = {}

    @property
    def num_kept(self) -> int:
        """Objects that are kept at this moment."""
        return sum(line.num_kept for line in list(self._lines.values()))

    def keep(self, stream: Hashable, event: Event, kept: object) -> None:
        """Keep an object until an event is reached. Events of one stream are reached in their order."""
        with self._changed:
            line = self._lines.setdefault(stream, _Line())
            line.num_kept += 1
            line.queue.put((event, kept))
            if line.thread is None:
                # A daemon that is inside of PyTorch's C++ when the process ends aborts it. This one waits in
                # ctypes, where it just ends.
                line.thread = threading.Thread(
                    target=self._run, args=(stream, line), name=f"spdl_media {stream}", daemon=True
                )
                line.thread.start()

    def drain(self, limit: float) -> bool:
        """Wait until nothing is kept, so many seconds at most; whether that was so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.num_kept, limit)

    def _run(self, stream: Hashable, line: _Line) -> None:
        while self._wait_for_next(stream, line):
            pass

    def _wait_for_next(self, stream: Hashable, line: _Line) -> bool:
        try:
            event, kept = line.queue.get(timeout=_IDLE)
        except Empty:
            with self._changed:
                if is_idle := line.queue.empty() and self._lines.get(stream) is line:
                    del self._lines[stream]
                return not is_idle and self._lines.get(stream) is line
        # A device that has failed reads nothing any more, and whoever uses it next is told. The thread goes
        # on: nobody else would let go of what follows.
        with suppress(Exception):
            event.synchronize()
        del kept  # before the next wait, not after it
        with (changed := self._changed):
            line.num_kept -= 1
            changed.notify_all()
        return True


KEEPER = Keeper()
atexit.register(lambda: KEEPER.drain(_EXIT_LIMIT))

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    # The child has no such threads. What is kept is let go: leases of pools go back.
    os.register_at_fork(after_in_child=KEEPER._start)
