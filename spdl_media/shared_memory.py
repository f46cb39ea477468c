"""Blocks of memory that two processes see, and leases: blocks are in use while arrays over them live."""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._checks import warn_caller
from spdl_media._optional import require

Bytes: TypeAlias = npt.NDArray[np.uint8]

# The file of a block is passed by its descriptor.
CAN_SHARE = hasattr(reduction, "DupFd")


class Lease:
    """The right to use a block, which ends when the last array over it is gone."""

    # NumPy collapses ``base``: an array of a view points at the object that gave the memory, and at nothing
    # in between. A finalizer on an array would run while its views live; this object lives as long as they.

    __slots__ = ("__array_interface__", "__weakref__", "_block")

    def __init__(self, block: Bytes, at_end: Callable[..., object], *args: Any) -> None:
        self._block = block
        self.__array_interface__ = block.__array_interface__
        # At exit the block is not used again, and what at_end needs may be gone.
        weakref.finalize(self, at_end, *args).atexit = False


class SharedBlocks:
    """Blocks of memory in a file without a name, so nothing of it is left, whichever process is killed.

    They take memory as far as they were written to. A copy that is pickled while a process starts maps the
    same memory there.

    Raises:
        OSError: There are no more descriptors.
    """

    def __init__(self, block_size: int, count: int) -> None:
        self.block_size = block_size
        self.count = count
        self._reserved = [0] * count
        self._pinned: dict[int, tuple[int, weakref.finalize[..., Any]]] = {}
        self._fd = _nameless_file()
        try:
            os.ftruncate(self._fd, block_size * count)
            self._map()
        except BaseException:
            self.close_file()
            raise

    def _map(self) -> None:
        # It lives as long as an array over it.
        self._memory = np.frombuffer(mmap.mmap(self._fd, self.block_size * self.count), np.uint8)

    def block(self, number: int) -> Bytes:
        """The memory of a block."""
        return self._memory[number * self.block_size :][: self.block_size]

    def place(self, memory: Bytes) -> tuple[int, int] | None:
        """The block in which memory lies, and where in it; ``None``: it lies elsewhere."""
        start = _address(memory) - _address(self._memory)
        inside = 0 <= start < self._memory.nbytes
        return divmod(start, self.block_size) if inside else None

    def reserve(self, number: int, nbytes: int) -> None:
        """Have the system find memory for the beginning of a block: to write without it ends a process.

        Raises:
            MemoryError: There is no more.
        """
        missing = nbytes - self._reserved[number]
        if missing <= 0 or not hasattr(os, "posix_fallocate"):
            return
        start = number * self.block_size + self._reserved[number]
        try:
            os.posix_fallocate(self._fd, start, missing)
        except OSError as error:
            raise MemoryError(
                f"{missing} bytes of shared memory more cannot be had ({error}). Make batches smaller, or "
                "fewer of them at a time: buffer_size="
            ) from error
        self._reserved[number] = nbytes

    def pin(self, number: int, nbytes: int) -> None:
        """Pin the beginning of a block, in this process, where CUDA is.

        Raises:
            MissingDependencyError: torch is not installed.
            MemoryError: So much cannot be pinned.
        """
        pinned, unpin = self._pinned.get(number, (0, None))
        if nbytes <= pinned:
            return
        torch: Any = require("torch", "pinned memory")
        if not torch.cuda.is_available():
            _warn_pageable()
            return
        address, cudart = _address(self.block(number)), torch.cuda.cudart()
        if unpin is not None:
            unpin()
            del self._pinned[number]
        nbytes = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, self.block_size)
        if code := int(cudart.cudaHostRegister(address, nbytes, 0)):
            raise MemoryError(
                f"{nbytes} bytes of shared memory cannot be pinned (CUDA's error {code}). Make batches "
                "smaller, or fewer of them at a time, or leave out pin_memory=True"
            )
        # While the memory is still mapped. At exit its driver may be gone.
        base: Any = self._memory.base
        unpin = weakref.finalize(base, cudart.cudaHostUnregister, address)
        unpin.atexit = False
        self._pinned[number] = nbytes, unpin

    def close_file(self) -> None:
        """Give the descriptor back. The memory stays as it is; none can be reserved any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __getstate__(self) -> tuple[int, int, Any]:
        return self.block_size, self.count, reduction.DupFd(self._fd)

    def __setstate__(self, state: tuple[int, int, Any]) -> None:
        self.block_size, self.count, file = state
        self._reserved, self._pinned = [0] * self.count, {}
        self._fd = file.detach()
        self._map()


def _nameless_file() -> int:
    # Unlike /dev/shm, which containers give 64 MB, it may take what memory there is.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("spdl_media")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _address(memory: Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address


@functools.cache
def _warn_pageable() -> None:
    """Warn once a process."""
    warn_caller(
        "memory cannot be pinned here: CUDA is not available. Pageable memory is used; leave out "
        "pin_memory=True to have it without this warning",
        UserWarning,
    )
