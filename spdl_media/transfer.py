"""Copies between host memory and CUDA devices, asynchronous if the memory is pinned.

A copy is put on a stream and the call returns. The source, and with it the lease of its
:class:`~spdl_media.StoragePool`, is kept until the copy has read it. The result has an event recorded after
the copy, for which its consumer waits on its own stream.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, SupportsIndex, TypeVar, Unpack

import numpy as np

from spdl_media._checks import int_in_environment, warn_once
from spdl_media.arrays import map_nested
from spdl_media.buffer import Buffer, BufferMetadata, CPUBuffer, CUDABuffer
from spdl_media.config import CUDAConfig, as_cuda_config, cuda_config
from spdl_media.cuda_driver import HISTORY, DriverError, Event, is_pinned
from spdl_media.devices import Device, MemoryErrors, cuda_library, open_device
from spdl_media.errors import TransferError
from spdl_media.formats import Array
from spdl_media.handover import KEEPER, Block, Handover, in_place
from spdl_media.storage import PinnedMemory, Storage, new_array

__all__ = ("transfer_buffer", "transfer_buffer_cpu", "transfer_tensor", "transfer_tensor_d2h")

T = TypeVar("T")


def transfer_buffer(buffer: CPUBuffer, *, cuda_config: CUDAConfig | SupportsIndex) -> CUDABuffer:
    """Copy a buffer to a CUDA device.

    From pinned memory the copy is asynchronous, in stream order. Its source is kept until the copy is done,
    even if the buffer is deleted or released before: the storage or pool does not reuse the block. Do not
    write to it until :meth:`CUDABuffer.synchronize` returns. Pageable memory is copied in pieces through a
    pinned block, and the call returns when the last piece is in that block.

    Args:
        buffer: From :func:`~spdl_media.convert_frames` or another function, best in pinned memory:
            ``storage=cpu_storage(size)``.
        cuda_config: From :func:`~spdl_media.cuda_config`, or the number of the device.

    Returns:
        A buffer on the device of the same shape and type, with the same ``failures`` and ``indices``.

    Raises:
        TransferError: There is no CUDA device, or none in this process because it was forked; PyTorch and
            CuPy are missing; the device's memory is full; the stream belongs to another device; a copy fails.
        ValueError: There is no device of this number, or the buffer was released.
        TypeError: ``buffer`` is not a :class:`CPUBuffer`, or ``cuda_config`` is not a config.

    Thread safety: safe. Copies on one stream run one after the other.
    """
    if not isinstance(buffer, CPUBuffer):
        raise TypeError(f"transfer_buffer takes a CPUBuffer, not {type(buffer).__name__}")
    config = as_cuda_config(cuda_config)
    device = open_device(config, "transfer_buffer")
    return _to_device(buffer.array, device, config, **buffer.metadata)


def _to_device(
    array: Array, device: Device, config: CUDAConfig, **metadata: Unpack[BufferMetadata]
) -> CUDABuffer:
    """Begin to copy an array from host memory, on the stream of a device.

    Raises:
        TransferError: The device's memory is full, or the copy fails.
    """
    # Only C-contiguous memory can be copied in one piece.
    source = np.require(array, requirements="C")
    with _CopyErrors(f"{source.nbytes} bytes to CUDA device {device.index}"):
        block = device.empty(source.shape, source.dtype, config.allocator)
        is_direct = source.nbytes <= _SMALL or is_pinned(device.index, source.ctypes.data)
        if is_direct:
            device.copy("HtoD", in_place(block.array), source)
        else:
            _WINDOW.copy(device, block.array, source)
        ready = Handover(device.index, device.stream, block.used_on)
        if is_direct and not ready.event.is_done():
            # The copy is asynchronous, so the source must be kept until it is done.
            KEEPER.keep((device.index, device.stream), ready.event, source)
    return CUDABuffer(
        block.array, source.shape, source.dtype, device.index, ready=ready, **metadata
    )


def buffer_on_stream(
    block: Block, device: Device, **metadata: Unpack[BufferMetadata]
) -> CUDABuffer:
    """Make the buffer of an array that is ready after all work that is on the device's stream now.

    Raises:
        TransferError: The driver is missing.
    """
    interface = block.array.__cuda_array_interface__
    shape, dtype = interface["shape"], interface["typestr"]
    ready = Handover(device.index, device.stream, block.used_on)
    return CUDABuffer(block.array, shape, dtype, device.index, ready=ready, **metadata)


class _Window:
    """Double buffer in pinned memory, through which pageable memory is copied to devices in pieces.

    A pinned copy of a large batch could take twice its memory permanently: PyTorch and CuPy round up to
    powers of two, and never free it.

    Thread safety: safe; arrays are copied one at a time.
    """

    def __init__(self, half: int = 8 << 20) -> None:
        self._half = half
        self._lock = threading.Lock()
        self._memory: Array | None = None
        self._events: list[Event | None] = [None, None]

    def copy(self, device: Device, target: Any, source: Array) -> None:
        """Begin to copy an array to an array on the device. The source is not needed after the call.

        Raises:
            TransferError: The driver is missing.
        """
        flat, there = (one.reshape(-1).view(np.uint8) for one in (source, in_place(target)))
        with self._lock:
            if self._memory is None:
                self._memory = PinnedMemory().acquire(2 * self._half).reshape(2, -1)
            for start in range(0, len(flat), self._half):
                place = slice(start, start + self._half)
                side, part = start // self._half % 2, flat[place]
                if (before := self._events[side]) is not None:
                    with suppress(TransferError):  # a failed device no longer reads the memory
                        before.synchronize()
                piece = self._memory[side, : len(part)]
                piece[...] = part
                device.copy("HtoD", there[place], piece)
                self._events[side] = device.record()


_WINDOW = _Window()
# The driver copies pageable memory up to this size to a buffer of its own before the call returns.
_SMALL = 1 << 16


def staging(storage: Storage | None) -> Storage:
    """Return the host storage for results that are copied to a device: the caller's, or pinned memory."""
    return PinnedMemory() if storage is None else storage


def on_its_way(
    config: CUDAConfig | None, storage: Storage | None, purpose: str
) -> tuple[Callable[[CPUBuffer], Buffer], Storage | None]:
    """Return a function that moves a buffer to its destination, and the storage to make the buffer in.

    Raises:
        TransferError: There is no device.
        ValueError: There are devices, but none of this number.
    """
    if config is None:
        return lambda buffer: buffer, storage
    device = open_device(config, purpose)
    return lambda buffer: copied(buffer, device, config), staging(storage)


def copied(buffer: CPUBuffer, device: Device, config: CUDAConfig) -> CUDABuffer:
    """Copy a buffer to a device, and release its host memory when the copy is done.

    Raises:
        TransferError: The device's memory is full, or the copy fails.
        ValueError: The buffer was released.
    """
    # Released at once, because _to_device keeps memory that the copy still reads.
    with buffer:
        return _to_device(buffer.array, device, config, **buffer.metadata)


class _CopyErrors:
    """Translate errors of a copy to TransferError, with the description of what was copied."""

    # Not a generator: on CPython 3.12 and 3.13, its frame and the error form a cycle, which keeps the source.

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, DriverError):
            raise TransferError(f"copying {self._what} failed: {error}") from error
        # Any other TransferError has a more precise message.
        if isinstance(error, RuntimeError) and not isinstance(error, TransferError):
            name = type(error).__name__
            raise TransferError(f"copying {self._what} failed: {name}: {error}") from error


def transfer_buffer_cpu(buffer: CUDABuffer, *, storage: Storage | None = None) -> CPUBuffer:
    """Copy a buffer from a CUDA device to host memory, and wait for the copy.

    Args:
        buffer: From :func:`transfer_buffer` or a function with ``cuda=``.
        storage: Memory to fill; by default, new pageable memory.

    Returns:
        A buffer in host memory, a copy, of the same shape and type, with the same ``failures`` and
        ``indices``.

    Raises:
        TransferError: The copy fails, or CUDA cannot be used in this process.
        StorageTooSmallError: The buffer does not fit into the storage.
        ValueError: The buffer was released.
        TypeError: ``buffer`` is not a :class:`CUDABuffer`.

    Thread safety: safe.
    """
    if not isinstance(buffer, CUDABuffer):
        raise TypeError(f"transfer_buffer_cpu takes a CUDABuffer, not {type(buffer).__name__}")
    device = open_device(cuda_config(buffer.device_index), "transfer_buffer_cpu")
    target = new_array(buffer.shape, buffer.dtype.str, storage)
    with _CopyErrors(f"{buffer.nbytes} bytes from {buffer.device}"):
        buffer.wait_on(device.stream)
        device.copy("DtoH", target, in_place(buffer.array))
        device.record().synchronize()
    return CPUBuffer(target, **buffer.metadata)


def transfer_tensor(batch: T, /, *, cuda_config: CUDAConfig | SupportsIndex | None = None) -> T:
    """Copy the tensors of a batch to a CUDA device, on a stream separate from that of the computation.

    Use it as a stage of a pipeline. Tensors are pinned if necessary, and copied on a stream of the calling
    thread. They are ready when this returns.

    Args:
        batch: A PyTorch tensor on the CPU, a :class:`CPUBuffer`, or a list, tuple, named tuple, mapping or
            dataclass of these, nested in any way. Other values, including tensors on a device, are kept.
        cuda_config: The device, as a number or a config; the config's allocator applies only to buffers.
            ``None``: the device in the environment variable ``LOCAL_RANK``, as set by ``torchrun``, else 0.

    Returns:
        New containers, a dict for each mapping, with tensors on the device and :class:`CUDABuffer` for
        buffers. Tensors may be used on the default stream and on the caller's current stream; call
        ``tensor.record_stream`` for others. Without CUDA, ``batch`` itself, with one warning.

    Raises:
        TransferError: CUDA is present but cannot be used: the process was forked, the memory is full, the
            stream belongs to another device, or CuPy has CUDA but PyTorch does not.
        ValueError: There is no device of this number, or ``LOCAL_RANK`` is not a number.
        TypeError: ``cuda_config`` is not a config.

    Thread safety: safe.
    """

    def move(value: Any, device: Device, config: CUDAConfig) -> Any:
        if isinstance(value, CPUBuffer):
            return _to_device(value.array, device, config, **value.metadata)
        if _device_type(value) == "cpu":
            return _tensor_in(_with_torch(device), value)
        return value

    return _moved(batch, move, cuda_config, "transfer_tensor", "to")


def transfer_tensor_d2h(
    batch: T, /, *, cuda_config: CUDAConfig | SupportsIndex | None = None, event: Any = None
) -> T:
    """Copy the tensors of a batch from a CUDA device to pinned host memory, and wait for the copies.

    The copies run on a stream of the calling thread, or on that of the config. The stream first waits for the
    caller's current stream, or for ``event``.

    Args:
        batch: A tensor on the device, a :class:`CUDABuffer`, or containers of these, as for
            :func:`transfer_tensor`. Other values are kept.
        cuda_config: The device, as for :func:`transfer_tensor`.
        event: A ``torch.cuda.Event`` recorded after the work that made the tensors, if that ran on another
            stream than the current one.

    Returns:
        New containers, a dict for each mapping, with tensors in pinned memory and :class:`CPUBuffer` for
        buffers. Without CUDA, ``batch`` itself, with one warning.

    Raises:
        TransferError: CUDA cannot be used, as for :func:`transfer_tensor`, or a tensor is on another device.
        ValueError: There is no device of this number, or ``LOCAL_RANK`` is not a number.
        TypeError: ``cuda_config`` is not a config.

    Thread safety: safe.
    """

    def move(value: Any, device: Device, _config: CUDAConfig) -> Any:
        if isinstance(value, CUDABuffer):
            return transfer_buffer_cpu(value)
        if _device_type(value) == "cuda":
            return _tensor_out(_with_torch(device), value, event)
        return value

    return _moved(batch, move, cuda_config, "transfer_tensor_d2h", "from")


def _moved(
    batch: T,
    move: Callable[[Any, Device, CUDAConfig], Any],
    cuda_config: CUDAConfig | SupportsIndex | None,
    function: str,
    way: str,
) -> T:
    """Move the values of a batch and wait for all copies. Without CUDA, return the batch itself."""
    if cuda_config is None:
        # torchrun starts one process for each device.
        cuda_config = int_in_environment("LOCAL_RANK", "the number of a device") or 0
    config = as_cuda_config(cuda_config)
    HISTORY.check(function)
    package, reason = cuda_library()
    if package is None:
        warn_once(
            "transfers",
            f"{function} copies nothing, because no CUDA device can be used here: {reason}",
        )
        return batch
    device = open_device(config, function)
    with _CopyErrors(f"a batch {way} CUDA device {device.index}"):
        result: T = map_nested(batch, lambda value: move(value, device, config))
        device.record().synchronize()
    return result


def _device_type(value: Any) -> str | None:
    """Return the device type of a tensor, such as ``"cpu"`` or ``"cuda"``; ``None`` for other values."""
    # If PyTorch was not imported, there are no tensors, so it is not imported here.
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    return str(value.device.type) if is_tensor else None


def _with_torch(device: Device) -> Device:
    if device.torch is not None:
        return device
    raise TransferError(
        "this PyTorch finds no CUDA device, although CuPy does, so it can hold no tensors there. Install "
        "PyTorch with CUDA, or transfer buffers: transfer_buffer"
    )


def _tensor_in(device: Device, tensor: Any) -> Any:
    """Begin to copy a tensor of any type to the device, through pinned memory.

    Returns:
        The copy, for use on the default stream and the caller's current stream.
    """
    cuda = device.torch.cuda
    readers = cuda.default_stream(device.index), cuda.current_stream(device.index)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    nbytes = tensor.numel() * tensor.element_size()
    with MemoryErrors(device, nbytes), cuda.stream(device.torch_stream(device.stream)):
        result = pinned.to(f"cuda:{device.index}", non_blocking=True)
    for reader in readers:
        # Otherwise the pool would reuse the memory for the next copy while these streams still read it.
        result.record_stream(reader)
    return result


def _tensor_out(device: Device, tensor: Any, event: Any) -> Any:
    """Begin to copy a tensor to pinned memory, after the event or the caller's current stream.

    Raises:
        TransferError: The tensor is on another device.
    """
    torch = device.torch
    if tensor.device.index != device.index:
        raise TransferError(
            f"a tensor lies on CUDA device {tensor.device.index}, and device {device.index} was asked for: "
            f"cuda_config={tensor.device.index}"
        )
    if event is None:
        event = torch.cuda.current_stream(device.index).record_event()
    own = device.torch_stream(device.stream)
    with torch.cuda.stream(own):
        own.wait_event(event)
        result = torch.empty_like(tensor, device="cpu", pin_memory=True)
        result.copy_(tensor, non_blocking=True)
    tensor.record_stream(own)
    return result
