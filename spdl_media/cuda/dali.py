"""NVIDIA's DALI: places to run its operators in, its arrays, and its video operator.

DALI's dynamic API may be called from several threads, but one evaluation context must not be active in
two, and one operator must not run twice at once. So both are kept together in a slot, which is lent to
one thread at a time. Its operators are objects that the slot holds: DALI's functions look for their
constants in the source text of whoever calls them, and make an operator for each set of arguments, thread
and size of batch.

    with slot_pool(0).borrow() as slot:
        images = slot.run("decoders.Image", encoded, {"affine": False})

Everything runs in the same way on the CPU, whose number is ``None``, but for the name of the device.
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
from spdl_media.devices import Device, no_such_device
from spdl_media.errors import MissingDependencyError, TransferError
from spdl_media.handover import Block, Guard
from spdl_media.transfer import buffer_on_stream

Settings: TypeAlias = Mapping[str, Any]
DaliBatch: TypeAlias = Any
"""Of DALI's own class: pictures of their own sizes, on a device."""

_PURPOSE = "decoding with DALI"
_MIN_BATCH_SIZE = 16

# A slot's threads work on the images of one batch. While one slot decodes, another scales; each holds
# buffers of its own on the device, so there are few. A thread that finds none free waits.
THREADS_A_SLOT = min(4, os.cpu_count() or 1)
MAX_SLOTS = 3

# Kinds of operators that a slot keeps, each with buffers of its own.
_MAX_OPERATORS = 16

DALI_ERRORS = (RuntimeError, MemoryError)
"""What DALI raises; the types do not tell bad data from a device that is full."""


def named(index: int | None) -> str:
    """A device in words."""
    return "the CPU" if index is None else f"CUDA device {index}"


def check_device(index: int | None) -> None:
    """Refuse a device that DALI cannot use in this process.

    Raises:
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: There is no GPU at all, or this process was forked after CUDA had been used.
        ValueError: There are GPUs, but not this one.
    """
    if index is None:
        dynamic()
        return
    HISTORY.check(_PURPOSE)
    count = int(dali_module("backend").GetCUDADeviceCount())
    # DALI has started the driver, which a child that is forked now does not get.
    HISTORY.used |= count > 0
    if count == 0:
        raise TransferError(
            f"{_PURPOSE} on {named(index)}: DALI finds no CUDA device. nvidia-smi shows whether the driver "
            "sees one, and CUDA_VISIBLE_DEVICES whether this process may"
        )
    if not 0 <= index < count:
        raise no_such_device(index, count)


def dali_module(name: str) -> ModuleType:
    """A module of DALI.

    Raises:
        MissingDependencyError: DALI is not installed.
    """
    return importlib.import_module(f"{require('dali', _PURPOSE).__name__}.{name}")


def dynamic() -> ModuleType:
    """DALI's dynamic API.

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
    """An evaluation context, its threads and stream, and operators. Made and lent by :class:`SlotPool`.

    Thread safety: one thread at a time, which :meth:`SlotPool.borrow` sees to.
    """

    def __init__(self, index: int | None, num_threads: int = THREADS_A_SLOT) -> None:
        self._dynamic: Any = dynamic()
        self._name = "cpu" if index is None else f"gpu:{index}"
        self._operators: OrderedDict[tuple[object, ...], tuple[int, Any]] = OrderedDict()
        # A context without a stream takes the thread's own, which slots made in one thread would share.
        with self._dynamic.Device(self._name):
            stream = None if index is None else self._dynamic.stream(device_id=index)
            self._context = self._dynamic.EvalContext(
                num_threads=num_threads, device_id=index, cuda_stream=stream
            )

    @contextmanager
    def active(self) -> Iterator[Slot]:
        """A block in which operators run. They are done, on the device too, at its end."""
        with self._dynamic.Device(self._name), self._context, self._dynamic.EvalMode.sync_cpu:
            try:
                yield self
            finally:
                # So the arrays may be read from any stream, and what they were made of may go.
                if (stream := self._context.cuda_stream) is not None:
                    stream.synchronize()

    @property
    def stream(self) -> int | None:
        """Address of the stream that results are made on; ``None`` on the CPU."""
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
            data: What another operator gave, or an array for each image, not copied.
            settings: What the operator is made with. One operator is kept for each.
            arguments: By name, an array for each image.

        Returns:
            The results, on the device.

        Raises:
            RuntimeError: DALI's errors of every kind.
            MemoryError: There was not enough memory, on the device or beside it.
        """
        batch = self._batch(data)
        each = {name: self._batch(values) for name, values in (arguments or {}).items()}
        # An operator refuses other kinds of input than it had first, such as a video after images.
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
        """The operator of this name and kind, made anew when the batch outgrows it."""
        largest, operator = self._operators.get(key, (0, None))
        if batch_size > largest:
            # In powers of two, so that batches that grow slowly do not make one anew each time.
            largest = max(_MIN_BATCH_SIZE, 1 << (batch_size - 1).bit_length())
            make = reduce(getattr, key[0].split("."), self._dynamic._ops)
            operator = make(max_batch_size=largest, device=self._name, **settings)
            self._operators[key] = largest, operator
        self._operators.move_to_end(key)
        while len(self._operators) > _MAX_OPERATORS:
            self._operators.popitem(last=False)
        return operator

    def as_array(self, batch: DaliBatch) -> Any:
        """Images of one size as one array of DALI's, which owns its memory."""
        return self._dynamic.as_tensor(batch)


class SlotPool:
    """Slots that are made when they are needed, up to a limit, and lent.

    Args:
        make: Makes a slot.
        limit: Number of slots; threads wait while all are lent.

    Thread safety: safe.
    """

    def __init__(self, make: Callable[[], Slot], limit: int = MAX_SLOTS) -> None:
        self._make = make
        # Places of slots that are yet to be made lie below those that were used, whose memory is warm.
        self._idle: LifoQueue[Slot | None] = LifoQueue()
        for _ in range(limit):
            self._idle.put(None)

    @contextmanager
    def borrow(self) -> Iterator[Slot]:
        """A slot for the block, in which its operators may be run.

        Raises:
            RuntimeError: DALI cannot make a slot.
        """
        slot = self._idle.get()
        try:
            slot = slot or self._make()
            with slot.active():
                yield slot
        finally:
            # If none could be made, this is None, so that its place is not lost.
            self._idle.put(slot)


_POOLS: dict[int | None, SlotPool] = {}
_ABANDONED: list[object] = []


def _after_fork() -> None:
    """Start anew: threads do not survive a fork. Taking the slots down would wait for them."""
    # Kept for ever, since to destroy a slot waits for its threads.
    _ABANDONED.append(dict(_POOLS))
    _POOLS.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


def slot_pool(index: int | None) -> SlotPool:
    """The pool of a device, one for the whole process.

    Raises:
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: There is no GPU at all, or this process was forked after CUDA had been used.
        ValueError: There are GPUs, but not this one.

    Thread safety: safe.
    """
    check_device(index)
    # Two threads may come here at once, and both get the first pool.
    return _POOLS.setdefault(index, SlotPool(lambda: Slot(index)))


def ready_buffer(tensor: Any, stream: int | None = None, **metadata: Any) -> CPUBuffer | CUDABuffer:
    """The buffer over an array of DALI or of a stand-in in host memory.

    Args:
        tensor: The array.
        stream: The stream that it was made on; ``None``: in host memory.
        metadata: Of the buffer.
    """
    if stream is None or not hasattr(tensor, "__cuda_array_interface__"):
        return CPUBuffer(np.asarray(tensor), **metadata)
    interface, (_, index) = tensor.__cuda_array_interface__, tensor.__dlpack_device__()
    shape, dtype, address = (interface[name] for name in ("shape", "typestr", "data"))
    # DALI gives memory to whoever asks next in the order of the stream that it was made on, and knows of no
    # other, not even of those that its own DLPack hands it to.
    kept = [tensor]
    guard = Guard(int(index), stream, address[0], shape, np.dtype(dtype), kept.clear)
    block = Block(guard, guard.used_on)
    return buffer_on_stream(block, Device(None, int(index), stream), **metadata)
