"""A stream of a device through CuPy, which also runs kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np

from spdl_media._devices.device import (
    LEGACY_DEFAULT,
    PER_THREAD_DEFAULT,
    HostArray,
    freed_after,
    one_name,
    out_of_memory_said,
    own_address,
)
from spdl_media._devices.memory import Block, Event, Guard, size_of
from spdl_media._devices.own_streams import OwnStreams
from spdl_media.config import Allocator

Dims: TypeAlias = tuple[int, int, int]

# CuPy destroys a stream with its object.
_OWN = OwnStreams()


class CupyDevice:
    """A stream of a device. Its arrays are CuPy's.

    Args:
        cupy: The module.
        index: Number of the device.
        stream: Address of a ``cudaStream_t``; ``None``: CuPy's current stream in the calling thread,
            whichever that is at the time.

    Thread safety: safe.
    """

    __slots__ = ("_cupy", "_stream", "index")

    def __init__(self, cupy: Any, index: int, stream: int | None = None) -> None:
        self._cupy = cupy
        self.index = index
        self._stream = stream

    @property
    def stream(self) -> int:
        """Address of the stream."""
        return int(self._current().ptr) if self._stream is None else self._stream

    def on(self, stream: int) -> CupyDevice:
        """Another stream of the same device."""
        return CupyDevice(self._cupy, self.index, stream)

    def on_own_stream(self) -> CupyDevice:
        """A stream that belongs to the calling thread."""
        return self.on(int(_OWN.of_thread(self.index, self._new_stream).ptr))

    def _new_stream(self) -> Any:
        with self._cupy.cuda.Device(self.index):
            return self._cupy.cuda.Stream(non_blocking=True)

    def _current(self) -> Any:
        with self._cupy.cuda.Device(self.index):
            return self._cupy.cuda.get_current_stream()

    def _stream_at(self, address: int) -> Any:
        cuda = self._cupy.cuda
        if one_name(address) == LEGACY_DEFAULT:
            return cuda.Stream.null
        if address == PER_THREAD_DEFAULT:
            return cuda.Stream.ptds
        if not hasattr(cuda.Stream, "from_external"):  # CuPy 13; later ones warn of ExternalStream
            return cuda.ExternalStream(address, self.index)
        # It is of the device that is the current one, which all callers have set.
        return _foreign_streams(cuda.Stream).from_external(_Address(address))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make device and stream the ones that CuPy uses in this thread."""
        with self._cupy.cuda.Device(self.index):
            if self._stream is None:
                yield
            else:
                with self._stream_at(self._stream):
                    yield

    def empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], allocator: Allocator | None = None
    ) -> Block:
        """Memory for an array, from CuPy's pool or the allocator."""
        dtype = np.dtype(dtype)
        nbytes = size_of(shape, dtype)
        with out_of_memory_said(self, nbytes), self.active():
            if allocator is None or not nbytes:
                return self.guarded(self._cupy.empty(tuple(shape), dtype))
            address = own_address(allocator, nbytes, self)
            return self._over(address, shape, dtype, partial(allocator[1], address))

    def guarded(self, array: Any) -> Block:
        """The same array, whose memory goes back to CuPy's pool only after the streams that read it."""
        interface = array.__cuda_array_interface__
        kept = [array]
        return self._over(
            interface["data"][0],
            interface["shape"],
            np.dtype(interface["typestr"]),
            kept.clear,
            interface.get("strides"),
        )

    def _over(
        self,
        address: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        free: Any,
        strides: tuple[int, ...] | None = None,
    ) -> Block:
        release = freed_after(self.on(self.stream), free)
        guard = Guard(address, shape, dtype, release, strides)
        with self.active():
            return Block(self._cupy.asarray(guard), guard.used_on)

    def view(self, array: Any) -> Any:
        """Another library's array on this device, without a copy. The stream waits for what fills it.

        Raises:
            ValueError: It lies on another device.
        """
        with self.active():
            # Through the array interface CuPy would wait on the host.
            if callable(getattr(array, "__dlpack_device__", None)):
                view = self._cupy.from_dlpack(array)
            else:
                view = self._cupy.asarray(array)
        if view.device.id != self.index:
            raise ValueError(
                f"an array lies on CUDA device {view.device.id}, and device {self.index} is to work on it. "
                "Copy it there first, or name its own device"
            )
        return view

    def upload(self, array: HostArray) -> Any:
        """A copy of an array in host memory; the original may be dropped at once."""
        with self.active():
            return self._cupy.asarray(array)

    def launch(
        self,
        source: str,
        name: str,
        options: tuple[str, ...],
        grid: Dims,
        block: Dims,
        argument: HostArray,
    ) -> None:
        """Run a kernel that takes one struct by value, compiled at its first use on a device."""
        with self.active():
            _kernel(self._cupy, source, name, options)(grid, block, (argument,))

    def synchronize(self) -> None:
        """Wait for the stream."""
        with self.active():
            self._cupy.cuda.get_current_stream().synchronize()

    def copy_in(self, target: Any, source: HostArray) -> None:
        """Begin to copy an array to the device."""
        self._copy(target.data.ptr, source.ctypes.data, source.nbytes, "memcpyHostToDevice")

    def copy_out(self, target: HostArray, source: Any) -> None:
        """Begin to copy an array to host memory."""
        self._copy(target.ctypes.data, source.data.ptr, target.nbytes, "memcpyDeviceToHost")

    def _copy(self, target: int, source: int, nbytes: int, kind: str) -> None:
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self.index):
            runtime.memcpyAsync(target, source, nbytes, getattr(runtime, kind), self.stream)

    def record(self) -> Event:
        """An event behind all that was put on the stream."""
        with self.active():
            event: Event = self._cupy.cuda.Event(block=True, disable_timing=True)
            event.record()  # type: ignore[attr-defined]  # an event of CuPy
        return event

    def is_done(self, event: Any) -> bool:
        """Whether the event has been reached."""
        with self._cupy.cuda.Device(self.index):
            return bool(event.done)

    def wait(self, event: Any) -> None:
        """Wait on the host for the event, in any thread."""
        with self._cupy.cuda.Device(self.index):
            event.synchronize()

    def wait_and_stay(self, event: Any) -> None:
        """Wait on the host for the event, in a thread that works for no other device."""
        # To go back to the device that was current there would start it, and take its memory.
        self._cupy.cuda.Device(self.index).use()
        event.synchronize()

    def make_wait(self, stream: int, event: Any) -> None:
        """Let later work on another stream wait for the event."""
        with self._cupy.cuda.Device(self.index):
            self._stream_at(stream).wait_event(event)

    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all of them."""
        with self._cupy.cuda.Device(self.index):
            free, total = self._cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)


def check_headers(cupy: Any) -> None:
    """See that CuPy finds CUDA's headers, without which it compiles no kernel. It needs no device.

    Raises:
        RuntimeError: It does not.
    """
    # Of CuPy 14, and not public. Others are taken at their word.
    core = getattr(getattr(cupy, "_core", None), "core", None)
    assemble = getattr(core, "assemble_cupy_compiler_options", None)
    try:
        if assemble is not None:
            assemble(())
    except Exception as error:
        raise RuntimeError(without_headers(str(error))) from error


def without_headers(reason: str) -> str:
    """What to say where CUDA's headers are missing."""
    return (
        f"CuPy compiles no kernel without CUDA's headers ({reason.rstrip('.')}). Install them: pip install "
        '"cupy-cuda12x[ctk]" (or "cupy-cuda13x[ctk]", as CuPy is)'
    )


class _Address:
    """The address of a stream in the form that CuPy takes streams of others in."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@lru_cache(maxsize=4)
def _foreign_streams(streams: Any) -> Any:
    """CuPy's class of streams, but for those that are another's to destroy: CuPy 14.0 would."""
    return type("ForeignStream", (streams,), {"__del__": lambda _: None})


@lru_cache(maxsize=16)
def _kernel(cupy: Any, source: str, name: str, options: tuple[str, ...]) -> Any:
    # It keeps a compiled form for each device.
    return cupy.RawKernel(source, name, options=options)
