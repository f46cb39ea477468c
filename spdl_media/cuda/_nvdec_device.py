"""What decoding video needs of a device.

NumPy stands in for a device on the host, so that all of it runs without one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, SupportsIndex

import numpy as np

from spdl_media._devices.cupy_device import CupyDevice
from spdl_media._devices.device import no_such_device, out_of_memory_said
from spdl_media._devices.forks import HISTORY
from spdl_media._devices.memory import size_of
from spdl_media._optional import require
from spdl_media.buffer import Buffer, CPUBuffer
from spdl_media.codec import VideoCodec
from spdl_media.config import CUDAConfig, DecodeConfig
from spdl_media.cuda._nvdec_hwaccel import device_error, open_on_device
from spdl_media.cuda._nvdec_planes import NO_COLORS, Colors, DeviceKind, Plane
from spdl_media.cuda._owner import buffer_on_stream
from spdl_media.cuda._streams import check_stream
from spdl_media.cuda.slots import SlotDevice

_PURPOSE = "decoding video on the GPU"


class VideoDevice:
    """A device under CuPy, or the host under NumPy, which has the same functions.

    Work goes to CuPy's current stream. Arrays are the library's own.

    Args:
        library: The module ``cupy`` or ``numpy``.
        index: Number of the device.
        stream: Address of a ``cudaStream_t`` to work on instead of CuPy's current stream.

    Thread safety: safe; each thread has a current stream of its own.
    """

    def __init__(self, library: ModuleType, index: int = 0, stream: int | None = None) -> None:
        self._xp: Any = library
        self.index = index
        self._stream = stream
        self.kind: DeviceKind = "cpu" if library is np else "cuda"

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A new C-contiguous array."""
        with self._allocating(shape, dtype):
            return self._xp.empty(tuple(shape), dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """A new C-contiguous array of zeros."""
        with self._allocating(shape, dtype):
            return self._xp.zeros(tuple(shape), dtype)

    def view(self, plane: Plane) -> Any:
        """The plane as an array, in place."""
        with self._current():
            return self._xp.asarray(plane)

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        """A copy of a host array on the device."""
        with self._allocating(array.shape, array.dtype):
            return self._xp.array(array)

    def copy(self, target: Any, source: Any) -> None:
        """Copy values into a view."""
        with self._current():
            target[...] = source

    def flip(self, array: Any, axes: Sequence[int]) -> Any:
        """A view with these axes reversed."""
        return self._xp.flip(array, tuple(axes))

    def swap(self, array: Any, first: int, second: int) -> Any:
        """A view with two axes exchanged."""
        return self._xp.swapaxes(array, first, second)

    def take(self, array: Any, positions: Sequence[int]) -> Any:
        """A copy that has these rows of the first axis, in this order."""
        with self._allocating((len(positions), *array.shape[1:]), array.dtype):
            return self._xp.take(array, self._xp.asarray(list(positions), "int64"), axis=0)

    def floats(self, array: Any) -> Any:
        """A copy as float32."""
        with self._current():
            return array.astype("float32")

    def rounded(self, array: Any, dtype: Any) -> Any:
        """A copy as whole numbers that fit the type."""
        with self._current():
            limits = np.iinfo(dtype)
            return self._xp.clip(self._xp.rint(array), limits.min, limits.max).astype(dtype)

    def adopt(self, tensor: Any) -> Any:
        """Another library's array, in place; the current stream waits for what fills it."""
        with self._current():
            return self._xp.from_dlpack(tensor)

    def open_decoder(self, codec: VideoCodec, config: DecodeConfig, source: str) -> Any:
        """FFmpeg's decoder on this device; see :func:`open_on_device`, whose errors it raises."""
        with self._current():
            if self.kind == "cuda":
                # Does nothing but make the primary context, and the current one of this thread: CuPy leaves a
                # thread that has used no CUDA as it is.
                self._xp.cuda.runtime.free(0)
            return open_on_device(codec, config, source, self.index)

    @property
    def slots(self) -> SlotDevice:
        """The same device, as DALI's operators know it."""
        return SlotDevice("cpu") if self.kind == "cpu" else SlotDevice("gpu", self.index)

    @contextmanager
    def _current(self) -> Iterator[None]:
        if self.kind == "cpu":
            yield
            return
        with CupyDevice(self._xp, self.index, self._stream).active():
            yield

    @contextmanager
    def _allocating(self, shape: Sequence[int], dtype: Any) -> Iterator[None]:
        """A block that makes an array; where there is no memory for it, the error has the sizes."""
        with self._current():
            if self.kind == "cpu":
                yield
                return
            device = CupyDevice(self._xp, self.index, self._stream)
            with out_of_memory_said(device, size_of(shape, np.dtype(dtype))):
                yield

    def buffer(self, array: Any, colors: Colors = NO_COLORS) -> Buffer:
        """The buffer over an array that is ready when the current stream gets where it is now.

        Args:
            array: On the device.
            colors: What its YUV means.
        """
        matrix, range = colors
        if self.kind == "cpu":
            return CPUBuffer(np.asarray(array), colorspace=matrix, color_range=range)
        device = CupyDevice(self._xp, self.index, self._stream)
        block = device.guarded(array)
        return buffer_on_stream(block, device, colorspace=matrix, color_range=range)

    @contextmanager
    def after_decoder(self) -> Iterator[None]:
        """A context whose work follows the decoder's, and which the decoder's later work follows.

        FFmpeg puts frames on the device's default stream, and uses their memory again once they are let go.
        So the current stream waits for the default one on the way in, and the other way round on the way
        out; the host waits for nothing. All frames that one packet gives need it once.
        """
        if self.kind == "cpu":
            yield
            return
        with self._current():
            stream, default = self._xp.cuda.get_current_stream(), self._xp.cuda.Stream.null
            stream.wait_event(default.record())
            try:
                yield
            finally:
                default.wait_event(stream.record())


def video_device(cuda: SupportsIndex | CUDAConfig | VideoDevice) -> VideoDevice:
    """The device that an argument ``cuda=`` names.

    Args:
        cuda: Number of the device, a config, whose allocator does not count, or a device itself.

    Raises:
        MissingDependencyError: CuPy, or the driver, is missing.
        TypeError: It is neither.
        ValueError: There is no such device.
        TransferError: This process was forked from one that had used CUDA, or the stream is of another
            device.
    """
    if isinstance(cuda, VideoDevice):
        return cuda
    stream = cuda.stream if isinstance(cuda, CUDAConfig) else None
    cuda = cuda.device_index if isinstance(cuda, CUDAConfig) else cuda
    if isinstance(cuda, bool) or not isinstance(cuda, SupportsIndex):
        raise TypeError(f"cuda must be the number of a device, such as 0, not {cuda!r}")
    index = operator.index(cuda)
    cupy: Any = require("cupy", _PURPOSE)
    HISTORY.use(_PURPOSE)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise device_error(index, str(error), None) from error
    if not 0 <= index < count:
        raise no_such_device(index, count)
    check_stream(CUDAConfig(index, stream), _PURPOSE)
    return VideoDevice(cupy, index, stream)
