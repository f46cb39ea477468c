"""A stream of a device through PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from spdl_media._devices.device import (
    LEGACY_DEFAULT,
    HostArray,
    freed_after,
    one_name,
    out_of_memory_said,
    own_address,
)
from spdl_media._devices.memory import Block, Event, Guard, size_of
from spdl_media.config import Allocator
from spdl_media.errors import TransferError

# PyTorch has 32 streams a device and gives them in turn, so a thread keeps its own.
_OWN = threading.local()


class TorchDevice:
    """A stream of a device. Its arrays are tensors.

    Args:
        torch: The module.
        index: Number of the device.
        stream: Address of a ``cudaStream_t``; ``None``: one that belongs to the calling thread.

    Thread safety: safe.
    """

    __slots__ = ("_stream", "_torch", "index", "stream")

    def __init__(self, torch: Any, index: int, stream: int | None = None) -> None:
        self._torch = torch
        self.index = index
        self._stream = self._own_stream() if stream is None else self._stream_at(stream)
        self.stream = int(self._stream.cuda_stream) if stream is None else stream

    def on(self, stream: int) -> TorchDevice:
        """Another stream of the same device."""
        return TorchDevice(self._torch, self.index, stream)

    def _own_stream(self) -> Any:
        streams: dict[int, Any] = _OWN.__dict__.setdefault("streams", {})
        if self.index not in streams:
            streams[self.index] = self._torch.cuda.Stream(device=self.index)
        return streams[self.index]

    def _stream_at(self, address: int) -> Any:
        # ExternalStream(0) is not the default stream, but one out of PyTorch's pool.
        if one_name(address) == LEGACY_DEFAULT:
            return self._torch.cuda.default_stream(self.index)
        return self._torch.cuda.ExternalStream(address, device=self.index)

    def empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], allocator: Allocator | None = None
    ) -> Block:
        """Memory for a tensor, from PyTorch's pool or the allocator."""
        kind = self._type(dtype)
        nbytes, torch = size_of(shape, dtype), self._torch
        with out_of_memory_said(self, nbytes), torch.cuda.stream(self._stream):
            if allocator is None or not nbytes:
                tensor = torch.empty(tuple(shape), dtype=kind, device=self._name)
                return Block(tensor, partial(self._record_use, tensor))
            address = own_address(allocator, nbytes, self)
            free = freed_after(self, partial(allocator[1], address))
            guard = Guard(address, shape, dtype, free)
            return Block(torch.as_tensor(guard, device=self._name), guard.used_on)

    @property
    def _name(self) -> str:
        return f"cuda:{self.index}"

    def _record_use(self, tensor: Any, stream: int) -> None:
        tensor.record_stream(self._stream_at(stream))

    def _type(self, dtype: np.dtype[Any]) -> Any:
        try:
            return self._torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError as error:
            raise TransferError(
                f"PyTorch has no tensors of {dtype}, so such an array cannot be copied to CUDA device "
                f"{self.index}: {error}"
            ) from error

    def view(self, array: Any) -> Any:
        """Another library's array on this device, without a copy. The stream waits for what fills it."""
        with self._torch.cuda.stream(self._stream):
            return self._torch.from_dlpack(array)

    def tensor_in(self, tensor: Any) -> Any:
        """Begin to copy a tensor of any type to the device, through pinned memory.

        Returns:
            The copy, for use on the default stream and the one that the caller has made current.
        """
        torch = self._torch
        readers = torch.cuda.default_stream(self.index), torch.cuda.current_stream(self.index)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        nbytes = tensor.numel() * tensor.element_size()
        with out_of_memory_said(self, nbytes), torch.cuda.stream(self._stream):
            result = pinned.to(self._name, non_blocking=True)
        for reader in readers:
            # Or the pool would give the memory to the next copy while they still read it.
            result.record_stream(reader)
        return result

    def tensor_out(self, tensor: Any, event: Any) -> Any:
        """Begin to copy a tensor to pinned memory, behind the event or the caller's current stream.

        Raises:
            TransferError: It lies on another device.
        """
        torch = self._torch
        if tensor.device.index != self.index:
            raise TransferError(
                f"a tensor lies on CUDA device {tensor.device.index}, and device {self.index} was asked for: "
                f"cuda_config={tensor.device.index}"
            )
        if event is None:
            event = torch.cuda.current_stream(self.index).record_event()
        self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            result = torch.empty_like(tensor, device="cpu", pin_memory=True)
            result.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return result

    def copy_in(self, target: Any, source: HostArray) -> None:
        """Begin to copy an array to the device."""
        with self._torch.cuda.stream(self._stream):
            target.copy_(self._torch.from_numpy(source), non_blocking=True)

    def copy_out(self, target: HostArray, source: Any) -> None:
        """Begin to copy a tensor to host memory."""
        with self._torch.cuda.stream(self._stream):
            self._torch.from_numpy(target).copy_(source, non_blocking=True)

    def record(self) -> Event:
        """An event behind all that was put on the stream."""
        event: Event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)  # type: ignore[attr-defined]  # an event of PyTorch
        return event

    def is_done(self, event: Any) -> bool:
        """Whether the event has been reached."""
        with self._torch.cuda.device(self.index):
            return bool(event.query())

    def wait(self, event: Any) -> None:
        """Wait on the host for the event, in any thread."""
        # Without a device of its own a thread would start one on device 0, which takes memory there.
        with self._torch.cuda.device(self.index):
            event.synchronize()

    def wait_and_stay(self, event: Any) -> None:
        """The same in a thread that works for no other device: PyTorch starts none when it goes back."""
        self.wait(event)

    def make_wait(self, stream: int, event: Any) -> None:
        """Let later work on another stream wait for the event."""
        self._stream_at(stream).wait_event(event)

    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all of them."""
        free, total = self._torch.cuda.mem_get_info(self.index)
        return int(free), int(total)
