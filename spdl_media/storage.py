"""Host memory that is allocated once and used again, but never while something still looks at it."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Literal, SupportsIndex, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int, check_seconds
from spdl_media._devices.choose import cuda_library
from spdl_media._devices.device import is_out_of_memory
from spdl_media._devices.forks import HISTORY
from spdl_media._optional import require
from spdl_media.errors import StorageTooSmallError, TransferError

__all__ = ("CPUStorage", "StorageInUseWarning", "StoragePool", "cpu_storage")

Bytes: TypeAlias = npt.NDArray[np.uint8]
OnExhausted: TypeAlias = Literal["allocate", "wait", "raise"]

# JAX shares memory only from 64 bytes on, and so do the widest vector loads.
ALIGNMENT = 64

# A thread that waits this long looks for blocks in garbage, which costs more than most waits are long.
_PATIENCE = 1.0


class StorageInUseWarning(UserWarning):
    """A storage was asked for while earlier buffers still used it, so fresh memory was taken."""


class _Block:
    """One piece of memory that starts on 64 bytes, and whether a :class:`CPUStorage` has lent it."""

    __slots__ = ("in_use", "memory")

    def __init__(self, size: int, pin_with: str | None = None) -> None:
        # The array keeps what owns the memory alive, here and in the next ones.
        self.memory = _pinned(size, pin_with) if pin_with else _pageable(size)
        self.in_use = False


def _pageable(size: int) -> Bytes:
    owner = np.empty(size + ALIGNMENT, np.uint8)
    start = -owner.ctypes.data % ALIGNMENT
    return owner[start : start + size]


def _pinned(size: int, package: str) -> Bytes:
    try:
        return _PINNED[package](size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TransferError(
            f"{size} bytes of page-locked memory cannot be had ({type(error).__name__}: {error}). It is "
            "taken from the machine's own memory: use fewer or smaller blocks, or pin_memory=False"
        ) from error


# Pinned memory starts on a page, so it needs no alignment.
def _pinned_by_torch(size: int) -> Bytes:
    torch = require("torch", "pinned memory")
    memory: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _pinned_by_cupy(size: int) -> Bytes:
    memory = require("cupy", "pinned memory without torch").cuda.alloc_pinned_memory(size)
    return np.frombuffer(memory, np.uint8, size)


_PINNED: dict[str, Callable[[int], Bytes]] = {"torch": _pinned_by_torch, "cupy": _pinned_by_cupy}


_warned_pageable = False


def _pin_or_warn(*, pin_memory: bool) -> str | None:
    """The package that pins memory; ``None``: the memory is pageable."""
    global _warned_pageable  # noqa: PLW0603  # one warning a process, as PyTorch has it
    if not pin_memory:
        return None
    _check_fork()
    package, reason = cuda_library()
    if package is None and not _warned_pageable:
        _warned_pageable = True
        _warn(
            f"memory cannot be pinned here: {reason}. Pageable memory is used; pin_memory=False asks for it "
            "without this warning",
            UserWarning,
        )
    return package


def _check_fork() -> None:
    HISTORY.check("page-locked memory", ". Or use memory that is not: pin_memory=False")


def _warn(message: str, category: type[Warning]) -> None:
    """Warn with the stack level of the caller outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("spdl_media."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class _Lease:
    """The right to use a block, which ends when the last array over it is gone."""

    # NumPy collapses ``base``: an array of a view points at the object that gave the memory, and at nothing
    # in between. A finalizer on an array would run while its views live; this object lives as long as they.

    __slots__ = ("__array_interface__", "__weakref__", "_block")

    def __init__(self, block: _Block, at_end: Callable[[_Block], object]) -> None:
        self._block = block
        self.__array_interface__ = block.memory.__array_interface__
        # At exit nobody waits for the block, and what at_end needs may be gone.
        weakref.finalize(self, at_end, block).atexit = False


class _FreeBlocks:
    """Free blocks, last in, first out."""

    __slots__ = ("_blocks", "_tokens")

    def __init__(self) -> None:
        # A stack: blocks that are never needed are never touched, and take no pages of the system.
        self._blocks: deque[_Block] = deque()
        # A token for each block. Finalizers return blocks at any moment in any thread, even while the same
        # thread is inside ``get`` or ``put``, where a lock would wait for itself. SimpleQueue allows that.
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def __len__(self) -> int:
        return self._tokens.qsize()

    def put(self, block: _Block) -> None:
        self._blocks.append(block)
        self._tokens.put(None)

    def get(self, timeout: float = 0.0) -> _Block:
        """Take a block; ``queue.Empty`` when there was none for ``timeout`` seconds."""
        self._tokens.get(timeout=timeout)
        return self._blocks.pop()


class _Blocks:
    """Size and kind of the blocks of a storage."""

    def __init__(self, size: SupportsIndex, *, pin_memory: bool) -> None:
        self._size = check_int("size", size, unit=" byte")
        self._pin_with = _pin_or_warn(pin_memory=pin_memory)
        self._lock = threading.Lock()
        self._warned = False

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self._size

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is pinned."""
        return self._pin_with is not None


class CPUStorage(_Blocks):
    """One block of host memory for buffers that do not live at the same time. See :func:`cpu_storage`.

    Thread safety: safe.
    """

    def __init__(self, size: SupportsIndex, *, pin_memory: bool = True) -> None:
        super().__init__(size, pin_memory=pin_memory)
        self._block = _Block(self._size, self._pin_with)

    def acquire(self, nbytes: int) -> Bytes:
        """Take the block, or a fresh one of the same kind while an earlier buffer uses it.

        Returns:
            The whole block, of ``nbytes`` or more. It is in use while this array or any view of it lives.

        Raises:
            StorageTooSmallError: ``nbytes`` is more than the storage has.
            TransferError: It is pinned, and this process was forked from one that had used CUDA.
        """
        _check_fits(nbytes, self._size)
        if self._pin_with:
            _check_fork()  # a child may find other memory, or none, at a pinned address
        with self._lock:
            busy, self._block.in_use = self._block.in_use, True
            warn = busy and not self._warned
            self._warned |= busy
        if not busy:
            return np.asarray(_Lease(self._block, _mark_free))
        if warn:
            _warn(
                "an earlier buffer still uses this storage, so fresh memory was taken. A "
                f"StoragePool({self._size}, count) keeps several blocks and allocates nothing",
                StorageInUseWarning,
            )
        return _Block(self._size, self._pin_with).memory

    def __repr__(self) -> str:
        return f"<CPUStorage: {self._size} bytes{', pinned' if self.is_pinned else ''}>"


def _mark_free(block: _Block) -> None:
    block.in_use = False


def cpu_storage(
    size: SupportsIndex,
    pin_memory: bool = True,  # noqa: FBT001, FBT002  # as SPDL has it
) -> CPUStorage:
    """Allocate host memory once, for :func:`~spdl_media.convert_frames` to fill again and again.

    A block that an earlier buffer still uses is never overwritten: fresh memory of the same kind is taken
    instead, with one :class:`StorageInUseWarning`.

    Args:
        size: Bytes.
        pin_memory: Pin the memory, so that a copy to a GPU runs in the background. Without CUDA: pageable
            memory and one warning.

    Raises:
        TypeError: ``size`` is not a whole number.
        ValueError: ``size`` is not positive.
        TransferError: So much memory cannot be pinned, or none in this process, which was forked from one
            that had used CUDA.

    Thread safety: safe.
    """
    return CPUStorage(size, pin_memory=pin_memory)


class StoragePool(_Blocks):
    """Blocks of host memory that are leased to buffers and come back when their last array is gone.

    :meth:`CPUBuffer.release` gives a block back early. Memory in reference cycles comes back when Python's
    garbage collector finds them; it is asked to before the pool grows or raises, and after a second's wait.

    Args:
        size: Bytes of a block.
        count: Number of blocks.
        pin_memory: As in :func:`cpu_storage`.
        on_exhausted: When all blocks are in use: ``"allocate"`` one more for good, with one warning,
            ``"wait"`` for one (threads that each keep a buffer while they wait for another may wait for
            ever), or ``"raise"`` a RuntimeError.
        timeout: Seconds to wait at most with ``"wait"``; then a TimeoutError. ``None``: for ever.

    Raises:
        TypeError: ``size`` or ``count`` is not a whole number, or ``timeout`` no number.
        ValueError: ``size`` or ``count`` is not positive, ``timeout`` is negative or given without
            ``"wait"``, or ``on_exhausted`` is none of the three.
        TransferError: As for :func:`cpu_storage`.

    Thread safety: safe.
    """

    def __init__(
        self,
        size: SupportsIndex,
        count: SupportsIndex = 4,
        *,
        pin_memory: bool = True,
        on_exhausted: OnExhausted = "allocate",
        timeout: float | None = None,
    ) -> None:
        check_choice("on_exhausted", on_exhausted, get_args(OnExhausted))
        seconds = check_seconds("timeout", timeout, allow_zero=True)
        if timeout is not None and on_exhausted != "wait":
            raise ValueError(
                f"timeout={timeout!r} is for on_exhausted='wait', and a pool with "
                f"on_exhausted={on_exhausted!r} never waits"
            )
        self._count = check_int("count", count)
        super().__init__(size, pin_memory=pin_memory)
        self._on_exhausted = on_exhausted
        self._timeout = seconds
        self._free = _FreeBlocks()
        for _ in range(self._count):
            self._free.put(_Block(self._size, self._pin_with))

    @property
    def count(self) -> int:
        """Number of blocks, those added by ``on_exhausted="allocate"`` included."""
        return self._count

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses at this moment."""
        return len(self._free)

    def acquire(self, nbytes: int) -> Bytes:
        """Lease a block.

        Returns:
            The whole block, of ``nbytes`` or more. It comes back when this array and all views are gone.

        Raises:
            StorageTooSmallError: ``nbytes`` is more than a block has.
            RuntimeError: All are in use, with ``on_exhausted="raise"``.
            TimeoutError: All stayed in use for ``timeout`` seconds, with ``on_exhausted="wait"``.
            TransferError: It is pinned, and this process was forked from one that had used CUDA; or one block
                more cannot be pinned.
        """
        _check_fits(nbytes, self._size)
        if self._pin_with:
            _check_fork()
        try:
            block = self._free.get()
        except Empty:
            return self._acquire_late()
        return np.asarray(_Lease(block, self._free.put))

    def _acquire_late(self) -> Bytes:
        """What :meth:`acquire` does once all blocks are in use."""
        if self._on_exhausted == "wait":
            block = self._wait()
        else:
            # Blocks in reference cycles are free, too, once the garbage collector has found them.
            gc.collect()
            try:
                block = self._free.get()
            except Empty:
                return self._acquire_more()
        return np.asarray(_Lease(block, self._free.put))

    def _wait(self) -> _Block:
        first = min(self._timeout, _PATIENCE)
        try:
            return self._free.get(timeout=first)
        except Empty:
            # Threads that all wait make nothing, so nothing else would start the garbage collector.
            gc.collect()
        try:
            return self._free.get(timeout=min(self._timeout - first, threading.TIMEOUT_MAX))
        except Empty:
            raise TimeoutError(
                f"all {self._count} blocks of the pool stayed in use for {self._timeout:g} s. Let go of "
                "buffers earlier, or give the pool more blocks"
            ) from None

    def _acquire_more(self) -> Bytes:
        if self._on_exhausted == "raise":
            raise RuntimeError(
                f"all {self._count} blocks of the pool are in use. Let go of buffers earlier, give the pool "
                "more blocks, or let it wait: on_exhausted='wait'"
            )
        # Leased before the warning, which may be an error: then the block is free, and not lost.
        memory = np.asarray(_Lease(_Block(self._size, self._pin_with), self._free.put))
        with self._lock:
            self._count += 1
            count = self._count
            warn, self._warned = not self._warned, True
        if warn:
            _warn(
                f"all blocks of the pool were in use, so it now has {count}. StoragePool(..., "
                f"count={count}) allocates them at the start",
                StorageInUseWarning,
            )
        return memory

    def __repr__(self) -> str:
        pinned = ", pinned" if self.is_pinned else ""
        return f"<StoragePool: {self.num_free} of {self._count} blocks of {self._size} bytes free{pinned}>"


class PinnedMemory:
    """Fresh pinned memory of any size, each time. PyTorch and CuPy keep freed blocks for the next call."""

    def acquire(self, nbytes: int) -> Bytes:
        """A block of ``nbytes`` or more."""
        return _Block(nbytes, _pin_or_warn(pin_memory=True)).memory


Storage: TypeAlias = CPUStorage | StoragePool | PinnedMemory


def lease_memory(nbytes: int, storage: Storage | None) -> Bytes:
    """At least ``nbytes`` for a buffer, from the storage or, without one, fresh and pageable.

    Raises:
        TypeError: ``storage`` is none.
        StorageTooSmallError: It has fewer bytes.
    """
    if storage is None:
        return _pageable(nbytes)
    if not isinstance(storage, CPUStorage | StoragePool | PinnedMemory):
        raise TypeError(
            f"storage must be a CPUStorage, a StoragePool or None, not {type(storage).__name__}. "
            f"cpu_storage({nbytes}) makes one"
        )
    return storage.acquire(nbytes)


def _check_fits(nbytes: int, size: int) -> None:
    if nbytes > size:
        raise StorageTooSmallError(
            f"the result takes {nbytes} bytes, but the storage has {size}. Make it at least as large"
        )
