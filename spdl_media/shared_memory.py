"""Memory blocks that two processes share, and leases: a block is in use while arrays over it exist."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._checks import warn_once
from spdl_media._optional import require
from spdl_media._threads import when_dropped

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Sharing needs to pass a file descriptor to another process.
CAN_SHARE = os.name == "posix"

sender: Any = None
"""The :class:`ring.Sender` of this process, if it sends values to another process."""


class Lease:
    """Owner of a block that calls ``at_end`` when the last array over the block is gone."""

    # NumPy collapses ``base``: a view refers to the object that owns the memory, not to the array in between.
    # A finalizer on an array would run while views exist; this object is the owner, so it outlives all views.

    __slots__ = ("__array_interface__", "_block", "_end")

    def __init__(self, block: Bytes, at_end: Callable[..., object], *args: Any) -> None:
        self._block = block
        self.__array_interface__ = block.__array_interface__
        self._end = when_dropped(at_end, *args)


class SharedBlocks:
    """Blocks of shared memory in an anonymous file, of which nothing is left if a process is killed.

    Only pages that were written to take memory. A copy that is pickled while a child process starts maps the
    same memory there.

    Attributes:
        sent: For each block, whether it is on its way to the receiver or used there. The sender sets it, the
            receiver resets it. Also shared, and a byte each, so that no step is seen half done.

    Raises:
        OSError: No more file descriptors are available.
    """

    def __init__(self, block_size: int, count: int) -> None:
        self.block_size = block_size
        self.count = count
        self._reserved = [0] * count
        self._pinned: dict[int, tuple[int, weakref.finalize[..., Any]]] = {}
        self._fd = _nameless_file()
        try:
            # Allocated here, as reserve() does for blocks: writing without memory would kill the process.
            os.pwrite(self._fd, bytes(count), block_size * count)
            self._map()
        except BaseException:
            self.close_file()
            raise

    def _map(self) -> None:
        size = self.block_size * self.count
        # Arrays over the mapping keep it alive.
        whole = np.frombuffer(mmap.mmap(self._fd, size + self.count), np.uint8)
        self._memory, self.sent = whole[:size], whole[size:]

    def block(self, number: int) -> Bytes:
        """Return the memory of a block."""
        return self._memory[number * self.block_size :][: self.block_size]

    def place(self, memory: Bytes) -> tuple[int, int] | None:
        """Return the block that contains an array, and the offset in it; ``None`` if no block does."""
        start = _address(memory) - _address(self._memory)
        return divmod(start, self.block_size) if 0 <= start < self._memory.nbytes else None

    def reserve(self, number: int, nbytes: int) -> None:
        """Allocate memory for the first bytes of a block. Writing without memory would kill the process.

        Raises:
            MemoryError: The system has no more memory.
        """
        missing = nbytes - self._reserved[number]
        if missing <= 0 or not hasattr(os, "posix_fallocate"):
            return
        start = number * self.block_size + self._reserved[number]
        try:
            os.posix_fallocate(self._fd, start, missing)
        except OSError as error:
            raise MemoryError(
                f"{missing} more bytes of shared memory cannot be allocated ({error}). Use smaller batches, "
                "or fewer at a time: buffer_size="
            ) from error
        self._reserved[number] = nbytes

    def pin(self, number: int, nbytes: int) -> None:
        """Pin the first bytes of a block in this process, if CUDA is available.

        Raises:
            MissingDependencyError: torch is not installed.
            MemoryError: The memory cannot be pinned.
        """
        pinned, unpin = self._pinned.get(number, (0, None))
        if nbytes <= pinned:
            return
        torch: Any = require("torch", "pinned memory")
        if not torch.cuda.is_available():
            warn_once(
                "pinned memory",
                "memory cannot be pinned here: CUDA is not available. Pageable memory is used; leave out "
                "pin_memory=True to have it without this warning",
            )
            return
        address, cudart = _address(self.block(number)), torch.cuda.cudart()
        if unpin is not None:
            unpin()
            del self._pinned[number]
        nbytes = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, self.block_size)
        if code := int(cudart.cudaHostRegister(address, nbytes, 0)):
            raise MemoryError(
                f"{nbytes} bytes of shared memory cannot be pinned (CUDA's error {code}). Use smaller "
                "batches, or fewer at a time, or leave out pin_memory=True"
            )
        # Unpinned before the memory is unmapped. Not at exit, when the driver may be unloaded.
        base: Any = self._memory.base
        unpin = weakref.finalize(base, cudart.cudaHostUnregister, address)
        unpin.atexit = False
        self._pinned[number] = nbytes, unpin

    def close_file(self) -> None:
        """Close the file descriptor. The memory stays valid, but no more can be reserved."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __getstate__(self) -> tuple[int, int, Any]:
        from multiprocessing import reduction

        return self.block_size, self.count, reduction.DupFd(self._fd)

    def __setstate__(self, state: tuple[int, int, Any]) -> None:
        self.block_size, self.count, file = state
        self._reserved, self._pinned = [0] * self.count, {}
        self._fd = file.detach()
        self._map()


def _nameless_file() -> int:
    # Unlike /dev/shm, which has 64 MB in containers, it is limited only by the system's memory.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("spdl_media")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _address(memory: Bytes) -> int:
    return int(memory.__array_interface__["data"][0])
