"""Host memory that is allocated once and used again, but never while something still looks at it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from math import prod
from queue import Empty, SimpleQueue
from typing import Literal, SupportsIndex, TypeAlias, get_args

import numpy as np

from spdl_media import ring
from spdl_media._checks import check_choice, check_int, check_seconds, warn_caller
from spdl_media._optional import require
from spdl_media.cuda_driver import HISTORY
from spdl_media.devices import cuda_library, is_out_of_memory
from spdl_media.errors import StorageTooSmallError, TransferError
from spdl_media.formats import Array, Shape
from spdl_media.shared_memory import Bytes, Lease

__all__ = ("CPUStorage", "StorageInUseWarning", "StoragePool", "cpu_storage")

OnExhausted: TypeAlias = Literal["allocate", "wait", "raise"]

# JAX shares memory only from 64 bytes on, and so do the widest vector loads.
ALIGNMENT = 64

# Bytes from which on memory on its way to a device is not pinned.
_LARGE = 64 << 20

# Seconds after which a thread that waits looks for blocks in garbage.
_PATIENCE = 1.0


class StorageInUseWarning(UserWarning):
    """A storage was asked for while earlier buffers still used it, so fresh memory was taken."""


def _allocate(size: int, pin_with: str | None) -> Bytes:
    """Memory that starts on 64 bytes. The array keeps its owner alive, and so does each array over it."""
    return _pinned(size, pin_with) if pin_with else _pageable(size)


# glibc gives larger blocks back to the system when they are freed, and the system clears them anew: 8% of the
# CPU that 64 images of 224x224 take as floats. The last one, up to a size, is kept for the next buffer.
_GIVEN_BACK, _MOST_KEPT = 32 << 20, 256 << 20
_kept: deque[Bytes] = deque(maxlen=1)


def _pageable(size: int) -> Bytes:
    if not _GIVEN_BACK < size <= _MOST_KEPT:
        return _fresh(size)
    block = None
    with suppress(IndexError):  # another thread may have taken it
        block = _kept.pop()
    if block is None or not size <= len(block) <= 2 * size:
        block = _fresh(size)
    return np.asarray(Lease(block, _kept.append, block))[:size]


def _fresh(size: int) -> Bytes:
    owner = np.empty(size + ALIGNMENT, np.uint8)
    start = -owner.ctypes.data % ALIGNMENT
    return owner[start : start + size]


def _pinned(size: int, package: str) -> Bytes:
    # Pinned memory starts on a page, so it needs no alignment.
    try:
        if package == "torch":
            torch = require("torch", "pinned memory")
            memory: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return memory
        cupy = require("cupy", "pinned memory without torch")
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TransferError(
            f"{size} bytes of page-locked memory cannot be had ({type(error).__name__}: {error}). It is "
            "taken from the machine's own memory: use fewer or smaller blocks, or pin_memory=False"
        ) from error


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
        warn_caller(
            f"memory cannot be pinned here: {reason}. Pageable memory is used; pin_memory=False asks for it "
            "without this warning",
            UserWarning,
        )
    return package


def _check_fork() -> None:
    HISTORY.check("page-locked memory", ". Or use memory that is not: pin_memory=False")


class StoragePool:
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
        self._on_exhausted = on_exhausted
        self._timeout = seconds
        # Between two waits the garbage collector looks for blocks. It costs more than most waits are long.
        first = min(seconds, _PATIENCE) if on_exhausted == "wait" else 0.0
        rest = min(seconds - first, threading.TIMEOUT_MAX) if on_exhausted == "wait" else 0.0
        self._waits: tuple[float, ...] = (first, rest)
        self._size = check_int("size", size, unit=" byte")
        self._count = check_int("count", count)
        self._pin_with = _pin_or_warn(pin_memory=pin_memory)
        self._lock = threading.Lock()
        self._warned = False
        # Weak, so that the free blocks go with the storage even while arrays live over others.
        self._give_back = partial(_give_back, weakref.ref(self))
        # A token for each free block. Finalizers return blocks at any moment in any thread, even while it is
        # inside ``get`` or ``put``, where a lock would wait for itself. SimpleQueue allows that.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        # A stack: blocks that are never needed are never touched, and take no pages of the system.
        self._free: deque[Bytes] = deque()
        for _ in range(self._count):
            self._put(_allocate(self._size, self._pin_with))

    @property
    def count(self) -> int:
        """Number of blocks, those added by ``on_exhausted="allocate"`` included."""
        return self._count

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses at this moment."""
        return self._tokens.qsize()

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self._size

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is pinned."""
        return self._pin_with is not None

    def acquire(self, nbytes: int) -> Bytes:
        """Take a block.

        Returns:
            The whole block, of ``nbytes`` or more. It is in use while this array or any view of it lives.

        Raises:
            StorageTooSmallError: ``nbytes`` is more than a block has.
            RuntimeError: A pool has no free block, with ``on_exhausted="raise"``.
            TimeoutError: A pool had none for ``timeout`` seconds, with ``on_exhausted="wait"``.
            TransferError: It is pinned, and this process was forked from one that had used CUDA; or one block
                more cannot be pinned.
        """
        if nbytes > self._size:
            raise StorageTooSmallError(
                f"the result takes {nbytes} bytes, but the storage has {self._size}. Make it that large"
            )
        if self._pin_with:
            _check_fork()  # a child may find other memory, or none, at a pinned address
        for attempt, seconds in enumerate(self._waits):
            if attempt:
                # Blocks in reference cycles are free, too, once the garbage collector has found them; and
                # threads that all wait make nothing, so nothing else would start it.
                gc.collect()
            with suppress(Empty):
                self._tokens.get(timeout=seconds)
                return self._leased(self._free.pop())
        return self._exhausted()

    def _leased(self, block: Bytes) -> Bytes:
        # The array holds the lease, and so does each view of it.
        return np.asarray(Lease(block, self._give_back, block))

    def _put(self, block: Bytes) -> None:
        self._free.append(block)
        self._tokens.put(None)

    def _exhausted(self) -> Bytes:
        """Do what is to be done where no block came free: raise, or allocate another one."""
        if self._on_exhausted == "wait":
            raise TimeoutError(
                f"all {self._count} blocks of the pool stayed in use for {self._timeout:g} s. Let go of "
                "buffers earlier, or give the pool more blocks"
            )
        if self._on_exhausted == "raise":
            raise RuntimeError(
                f"all {self._count} blocks of the pool are in use. Let go of buffers earlier, give the pool "
                "more blocks, or let it wait: on_exhausted='wait'"
            )
        # Leased before the warning, which may be an error: then the block is free, and not lost.
        memory = self._leased(_allocate(self._size, self._pin_with))
        with self._lock:
            self._count += 1
            count = self._count
        self._warn_once(
            f"all blocks of the pool were in use, so it now has {count}. StoragePool(..., "
            f"count={count}) allocates them at the start"
        )
        return memory

    def _warn_once(self, message: str) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            warn_caller(message, StorageInUseWarning)

    def __repr__(self) -> str:
        pinned = ", pinned" if self.is_pinned else ""
        return f"<StoragePool: {self.num_free} of {self._count} blocks of {self._size} bytes free{pinned}>"


def _give_back(storage: weakref.ref[StoragePool], block: Bytes) -> None:
    if (owner := storage()) is not None:
        owner._put(block)


class CPUStorage(StoragePool):
    """One block of host memory for buffers that do not live at the same time. See :func:`cpu_storage`.

    Thread safety: safe.
    """

    def __init__(self, size: SupportsIndex, *, pin_memory: bool = True) -> None:
        super().__init__(size, 1, pin_memory=pin_memory)
        self._waits = (0.0,)

    def _exhausted(self) -> Bytes:
        self._warn_once(
            "an earlier buffer still uses this storage, so fresh memory was taken. A "
            f"StoragePool({self._size}, count) keeps several blocks and allocates nothing"
        )
        return _allocate(self._size, self._pin_with)

    def __repr__(self) -> str:
        return f"<CPUStorage: {self._size} bytes{', pinned' if self.is_pinned else ''}>"


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


class PinnedMemory:
    """Fresh memory of any size, each time, on its way to a device.

    It is pinned, but for large blocks, which are copied in pieces: PyTorch and CuPy round pinned memory up to
    powers of two, and keep what they have for the next call.
    """

    def acquire(self, nbytes: int) -> Bytes:
        """A block of ``nbytes`` or more.

        Raises:
            TransferError: So much memory cannot be pinned, or none in this process, which was forked from
                one that had used CUDA.
        """
        package = _pin_or_warn(pin_memory=True)
        return _allocate(nbytes, package if nbytes <= _LARGE else None)


Storage: TypeAlias = StoragePool | PinnedMemory


def lease_memory(nbytes: int, storage: Storage | None, *, spare: int = 0) -> Bytes:
    """At least ``nbytes`` for a buffer, from the storage or, without one, fresh and pageable.

    In a process that makes batches for another one, fresh memory may be what they share.

    Args:
        nbytes: What is needed.
        storage: Where it comes from.
        spare: Bytes that fresh memory may have beyond that. They are hardly touched.

    Raises:
        TypeError: ``storage`` is none.
        StorageTooSmallError: It has fewer bytes.
    """
    if storage is None:
        shared = None if ring.sender is None else ring.sender.offer(nbytes, spare)
        return _pageable(nbytes + spare) if shared is None else shared
    if not isinstance(storage, StoragePool | PinnedMemory):
        raise TypeError(
            f"storage must be a CPUStorage, a StoragePool or None, not {type(storage).__name__}. "
            f"cpu_storage({nbytes}) makes one"
        )
    return storage.acquire(nbytes)


def new_array(shape: Shape, dtype: str, storage: Storage | None) -> Array:
    """An array in memory of the storage or, without one, in fresh memory; its values are not set.

    Raises:
        StorageTooSmallError: It does not fit into the storage.
    """
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return lease_memory(nbytes, storage)[:nbytes].view(dtype).reshape(shape)
