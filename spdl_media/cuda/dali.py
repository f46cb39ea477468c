"""Runs operators of NVIDIA's DALI, and makes buffers of its arrays.

DALI's dynamic API may be called from several threads, but an evaluation context must not be active in two
threads, and an operator must not run twice at once. So a slot holds both, and is lent to one thread at a
time. Slots hold operator objects instead of calling DALI's functions: those search the source code of their
caller for constants, and make an operator for each set of arguments, thread and batch size.

    with slot_pool(0).borrow() as slot: images = slot.run("decoders.Image", encoded, {"affine": False})

The CPU works in the same way; its index is ``None``.
"""

from __future__ import annotations

import importlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from queue import LifoQueue
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from spdl_media._optional import require
from spdl_media.buffer import CPUBuffer, CUDABuffer
from spdl_media.cuda_driver import HISTORY
from spdl_media.devices import SEES_NO_DEVICE, Device, no_such_device
from spdl_media.errors import MissingDependencyError, TransferError
from spdl_media.handover import Block, Guard
from spdl_media.transfer import buffer_on_stream

Settings: TypeAlias = Mapping[str, Any]
DaliBatch: TypeAlias = Any
"""DALI's class of batches: images of different sizes, on a device."""

_PURPOSE = "decoding with DALI"
_MIN_BATCH_SIZE = 16

# The threads of a slot work on the images of one batch. While one slot decodes, another scales. Each slot has
# its own buffers on the device, so there are few. A thread waits if no slot is free.
THREADS_A_SLOT = min(4, os.cpu_count() or 1)
MAX_SLOTS = 3

# Maximum number of operators that a slot keeps, each with its own buffers.
_MAX_OPERATORS = 16

DALI_ERRORS = (RuntimeError, MemoryError)
"""Exceptions of DALI. Their types do not distinguish bad data from a full device."""


def named(index: int | None) -> str:
    """Return the name of a device for messages."""
    return "the CPU" if index is None else f"CUDA device {index}"


def check_device(index: int | None) -> None:
    """Check that DALI can use a device in this process.

    Raises:
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: There is no GPU at all, or this process was forked after CUDA had been used.
        ValueError: There is no GPU with this index.
    """
    if index is None:
        dynamic()
        return
    HISTORY.check(_PURPOSE)
    count = int(dali_module("backend").GetCUDADeviceCount())
    # DALI has initialised the driver, which does not work in a process that is forked from now on.
    HISTORY.used |= count > 0
    if count == 0:
        raise TransferError(
            f"{_PURPOSE} on {named(index)}: DALI finds no CUDA device. {SEES_NO_DEVICE}"
        )
    if not 0 <= index < count:
        raise no_such_device(index, count)


def dali_module(name: str) -> ModuleType:
    """Import a module of DALI.

    Raises:
        MissingDependencyError: DALI is not installed.
    """
    return importlib.import_module(f"{require('dali', _PURPOSE).__name__}.{name}")


def dynamic() -> ModuleType:
    """Import DALI's dynamic API.

    Raises:
        MissingDependencyError: DALI is not installed, or is too old.
    """
    try:
        return dali_module("experimental.dynamic")
    except ModuleNotFoundError as error:
        version = getattr(require("dali", _PURPOSE), "__version__", "unknown")
        raise MissingDependencyError(
            f"{_PURPOSE} needs the dynamic API of DALI 2.4 or later, and version {version} is installed "
            f"({error}). Install it: pip install --upgrade nvidia-dali-cuda120 (or nvidia-dali-cuda130)",
            name="dali",
        ) from error


class Slot:
    """An evaluation context with its threads, stream and operators. Made and lent by :class:`SlotPool`.

    Thread safety: one thread at a time, which :meth:`SlotPool.borrow` ensures.
    """

    def __init__(self, index: int | None, num_threads: int = THREADS_A_SLOT) -> None:
        self._dynamic: Any = dynamic()
        self._name = "cpu" if index is None else f"gpu:{index}"
        self._operators: OrderedDict[tuple[object, ...], tuple[int, Any]] = OrderedDict()
        # A context without a stream uses the thread's default stream, which slots of one thread would share.
        with self._dynamic.Device(self._name):
            stream = None if index is None else self._dynamic.stream(device_id=index)
            self._context = self._dynamic.EvalContext(
                num_threads=num_threads, device_id=index, cuda_stream=stream
            )

    @contextmanager
    def active(self) -> Iterator[Slot]:
        """Return a context manager in which operators can run; on exit, they have finished on the device."""
        with self._dynamic.Device(self._name), self._context, self._dynamic.EvalMode.sync_cpu:
            try:
                yield self
            finally:
                # Then the arrays can be read on any stream, and their inputs can be freed.
                if (stream := self._context.cuda_stream) is not None:
                    stream.synchronize()

    @property
    def stream(self) -> int | None:
        """Address of the CUDA stream on which results are computed; ``None`` on the CPU."""
        return None if self._name == "cpu" else int(self._context.cuda_stream.handle)

    def run(
        self,
        operator: str,
        data: DaliBatch | Sequence[Any],
        settings: Settings,
        arguments: Mapping[str, Sequence[Any]] | None = None,
    ) -> DaliBatch:
        """Run one operator over a batch.

        Args:
            operator: Name of the operator's class in DALI, such as ``"decoders.Image"``.
            data: Result of another operator, or one array per image, which is not copied.
            settings: Arguments of the operator's constructor. Operators are cached by them.
            arguments: Named arguments of the call, each with one array per image.

        Returns:
            The results, on the device.

        Raises:
            RuntimeError: DALI's errors of every kind.
            MemoryError: There is not enough memory on the device or the host.
        """
        batch = self._batch(data)
        each = {name: self._batch(values) for name, values in (arguments or {}).items()}
        # An operator rejects inputs of another kind than its first ones, such as a video after images.
        kinds = [
            (name, values.ndim, str(values.dtype), values.layout)
            for name, values in (("", batch), *sorted(each.items()))
        ]
        key = operator, repr(sorted(settings.items())), *kinds
        return self._operator(key, len(batch.shape), settings)(batch, **each)

    def _batch(self, data: DaliBatch | Sequence[Any]) -> DaliBatch:
        if isinstance(data, self._dynamic.Batch):
            return data
        return self._dynamic.as_batch(list(data), device="cpu")

    def _operator(self, key: tuple[Any, ...], batch_size: int, settings: Settings) -> Any:
        """Return the cached operator for ``key``; a new one if the batch is too large for it."""
        largest, operator = self._operators.get(key, (0, None))
        if batch_size > largest:
            # Powers of two, so that slowly growing batches do not need a new operator each time.
            largest = max(_MIN_BATCH_SIZE, 1 << (batch_size - 1).bit_length())
            make = reduce(getattr, key[0].split("."), self._dynamic._ops)
            operator = make(max_batch_size=largest, device=self._name, **settings)
            self._operators[key] = largest, operator
        self._operators.move_to_end(key)
        while len(self._operators) > _MAX_OPERATORS:
            self._operators.popitem(last=False)
        return operator


class SlotPool:
    """Slots that are made when needed, up to a limit, and lent to threads.

    Args:
        make: Function that makes a slot.
        limit: Maximum number of slots; threads wait while all are lent.

    Thread safety: safe.
    """

    def __init__(self, make: Callable[[], Slot], limit: int = MAX_SLOTS) -> None:
        self._make = make
        # None stands for a slot that is not made yet. Last in, first out: used slots are preferred.
        self._idle: LifoQueue[Slot | None] = LifoQueue()
        for _ in range(limit):
            self._idle.put(None)

    @contextmanager
    def borrow(self) -> Iterator[Slot]:
        """Return a context manager that lends an active slot.

        Raises:
            RuntimeError: DALI cannot make a slot.
        """
        slot = self._idle.get()
        try:
            slot = slot or self._make()
            with slot.active():
                yield slot
        finally:
            # If the slot could not be made, put None back, so that another thread can try again.
            self._idle.put(slot)


_POOLS: dict[int | None, SlotPool] = {}
_ABANDONED: list[object] = []


def _after_fork() -> None:
    """Drop all slots in a forked process, where their threads do not exist."""
    # Keep them referenced forever, because destroying a slot waits for its threads.
    _ABANDONED.append(dict(_POOLS))
    _POOLS.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


def slot_pool(index: int | None) -> SlotPool:
    """Return the slot pool of a device, one per process.

    Raises:
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: There is no GPU at all, or this process was forked after CUDA had been used.
        ValueError: There is no GPU with this index.

    Thread safety: safe.
    """
    check_device(index)
    # If two threads make a pool at once, both get the first one.
    return _POOLS.setdefault(index, SlotPool(lambda: Slot(index)))


def ready_buffer(tensor: Any, stream: int | None = None, **metadata: Any) -> CPUBuffer | CUDABuffer:
    """Return a buffer that shares the memory of a DALI tensor, or of an array in host memory.

    Args:
        tensor: The array.
        stream: The CUDA stream on which it was computed; ``None`` for host memory.
        metadata: Metadata of the buffer.

    Raises:
        TransferError: ``stream`` is given, and the driver is missing.
    """
    if stream is None or not hasattr(tensor, "__cuda_array_interface__"):
        return CPUBuffer(np.asarray(tensor), **metadata)
    interface, (_, index) = tensor.__cuda_array_interface__, tensor.__dlpack_device__()
    shape, dtype, address = (interface[name] for name in ("shape", "typestr", "data"))
    # DALI reuses freed memory in the order of the stream on which it was allocated, and does not know of
    # other streams that read it, not even by its own DLPack. So the guard waits for them before it frees.
    kept = [tensor]
    guard = Guard(int(index), stream, address[0], shape, np.dtype(dtype), kept.clear)
    block = Block(guard, guard.used_on)
    return buffer_on_stream(block, Device(None, int(index), stream), **metadata)
