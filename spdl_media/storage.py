"""Host memory that is allocated once and reused, but never while an array still uses it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from math import prod
from queue import Empty, SimpleQueue
from typing import Literal, NoReturn, SupportsIndex, TypeAlias, get_args

import numpy as np

from spdl_media import shared_memory
from spdl_media._checks import check_choice, check_int, check_seconds, warn_caller, warn_once
from spdl_media._optional import require
from spdl_media.cuda_driver import HISTORY
from spdl_media.devices import cuda_library, is_out_of_memory
from spdl_media.errors import StorageTooSmallError, TransferError
from spdl_media.formats import Array, Shape
from spdl_media.shared_memory import Bytes, Lease

__all__ = ("CPUStorage", "StorageInUseWarning", "StoragePool", "cpu_storage")

OnExhausted: TypeAlias = Literal["allocate", "wait", "raise"]

# JAX shares only memory that is aligned to 64 bytes, and the widest vector loads need that, too.
ALIGNMENT = 64

# Memory for transfers that is larger than this is not pinned.
_LARGE = 64 << 20

# On free-threaded CPython, what another thread drops is often freed by the thread that made it, when it next
# runs Python code, or else by the garbage collector. So a waiting thread wakes for what it made itself. What
# sleeping threads made takes a collection for each level: list, buffer, array, lease, finalizer. This depends
# on the build, and stays so when a package turns the GIL on.
_FREE_THREADED = "free-threading" in sys.version
_WAKE, _LEVELS = (0.002, 8) if _FREE_THREADED else (threading.TIMEOUT_MAX, 1)

# Seconds that a thread waits for a block before it first runs the garbage collector; then twice as long.
_PATIENCE = 0.1 if _FREE_THREADED else 1.0


class StorageInUseWarning(UserWarning):
    """Earlier buffers still used a storage, so new memory was allocated."""


def _allocate(size: int, pin_with: str | None) -> Bytes:
    """Allocate memory aligned to 64 bytes. The array and all its views keep the owner of the memory alive."""
    return _pinned(size, pin_with) if pin_with else _pageable(size)


# glibc returns blocks above 32 MiB to the system when they are freed, and the system has to clear them again:
# 8% of the CPU time for 64 images of 224x224 as floats. So they are kept and reused, up to a limit for all.
# If only one were kept, two threads that make such batches would need a new one for every third batch.
_GIVEN_BACK, _LARGEST_KEPT, _MOST_KEPT = 32 << 20, 256 << 20, 512 << 20
_kept: deque[Bytes] = deque()


def _pageable(size: int) -> Bytes:
    if not _GIVEN_BACK < size <= _LARGEST_KEPT:
        return _fresh(size)
    block = _fresh(size) if (found := _take_kept(size)) is None else found
    return np.asarray(Lease(block, _keep, block))[:size]


def _take_kept(size: int) -> Bytes | None:
    with suppress(IndexError):  # another thread may have taken the last block
        for _ in range(len(_kept)):
            block = _kept.pop()
            if size <= len(block) <= 2 * size:
                return block
            _kept.appendleft(block)
        _kept.popleft()  # the program has changed to other sizes
    return None


def _keep(block: Bytes) -> None:
    _kept.append(block)
    with suppress(IndexError):
        # The copy is one step, during which no other thread changes the deque.
        while sum(map(len, _kept.copy())) > _MOST_KEPT:
            _kept.popleft()


def _fresh(size: int) -> Bytes:
    owner = np.empty(size + ALIGNMENT, np.uint8)
    start = -owner.ctypes.data % ALIGNMENT
    return owner[start : start + size]


def _pinned(size: int, package: str) -> Bytes:
    # Pinned memory is aligned to pages.
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
            f"{size} bytes of pinned memory cannot be allocated ({type(error).__name__}: {error}). It is "
            "taken from the host's memory: use fewer or smaller blocks, or pin_memory=False"
        ) from error


def _pin_or_warn(*, pin_memory: bool) -> str | None:
    """Return the package that pins memory; ``None`` if the memory is pageable."""
    if not pin_memory:
        return None
    _check_fork()
    package, reason = cuda_library()
    if package is None:
        warn_once(
            "pinned memory",
            f"memory cannot be pinned here: {reason}. Pageable memory is used; pin_memory=False asks for it "
            "without this warning",
        )
    return package


def _check_fork() -> None:
    HISTORY.check("page-locked memory", ". Or use memory that is not: pin_memory=False")


class StoragePool:
    """Blocks of host memory that are leased to buffers, and free again when their last array is gone.

    :meth:`CPUBuffer.release` returns a block early. Blocks in reference cycles are returned when Python's
    garbage collector runs. The pool runs it before it grows or raises, and while it waits, after 1, 3, 7
    seconds and so on. On free-threaded CPython, the times are a tenth of that, because blocks whose arrays
    another thread dropped are often returned only then.

    Args:
        size: Size of a block in bytes.
        count: Number of blocks.
        pin_memory: Pin the memory, as for :func:`cpu_storage`.
        on_exhausted: What to do if all blocks are in use: ``"allocate"`` another block permanently, with
            one warning; ``"wait"`` for a block (threads that hold a buffer while they wait for another can
            deadlock); or ``"raise"`` a RuntimeError.
        timeout: Seconds to wait at most with ``"wait"``, before a TimeoutError. ``None`` waits forever.

    Raises:
        TypeError: ``size`` or ``count`` is not an integer, or ``timeout`` is not a number.
        ValueError: ``size`` or ``count`` is not positive, ``timeout`` is negative or given without
            ``"wait"``, or ``on_exhausted`` is unknown.
        TransferError: The memory cannot be pinned, as for :func:`cpu_storage`.

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
        self._size = check_int("size", size, unit=" byte")
        self._count = check_int("count", count)
        self._pin_with = _pin_or_warn(pin_memory=pin_memory)
        self._lock = threading.Lock()
        self._warned = False
        # A weak reference, so that the free blocks go with the storage even while arrays use other blocks.
        self._give_back = partial(_give_back, weakref.ref(self))
        # A token for each free block. Finalizers return blocks at any time in any thread, even inside ``get``
        # or ``put`` of the same thread, where a lock would deadlock. SimpleQueue is reentrant.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        # A stack, so that blocks that are never needed stay untouched and take no memory.
        self._free: deque[Bytes] = deque()
        for _ in range(self._count):
            self._put(_allocate(self._size, self._pin_with))

    @property
    def count(self) -> int:
        """Number of blocks, including those added by ``on_exhausted="allocate"``."""
        return self._count

    @property
    def num_free(self) -> int:
        """Number of blocks that are free now."""
        return self._tokens.qsize()

    @property
    def nbytes(self) -> int:
        """Size of a block in bytes."""
        return self._size

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is pinned."""
        return self._pin_with is not None

    def acquire(self, nbytes: int) -> Bytes:
        """Lease a block.

        Returns:
            The whole block, at least ``nbytes``. It is in use while this array or any view of it exists.

        Raises:
            StorageTooSmallError: ``nbytes`` exceeds the size of a block.
            RuntimeError: No block is free, with ``on_exhausted="raise"``.
            TimeoutError: No block was free for ``timeout`` seconds, with ``on_exhausted="wait"``.
            TransferError: The memory is pinned, and this process was forked from one that had used CUDA; or
                another block cannot be pinned.
        """
        if nbytes > self._size:
            raise StorageTooSmallError(
                f"the result takes {nbytes} bytes, but the storage has {self._size}. Make it that large"
            )
        if self._pin_with:
            _check_fork()  # in a forked child, a pinned address may be other memory, or none
        for seconds in self._waits():
            if (block := self._take_within(seconds)) is not None:
                return block
        return self._exhausted()

    def _waits(self) -> Iterator[float]:
        """Yield how many seconds to wait for a block, and collect garbage in between."""
        left, wait = self._timeout if self._on_exhausted == "wait" else 0.0, _PATIENCE
        yield min(wait, left)
        while True:
            # Frees blocks in reference cycles. If all threads wait, nothing else starts the collector.
            for _ in range(_LEVELS):
                gc.collect()
            left -= min(wait, left)
            wait *= 2
            yield min(wait, left)
            if left == 0:
                return

    def _take_within(self, seconds: float) -> Bytes | None:
        while True:
            with suppress(Empty):
                self._tokens.get(timeout=min(seconds, _WAKE))
                return self._leased(self._free.pop())
            seconds -= _WAKE
            if seconds <= 0:
                return None

    def _leased(self, block: Bytes) -> Bytes:
        # The array and all its views hold the lease.
        return np.asarray(Lease(block, self._give_back, block))

    def _put(self, block: Bytes) -> None:
        self._free.append(block)
        self._tokens.put(None)

    def _exhausted(self) -> Bytes:
        """Raise or allocate another block, as ``on_exhausted`` tells, after no block became free."""
        if self._on_exhausted == "wait":
            raise TimeoutError(
                f"all {self._count} blocks of the pool stayed in use for {self._timeout:g} s. Release "
                "buffers earlier, or give the pool more blocks"
            )
        if self._on_exhausted == "raise":
            raise RuntimeError(
                f"all {self._count} blocks of the pool are in use. Release buffers earlier, give the pool "
                "more blocks, or let it wait: on_exhausted='wait'"
            )
        # Leased before the warning, which may be raised as an error: the block then becomes free.
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

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} objects are not picklable: they hold memory of this process. Make one "
            "where it is used"
        )

    def __repr__(self) -> str:
        pinned = ", pinned" if self.is_pinned else ""
        return f"<StoragePool: {self.num_free} of {self._count} blocks of {self._size} bytes free{pinned}>"


def _give_back(storage: weakref.ref[StoragePool], block: Bytes) -> None:
    if (owner := storage()) is not None:
        owner._put(block)


class CPUStorage(StoragePool):
    """One block of host memory for buffers that are used one at a time. See :func:`cpu_storage`.

    Thread safety: safe.
    """

    def __init__(self, size: SupportsIndex, *, pin_memory: bool = True) -> None:
        super().__init__(size, 1, pin_memory=pin_memory)

    def _waits(self) -> Iterator[float]:
        return iter((0.0,))

    def _exhausted(self) -> Bytes:
        self._warn_once(
            "an earlier buffer still uses this storage, so new memory was allocated. A "
            f"StoragePool({self._size}, count) keeps several blocks and allocates nothing"
        )
        return _allocate(self._size, self._pin_with)

    def __repr__(self) -> str:
        return f"<CPUStorage: {self._size} bytes{', pinned' if self.is_pinned else ''}>"


def cpu_storage(
    size: SupportsIndex,
    pin_memory: bool = True,  # noqa: FBT001, FBT002  # as SPDL has it
) -> CPUStorage:
    """Allocate host memory once, which :func:`~spdl_media.convert_frames` and others fill repeatedly.

    A block that an earlier buffer still uses is never overwritten: new memory of the same kind is allocated
    instead, with one :class:`StorageInUseWarning`.

    Args:
        size: Size in bytes.
        pin_memory: Pin the memory, so that copies to a GPU are asynchronous. Without CUDA, the memory is
            pageable, with one warning.

    Raises:
        TypeError: ``size`` is not an integer.
        ValueError: ``size`` is not positive.
        TransferError: The memory cannot be pinned, or this process was forked from one that had used CUDA.

    Thread safety: safe.
    """
    return CPUStorage(size, pin_memory=pin_memory)


class PinnedMemory:
    """Newly allocated memory of any size, for transfers to a device.

    Memory is pinned, except large blocks, which are copied in pieces: PyTorch and CuPy round pinned memory up
    to powers of two and never free it.
    """

    def acquire(self, nbytes: int) -> Bytes:
        """Allocate at least ``nbytes``.

        Raises:
            TransferError: The memory cannot be pinned, or this process was forked from one that had used
                CUDA.
        """
        package = _pin_or_warn(pin_memory=True)
        return _allocate(nbytes, package if nbytes <= _LARGE else None)


Storage: TypeAlias = StoragePool | PinnedMemory


def lease_memory(nbytes: int, storage: Storage | None, *, spare: int = 0) -> Bytes:
    """Return at least ``nbytes`` for a buffer, from the storage or, without one, new and pageable.

    In a process that makes batches for another one, new memory may be a block that both share.

    Args:
        nbytes: Size in bytes that is needed.
        storage: Storage to lease from.
        spare: Additional bytes of new memory, which are hardly touched.

    Raises:
        TypeError: ``storage`` is not a storage.
        StorageTooSmallError: The storage has fewer bytes.
    """
    if storage is None:
        sender = shared_memory.sender
        shared = None if sender is None else sender.offer(nbytes, spare)
        return _pageable(nbytes + spare) if shared is None else shared
    if not isinstance(storage, StoragePool | PinnedMemory):
        raise TypeError(
            f"storage must be a CPUStorage, a StoragePool or None, not {type(storage).__name__}. "
            f"cpu_storage({nbytes}) makes one"
        )
    return storage.acquire(nbytes)


def new_array(shape: Shape, dtype: str, storage: Storage | None) -> Array:
    """Return an uninitialised array in memory of the storage or, without one, in new memory.

    Raises:
        StorageTooSmallError: The array does not fit into the storage.
    """
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return lease_memory(nbytes, storage)[:nbytes].view(dtype).reshape(shape)
