"""Slots: places to run operators of DALI in, borrowed by any number of threads, one at a time each.

DALI's dynamic API may be called from several threads, but one evaluation context must not be active in
two, and one operator must not run twice at once. So both are kept together in a slot, which is lent to
one thread at a time. Its operators are objects that the slot holds: DALI's functions look for their
constants in the source text of whoever calls them, and make an operator for each set of arguments, thread
and size of batch.

    with slot_pool(device).borrow() as slot:
        images = slot.run("decoders.Image", encoded, {"affine": False})

Everything runs in the same way on the CPU, ``SlotDevice("cpu")``, but for the name of the device.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Any, Literal, TypeAlias

from spdl_media._driver import HISTORY
from spdl_media._optional import require
from spdl_media.devices import no_such_device
from spdl_media.errors import MissingDependencyError, TransferError

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


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """Where operators run.

    Attributes:
        kind: ``"gpu"``, or ``"cpu"`` for the same operators without a GPU.
        index: Number of the GPU; ``None`` for the CPU.
    """

    kind: Literal["cpu", "gpu"]
    index: int | None = None

    def __str__(self) -> str:
        return "the CPU" if self.index is None else f"CUDA device {self.index}"


def check_device(device: SlotDevice) -> None:
    """Refuse a device that DALI cannot use in this process.

    Raises:
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: There is no GPU at all, or this process was forked after CUDA had been used.
        ValueError: There are GPUs, but not this one.
    """
    if device.kind == "cpu":
        _dynamic()
        return
    HISTORY.check(_PURPOSE)
    count = int(_module("backend").GetCUDADeviceCount())
    HISTORY.used |= count > 0
    if count == 0:
        raise TransferError(
            f"{_PURPOSE} on {device}: DALI finds no CUDA device. nvidia-smi shows whether the driver sees "
            "one, and CUDA_VISIBLE_DEVICES whether this process may"
        )
    if device.index is None or not 0 <= device.index < count:
        raise no_such_device(device.index or 0, count)


def _module(name: str) -> ModuleType:
    """A module of DALI."""
    return importlib.import_module(f"{require('dali', _PURPOSE).__name__}.{name}")


def _dynamic() -> ModuleType:
    try:
        return _module("experimental.dynamic")
    except ModuleNotFoundError as error:
        version = getattr(require("dali", _PURPOSE), "__version__", "unknown")
        raise MissingDependencyError(
            f"{_PURPOSE} needs the dynamic API of DALI 2.4 or later, and version {version} is installed "
            f"({error}). Install it: pip install --upgrade nvidia-dali-cuda120 (or nvidia-dali-cuda130)",
            name="dali",
        ) from error


def dali_types() -> ModuleType:
    """DALI's names for colour spaces and filters.

    Raises:
        MissingDependencyError: DALI is not installed.
    """
    return _module("types")


class Slot:
    """An evaluation context, its threads and stream, and operators. Made and lent by :class:`SlotPool`.

    Thread safety: one thread at a time, which :meth:`SlotPool.borrow` sees to.
    """

    def __init__(self, device: SlotDevice, num_threads: int = THREADS_A_SLOT) -> None:
        self._dynamic: Any = _dynamic()
        self._name = "cpu" if device.index is None else f"gpu:{device.index}"
        self._operators: OrderedDict[tuple[object, ...], tuple[int, Any]] = OrderedDict()
        # A context without a stream takes the thread's own, which slots made in one thread would share.
        with self._dynamic.Device(self._name):
            self._context = self._dynamic.EvalContext(
                num_threads=num_threads, device_id=device.index, cuda_stream=self._stream(device)
            )

    def _stream(self, device: SlotDevice) -> Any:
        return None if device.index is None else self._dynamic.stream(device_id=device.index)

    @contextmanager
    def active(self) -> Iterator[Slot]:
        """A block in which operators run. They are done, on the device too, at its end."""
        with self._dynamic.Device(self._name), self._context, self._dynamic.EvalMode.sync_cpu:
            try:
                yield self
            finally:
                # So the arrays may be read from any stream, and what they were made of may go.
                self._synchronize()

    @property
    def stream(self) -> int | None:
        """Address of the stream that results are made on; ``None`` on the CPU."""
        return None if self._name == "cpu" else int(self._context.cuda_stream.handle)

    def _synchronize(self) -> None:
        stream = self._context.cuda_stream
        if stream is not None:
            stream.synchronize()

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
        kinds = _kind(batch), *((name, _kind(values)) for name, values in sorted(each.items()))
        return self._operator(operator, len(batch.shape), settings, kinds)(batch, **each)

    def _batch(self, data: DaliBatch | Sequence[Any]) -> DaliBatch:
        if isinstance(data, self._dynamic.Batch):
            return data
        return self._dynamic.as_batch(list(data), device="cpu")

    def _operator(
        self, name: str, batch_size: int, settings: Settings, kinds: tuple[object, ...]
    ) -> Any:
        """The operator made with these settings, made anew when the batch outgrows it."""
        # An operator refuses other kinds of input than it had first, such as a video after images.
        key = name, repr(sorted(settings.items())), *kinds
        largest, operator = self._operators.get(key, (0, None))
        if batch_size > largest:
            largest = max(_MIN_BATCH_SIZE, 1 << (batch_size - 1).bit_length())
            make = reduce(getattr, name.split("."), self._dynamic._ops)
            operator = make(max_batch_size=largest, device=self._name, **settings)
            self._operators[key] = largest, operator
        self._operators.move_to_end(key)
        while len(self._operators) > _MAX_OPERATORS:
            self._operators.popitem(last=False)
        return operator

    def as_array(self, batch: DaliBatch) -> Any:
        """Images of one size as one array of DALI's, which owns its memory."""
        return self._dynamic.as_tensor(batch)

    def first(self, batch: DaliBatch) -> Any:
        """The first image as an array of DALI's."""
        return batch.tensors[0]


def _kind(batch: DaliBatch) -> tuple[object, ...]:
    """What an operator expects of a batch to be as it was."""
    return batch.ndim, str(batch.dtype), batch.layout


class SlotPool:
    """Slots that are made when they are needed, up to a limit, and lent.

    Args:
        make: Makes a slot.
        limit: Number of slots; threads wait while all are lent.

    Thread safety: safe.
    """

    def __init__(self, make: Callable[[], Slot], limit: int = MAX_SLOTS) -> None:
        self._make = make
        self._limit = limit
        self._idle: list[Slot] = []
        self._count = 0
        self._changed = threading.Condition()

    @contextmanager
    def borrow(self) -> Iterator[Slot]:
        """A slot for the block, in which its operators may be run.

        Raises:
            RuntimeError: DALI cannot make a slot.
        """
        slot = self._take()
        try:
            with slot.active():
                yield slot
        finally:
            with self._changed:
                self._idle.append(slot)
                self._changed.notify()

    def _take(self) -> Slot:
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._count < self._limit)
            if self._idle:
                return self._idle.pop()  # the one used last, whose memory is warm
            self._count += 1
        try:
            return self._make()
        except BaseException:
            with self._changed:
                self._count -= 1
                self._changed.notify()
            raise


class _Pools:
    """The pools of this process by device. A forked child starts anew: threads do not survive a fork."""

    def __init__(self) -> None:
        self._abandoned: list[object] = []
        self._start()

    def _start(self) -> None:
        self.lock = threading.Lock()
        self.by_device: dict[SlotDevice, SlotPool] = {}

    def after_fork(self) -> None:
        # Kept, because taking them down would wait for their threads.
        self._abandoned.append(self.by_device)
        self._start()


_POOLS = _Pools()

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_POOLS.after_fork)


def slot_pool(device: SlotDevice) -> SlotPool:
    """The pool of a device, one for the whole process.

    Raises:
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: There is no GPU at all, or this process was forked after CUDA had been used.
        ValueError: There are GPUs, but not this one.

    Thread safety: safe.
    """
    check_device(device)
    with _POOLS.lock:
        if device not in _POOLS.by_device:
            _POOLS.by_device[device] = SlotPool(lambda: Slot(device))
        return _POOLS.by_device[device]
