"""A ring of shared memory blocks, through which arrays reach another process without being serialised.

The *sender*, a child process, pickles values with their arrays out of band (PEP 574) into blocks. The
*receiver* makes arrays that are views of the blocks. A block is free again when the last array over it is
gone in both processes.

Storage that the sender allocates may be in a block from the start; then nothing is copied.
"""

from __future__ import annotations

import io
import math
import operator
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media import shared_memory
from spdl_media._optional import require
from spdl_media.shared_memory import Bytes, Lease, SharedBlocks

# Arrays below this size are pickled: sharing them costs more than a few copies.
_LEAST_SHARED: Final = 4096
# A pickle stream of at least this size goes into a block, too.
_LEAST_STREAM: Final = 1 << 16
_ALIGNMENT: Final = 64
# Each block takes address space.
_MAX_BLOCKS: Final = 127
# Blocks that arrays of the sender may hold at a time, while values are being made.
_NUM_OWN: Final = 16
# Seconds between two looks for a free block.
_WAIT_SECONDS: Final = 0.001

# Number of the block, offset in it, size in bytes.
_Place: TypeAlias = tuple[int, int, int]


class Ring:
    """The receiver's end of the memory that two processes share.

    Args:
        block_size: Size of a block in bytes. A value takes at least one block.
        num_sent: Maximum number of values in transit.
        num_views: Blocks that arrays of the receiver may hold at a time. Values beyond that are copied. A
            value takes one block for each array that was allocated in one.
        pin_memory: Pin blocks in the receiver.

    Attributes:
        blocks: The memory, which the sender needs as well.

    Raises:
        OSError: No more file descriptors are available.
    """

    def __init__(
        self, block_size: int, *, num_sent: int, num_views: int = 64, pin_memory: bool = False
    ) -> None:
        # One block more than all others can hold for long, so that the sender always gets one eventually.
        count = min(_NUM_OWN + num_views + num_sent + 1, _MAX_BLOCKS)
        self.blocks = SharedBlocks(block_size, count)
        self._num_views = min(num_views, count - _NUM_OWN - 1)
        self._pin_memory = pin_memory
        # One entry for each block that arrays in this process hold.
        self._views: deque[None] = deque()

    def unpack(self, places: Sequence[_Place], stream: bytes | None) -> Any:
        """Unpickle a value whose arrays are views of blocks.

        Raises:
            MissingDependencyError: Blocks have to be pinned, and torch is not installed.
            MemoryError: The memory cannot be pinned.
            Exception: A class of the value raises when it is unpickled.
        """
        is_full = len(self._views) + len({place[0] for place in places}) > self._num_views
        blocks: dict[int, Bytes] = {}
        for number in {place[0] for place in places}:
            self._views.append(None)
            lease = self.blocks.sent, number, os.getpid(), self._views
            blocks[number] = np.asarray(Lease(self.blocks.block(number), _give_back, *lease))
        for number, start, nbytes in places if self._pin_memory else ():
            self.blocks.pin(number, start + nbytes)
        buffers = [blocks[number][start : start + nbytes] for number, start, nbytes in places]
        if is_full:
            buffers = [buffer.copy() for buffer in buffers]
        data: Any = buffers.pop() if stream is None else stream
        return pickle.loads(data, buffers=buffers)  # noqa: S301  # from the process started for it


def _give_back(sent: Bytes, number: int, pid: int, held: deque[None]) -> None:
    # A forked child has copies of the arrays, but only the process that got the block may release it.
    if os.getpid() == pid:
        held.pop()
        sent[number] = False


class Sender:
    """The sender's end of a ring.

    Thread safety: safe.
    """

    def __init__(self, blocks: SharedBlocks) -> None:
        self._blocks = blocks
        # Held by a thread that marks blocks as sent.
        self._lock = threading.Lock()
        # The blocks that arrays here use or that are being filled, by number.
        self._own: dict[int, object] = {}
        # Size of the largest array of the last value. Much smaller arrays are probably only parts of one.
        self._usual = math.inf

    def offer(self, nbytes: int, spare: int = 0, *, is_meant: bool = False) -> Bytes | None:
        """Lease a block for an array that may be sent; ``None`` if its size is unsuitable or none is free.

        Args:
            nbytes: Size of the array.
            spare: Additional bytes that the array may use, but hardly will.
            is_meant: Whether the array will be sent for certain, so that it may be smaller than usual.
        """
        is_usual = is_meant or nbytes >= self._usual / 2
        if not (is_usual and _LEAST_SHARED <= nbytes <= self._blocks.block_size):
            return None
        if len(self._own) >= _NUM_OWN or (number := self._claim()) is None:
            return None
        try:
            self._blocks.reserve(number, nbytes)
        except MemoryError:
            del self._own[number]
            return None
        return np.asarray(
            Lease(self._blocks.block(number)[: nbytes + spare], self._own.pop, number)
        )

    def pack(self, box: list[Any], *, is_alone: bool = False) -> bytes | memoryview:
        """Pickle a value, with its arrays in blocks. Waits for a free block.

        Args:
            box: A list with the value, which is removed from it.
            is_alone: Whether the other process must get memory that this one no longer uses. Values larger
                than a block are then pickled as a whole.

        Raises:
            ValueError: The arrays are larger than a block.
            MemoryError: Shared memory is exhausted.
            Exception: The value cannot be pickled.
        """
        arrays: list[Bytes] = []
        # The buffers in `arrays` keep the arrays alive until they are copied.
        stream = dumps(box[0], arrays)
        is_shared = len(stream) >= _LEAST_STREAM
        if is_shared:
            arrays.append(np.frombuffer(stream, np.uint8))
        if not arrays:
            return stream
        sizes = [array.nbytes for array in arrays]
        if is_alone and sum(map(_aligned, sizes)) > self._blocks.block_size:
            return dumps(box.pop())
        self._usual = max(sizes)
        places = [self._blocks.place(array) for array in arrays]
        landed = self._mark_sent({place[0] for place in places if place is not None})
        kept: set[int] = set()
        try:
            if is_alone and landed:
                box.clear()
                for index, place in enumerate(places):
                    if place is not None and place[0] in landed:
                        # The same memory, but without keeping the lease alive.
                        block = self._blocks.block(place[0])
                        arrays[index] = block[place[1] :][: sizes[index]]
                kept = landed & self._own.keys()
            usable = landed - kept
            places = [place if place and place[0] in usable else None for place in places]
            copied = [array for array, place in zip(arrays, places, strict=True) if place is None]
            copies = iter(self._copy(copied) if copied else ())
        except BaseException:
            self._blocks.sent[[*landed]] = False
            raise
        # Only now, because they must not be reused while they are copied.
        self._blocks.sent[[*kept]] = False
        found = [
            (*(place or next(copies)), size) for place, size in zip(places, sizes, strict=True)
        ]
        return b"R" + pickle.dumps((found, None if is_shared else bytes(stream)))

    def _mark_sent(self, numbers: Iterable[int]) -> set[int]:
        """Mark blocks as sent, except those that the other process still uses; return the marked ones."""
        with self._lock:
            landed = {number for number in numbers if not self._blocks.sent[number]}
            self._blocks.sent[[*landed]] = True
        return landed

    def _copy(self, arrays: Sequence[Bytes]) -> list[tuple[int, int]]:
        """Copy arrays to a free block, mark it as sent, and return their places."""
        nbytes = sum(_aligned(array.nbytes) for array in arrays)
        if nbytes > self._blocks.block_size:
            raise ValueError(
                f"the arrays of a batch take {nbytes} bytes, but a block of shared memory has "
                f"{self._blocks.block_size}. Use smaller batches, or a larger block_size="
            )
        while (number := self._claim()) is None:
            # Rare, because there are more blocks than values in transit and arrays that are kept.
            time.sleep(_WAIT_SECONDS)
        try:
            self._blocks.reserve(number, nbytes)
            block, start = self._blocks.block(number), 0
            places = []
            for array in arrays:
                # np.copyto releases the GIL, an assignment does not.
                np.copyto(block[start : start + array.nbytes], array)
                places.append((number, start))
                start += _aligned(array.nbytes)
            self._blocks.sent[number] = True
        finally:
            del self._own[number]
        return places

    def _claim(self) -> int | None:
        """Claim a block that neither process uses; ``None`` if there is none."""
        claim = object()
        # The first ones are reused most, and the others take no memory.
        for number in range(self._blocks.count):
            # Without a lock, because finalizers, which run at any time, allocate arrays, too.
            if self._own.setdefault(number, claim) is claim:
                if not self._blocks.sent[number]:
                    return number
                del self._own[number]
        return None


def unpack(data: bytes, ring: Ring | None) -> Any:
    """Unpickle the result of :func:`pack`.

    Raises:
        Exception: As :meth:`Ring.unpack` raises.
    """
    # Without the prefix it is a plain pickle, which begins with 0x80.
    if data[:1] != b"R":
        return pickle.loads(data)  # noqa: S301  # from a process that was started by this one
    assert ring is not None
    return ring.unpack(*pickle.loads(memoryview(data)[1:]))  # noqa: S301  # as above


def pack(box: list[Any], *, is_alone: bool = False) -> bytes | memoryview:
    """Pickle a value for :func:`unpack` in the parent process; see :meth:`Sender.pack`.

    Raises:
        Exception: As :meth:`Sender.pack` raises.
    """
    sender = shared_memory.sender
    return dumps(box.pop()) if sender is None else sender.pack(box, is_alone=is_alone)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def begin_to_send(blocks: SharedBlocks | None) -> None:
    """Make this process the sender of a ring, given its :attr:`Ring.blocks`."""
    shared_memory.sender = None if blocks is None else Sender(blocks)


# A forked child is not a sender.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: begin_to_send(None))


def shared_empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Allocate an uninitialised array that reaches the parent process without a copy.

    Use it for ``out=`` of NumPy and other functions, in a process of :func:`iterate_in_subprocess`,
    :func:`run_pipeline_in_subprocess`, ``DataLoader(num_processes=)`` or a stage. ``load_*``,
    ``convert_frames`` and ``collate`` do not need it. In other processes, for dtype object, and when too many
    such arrays exist, the result is an ordinary array.

    Args:
        shape: Shape of the array.
        dtype: Type of its elements.

    Returns:
        A C-contiguous array. Writing to it after it was sent changes the array of the other process.

    Raises:
        TypeError: ``dtype`` is not known to NumPy.
        ValueError: ``shape`` has a negative size.

    Thread safety: safe.
    """
    dtype = np.dtype(dtype)
    shape = tuple(shape) if isinstance(shape, Iterable) else (operator.index(shape),)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = None
    sender = shared_memory.sender
    if sender is not None and not dtype.hasobject:
        memory = sender.offer(nbytes, is_meant=True)
    return np.empty(shape, dtype) if memory is None else memory.view(dtype).reshape(shape)


def dumps(value: object, arrays: list[Bytes] | None = None) -> memoryview:
    """Pickle a value. If a list is given, append the memory of large arrays to it instead of pickling them.

    Raises:
        Exception: The value cannot be pickled.
    """

    def keep(buffer: pickle.PickleBuffer) -> bool:
        if arrays is None or memoryview(buffer).nbytes < _LEAST_SHARED:
            return True
        arrays.append(np.frombuffer(buffer.raw(), np.uint8))
        return False

    file = io.BytesIO()
    # A ForkingPickler, because plain pickle cannot send connections.
    _Pickler(file, pickle.HIGHEST_PROTOCOL, True, keep).dump(value)  # noqa: FBT003  # as pickle has it
    return file.getbuffer()


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return _reduce_array(value)
        torch = sys.modules.get("torch")
        if torch is not None and kind is getattr(torch, "Tensor", None):
            return _reduce_tensor(value, torch)
        return NotImplemented


def _reduce_array(array: npt.NDArray[Any]) -> Any:
    flags = array.flags
    # Pickle sends only contiguous arrays out of band, and would copy others into the stream.
    if flags.c_contiguous or flags.f_contiguous or array.dtype.hasobject:
        return NotImplemented
    whole = np.ascontiguousarray(array)
    whole.flags.writeable = flags.writeable
    return whole.__reduce_ex__(5)


def _reduce_tensor(tensor: Any, torch: Any) -> Any:
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not is_plain or tensor.requires_grad or tensor.is_quantized or tensor.is_nested:
        # Pickled by torch itself.
        return NotImplemented
    # Axes in the order of memory, so that images with channels last are not copied.
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    dense = tensor.permute(order)
    flat = dense.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _tensor, (pickle.PickleBuffer(flat), dtype, tuple(dense.shape), tuple(order))


def _tensor(memory: Any, dtype: str, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    torch: Any = require("torch", "a batch with tensors")
    kind = getattr(torch, dtype)
    if not math.prod(shape):
        dense = torch.empty(shape, dtype=kind)
    else:
        writable = bytearray(memory) if isinstance(memory, bytes) else memory
        dense = torch.frombuffer(writable, dtype=kind).reshape(shape)
    return dense.permute([order.index(axis) for axis in range(len(order))])
