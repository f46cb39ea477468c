"""Copies between host memory and CUDA devices, in the background where the memory is pinned.

A copy is put on a stream and the call returns. The source is kept until the copy has read it, and with it the
lease of its :class:`~spdl_media.StoragePool`; the result carries the event behind the copy, for which whoever
takes it waits on its own stream.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, SupportsIndex, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from spdl_media.arrays import map_nested
from spdl_media.buffer import Buffer, BufferMetadata, CPUBuffer, CUDABuffer
from spdl_media.config import CUDAConfig, as_cuda_config, cuda_config
from spdl_media.cuda_driver import HISTORY, DriverError, Event, is_pinned
from spdl_media.devices import Device, cuda_library, open_device, out_of_memory_said
from spdl_media.errors import TransferError
from spdl_media.handover import KEEPER, Block, Handover, in_place
from spdl_media.storage import PinnedMemory, Storage, lease_memory

__all__ = ("transfer_buffer", "transfer_buffer_cpu", "transfer_tensor", "transfer_tensor_d2h")

T = TypeVar("T")
Array = npt.NDArray[Any]


def transfer_buffer(buffer: CPUBuffer, *, cuda_config: CUDAConfig | SupportsIndex) -> CUDABuffer:
    """Copy a buffer to a CUDA device.

    From pinned memory the copy runs in the background, behind what the stream has to do already. The source
    is kept until it is done: its storage or pool gives the block to nobody else, even if the buffer is
    dropped or released at once. Do not write to it until :meth:`CUDABuffer.synchronize`. From pageable memory
    it goes piece by piece through one pinned block, and the call returns when the last piece is in that.

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
        TypeError: ``buffer`` is no :class:`CPUBuffer`, or ``cuda_config`` no config.

    Thread safety: safe. Threads that share a stream copy one after the other.
    """
    if not isinstance(buffer, CPUBuffer):
        raise TypeError(f"transfer_buffer takes a CPUBuffer, not {type(buffer).__name__}")
    config = as_cuda_config(cuda_config)
    device = open_device(config, "transfer_buffer")
    return _to_device(buffer.array, device, config, **buffer.metadata)


def _to_device(
    array: Array, device: Device, config: CUDAConfig, **metadata: Unpack[BufferMetadata]
) -> CUDABuffer:
    """Begin to copy an array in host memory to the stream of a device.

    Raises:
        TransferError: The device's memory is full, or the copy fails.
    """
    # Only C-contiguous memory goes in one piece.
    source = np.require(array, requirements="C")
    with _said(f"{source.nbytes} bytes to CUDA device {device.index}"):
        block = device.empty(source.shape, source.dtype, config.allocator)
        is_direct = source.nbytes <= _SMALL or is_pinned(device.index, source.ctypes.data)
        if is_direct:
            device.copy("HtoD", in_place(block.array), source)
        else:
            _WINDOW.copy(device, block.array, source)
        ready = Handover(device.index, device.stream, block.used_on)
        if is_direct and not ready.event.is_done():
            # The copy reads the source in the background, so that must live until it is done.
            KEEPER.keep((device.index, device.stream), ready.event, source)
    return CUDABuffer(
        block.array, source.shape, source.dtype, device.index, ready=ready, **metadata
    )


def buffer_on_stream(
    block: Block, device: Device, **metadata: Unpack[BufferMetadata]
) -> CUDABuffer:
    """The buffer over an array that is ready when the device's stream gets where it is now."""
    interface = block.array.__cuda_array_interface__
    shape, dtype = interface["shape"], interface["typestr"]
    ready = Handover(device.index, device.stream, block.used_on)
    return CUDABuffer(block.array, shape, dtype, device.index, ready=ready, **metadata)


class _Window:
    """Pinned memory in two halves, through which pageable memory goes to devices piece by piece.

    A pinned copy of a large batch would take twice its memory at worst, for good: PyTorch and CuPy round
    up to powers of two, and keep what they have.

    Thread safety: safe; one array at a time.
    """

    def __init__(self, half: int = 8 << 20) -> None:
        self._half = half
        self._lock = threading.Lock()
        self._memory: Array | None = None
        self._events: list[Event | None] = [None, None]

    def copy(self, device: Device, target: Any, source: Array) -> None:
        """Begin to copy an array to one of the device's; the source may be dropped when this returns."""
        flat, there = (one.reshape(-1).view(np.uint8) for one in (source, in_place(target)))
        with self._lock:
            if self._memory is None:
                self._memory = PinnedMemory().acquire(2 * self._half).reshape(2, -1)
            for start in range(0, len(flat), self._half):
                place = slice(start, start + self._half)
                side, part = start // self._half % 2, flat[place]
                if (before := self._events[side]) is not None:
                    with suppress(TransferError):  # a device that has failed reads nothing any more
                        before.synchronize()
                piece = self._memory[side, : len(part)]
                piece[...] = part
                device.copy("HtoD", there[place], piece)
                self._events[side] = device.record()


_WINDOW = _Window()
# The driver itself takes a copy of so many bytes at once.
_SMALL = 1 << 16


def staging(storage: Storage | None) -> Storage:
    """The memory that arrays pass through on their way: the caller's, or pinned memory."""
    return PinnedMemory() if storage is None else storage


def on_its_way(
    config: CUDAConfig | None, storage: Storage | None, purpose: str
) -> tuple[Callable[[CPUBuffer], Buffer], Storage | None]:
    """Return a function that moves a buffer to where it is wanted, and the memory to make it in.

    Raises:
        TransferError: There is no device.
        ValueError: There are devices, but not this one.
    """
    if config is None:
        return lambda buffer: buffer, storage
    device = open_device(config, purpose)
    return lambda buffer: copied(buffer, device, config), staging(storage)


def copied(buffer: CPUBuffer, device: Device, config: CUDAConfig) -> CUDABuffer:
    """The buffer on the device. Its memory in the host goes back when the copy is done.

    Raises:
        TransferError: The device's memory is full, or the copy fails.
        ValueError: The buffer was released.
    """
    # Released at once: whatever the copy still reads is kept for it.
    with buffer:
        return _to_device(buffer.array, device, config, **buffer.metadata)


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Say what was being copied when a library fails."""
    try:
        yield
    except DriverError as error:
        raise TransferError(f"copying {what} failed: {error}") from error
    except TransferError:  # says more
        raise
    except RuntimeError as error:
        raise TransferError(f"copying {what} failed: {type(error).__name__}: {error}") from error


def transfer_buffer_cpu(buffer: CUDABuffer, *, storage: Storage | None = None) -> CPUBuffer:
    """Copy a buffer on a CUDA device to host memory, and wait for it.

    Args:
        buffer: Of :func:`transfer_buffer` or a function with ``cuda=``.
        storage: Memory to fill; fresh pageable memory without one.

    Returns:
        A buffer in host memory, a copy, of the same shape and type, with the same ``failures`` and
        ``indices``.

    Raises:
        TransferError: The copy fails, or CUDA cannot be used in this process.
        StorageTooSmallError: It does not fit into the storage.
        ValueError: The buffer was released.
        TypeError: ``buffer`` is no :class:`CUDABuffer`.

    Thread safety: safe.
    """
    if not isinstance(buffer, CUDABuffer):
        raise TypeError(f"transfer_buffer_cpu takes a CUDABuffer, not {type(buffer).__name__}")
    device = open_device(cuda_config(buffer.device_index), "transfer_buffer_cpu")
    memory = lease_memory(buffer.nbytes, storage)[: buffer.nbytes]
    target = memory.view(buffer.dtype).reshape(buffer.shape)
    with _said(f"{buffer.nbytes} bytes from {buffer.device}"):
        buffer.wait_on(device.stream)
        device.copy("DtoH", target, in_place(buffer.array))
        device.record().synchronize()
    return CPUBuffer(target, **buffer.metadata)


def transfer_tensor(batch: T, /, *, cuda_config: CUDAConfig | SupportsIndex | None = None) -> T:
    """Copy the tensors of a batch to a CUDA device, on a stream beside that of the computation.

    It is meant for one stage of a pipeline. Tensors are pinned first, if they are not, copied on a stream of
    the calling thread's own, and ready when this returns.

    Args:
        batch: A tensor of PyTorch on the CPU, a :class:`CPUBuffer`, or a list, tuple, named tuple, mapping or
            dataclass of such, nested in any way. All else in it, tensors on a device included, is passed on.
        cuda_config: The device, its number or a config, whose allocator counts for buffers alone. ``None``:
            the one that the environment variable ``LOCAL_RANK`` names, as ``torchrun`` sets it, or 0.

    Returns:
        The same containers, with tensors on the device and :class:`CUDABuffer` for buffers. Tensors may be
        used on the default stream and on the one that the caller has made current; tell PyTorch of others
        (``tensor.record_stream``). Without CUDA ``batch`` itself, with one warning.

    Raises:
        TransferError: CUDA is there but cannot be used: the process was forked, the memory is full, the
            stream is of another device, or PyTorch has no CUDA and only CuPy does.
        ValueError: There is no device of this number, or ``LOCAL_RANK`` is no number.
        TypeError: ``cuda_config`` is no config.

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
    """Copy the tensors of a batch from a CUDA device to pinned host memory, and wait for them.

    The copies are made on a stream of the calling thread's own, or the config's, which first waits for the
    caller's current stream, or for ``event``.

    Args:
        batch: A tensor on the device, a :class:`CUDABuffer`, or containers of such, as for
            :func:`transfer_tensor`. All else in it is passed on.
        cuda_config: As in :func:`transfer_tensor`.
        event: A ``torch.cuda.Event`` behind the work that made the tensors, if that was done on another
            stream than the current one.

    Returns:
        The same containers, with tensors in pinned memory and :class:`CPUBuffer` for buffers. Without CUDA
        ``batch`` itself, with one warning.

    Raises:
        TransferError: As in :func:`transfer_tensor`, or a tensor lies on another device.
        ValueError: As in :func:`transfer_tensor`.
        TypeError: As in :func:`transfer_tensor`.

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
    """The batch with its leaves moved, when all of them are there; itself where there is no CUDA."""
    # torchrun starts one process for each device.
    config = as_cuda_config(_local_rank() if cuda_config is None else cuda_config)
    HISTORY.check(function)
    package, reason = cuda_library()
    if package is None:
        _warn_once(f"{function} copies nothing, because no CUDA device can be used here: {reason}")
        return batch
    device = open_device(config, function)
    with _said(f"a batch {way} CUDA device {device.index}"):
        result: T = map_nested(batch, lambda value: move(value, device, config))
        device.record().synchronize()
    return result


def _device_type(value: Any) -> str | None:
    """``"cpu"`` or ``"cuda"`` for tensors."""
    # Without PyTorch there are no tensors, so nothing has to import it.
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
        The copy, for use on the default stream and the one that the caller has made current.
    """
    cuda = device.torch.cuda
    readers = cuda.default_stream(device.index), cuda.current_stream(device.index)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    nbytes = tensor.numel() * tensor.element_size()
    with out_of_memory_said(device, nbytes), cuda.stream(device.torch_stream(device.stream)):
        result = pinned.to(f"cuda:{device.index}", non_blocking=True)
    for reader in readers:
        # Or the pool would give the memory to the next copy while they still read it.
        result.record_stream(reader)
    return result


def _tensor_out(device: Device, tensor: Any, event: Any) -> Any:
    """Begin to copy a tensor to pinned memory, behind the event or the caller's current stream.

    Raises:
        TransferError: It lies on another device.
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


_warned = False


def _warn_once(message: str) -> None:
    global _warned  # noqa: PLW0603  # one warning a process, as for memory that cannot be pinned
    if not _warned:
        _warned = True
        # Past _moved and the public function, to their caller.
        warnings.warn(message, UserWarning, stacklevel=4)


def _local_rank() -> int:
    """The number of the device for this process, as ``torchrun`` and others set it.

    Raises:
        ValueError: It is no number.
    """
    text = os.environ.get("LOCAL_RANK", "0")
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable LOCAL_RANK must be the number of a device, not {text!r}"
        ) from None
