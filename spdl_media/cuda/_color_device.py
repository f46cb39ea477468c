"""What a conversion needs of a device, and CuPy's way to give it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media import _backends

Array: TypeAlias = npt.NDArray[Any]
Dims: TypeAlias = tuple[int, int, int]


class Device(Protocol):
    """One stream of one device. Arrays on it have the methods of NumPy's and ``__cuda_array_interface__``."""

    def view(self, array: Any) -> Any:
        """Another library's array on this device, without a copy."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory for an array."""

    def upload(self, array: Array) -> Any:
        """A copy of an array in host memory; the original may be dropped at once."""

    def launch(
        self,
        source: str,
        name: str,
        options: tuple[str, ...],
        grid: Dims,
        block: Dims,
        argument: Array,
    ) -> None:
        """Run a kernel that takes one struct by value, given as an array of one element."""

    def synchronize(self) -> None:
        """Wait for all that was launched."""


class CupyDevice:
    """A stream of a device, through CuPy.

    Args:
        index: Number of the device.
        stream: Address of a ``cudaStream_t``; ``None``: CuPy's current stream.

    Raises:
        MissingDependencyError: CuPy is not installed.
        ValueError: There is no such device.

    Thread safety: safe.
    """

    __slots__ = ("_cupy", "_index", "_stream")

    def __init__(self, index: int, stream: int | None = None) -> None:
        self._cupy: Any = _backends.require("cupy", "converting colours on a CUDA device")
        self._index = index
        self._stream = stream
        count = self._cupy.cuda.runtime.getDeviceCount()
        if not 0 <= index < count:
            raise ValueError(
                f"there is no CUDA device {index}: this machine has {count}, counted from 0"
            )

    def view(self, array: Any) -> Any:
        """Another library's array on this device, without a copy.

        Raises:
            ValueError: It lies on another device.
        """
        with self._active():
            if hasattr(array, "__cuda_array_interface__"):
                view = self._cupy.asarray(array)
            else:
                view = self._cupy.from_dlpack(array)
        if view.device.id != self._index:
            raise ValueError(
                f"an array lies on CUDA device {view.device.id}, and device {self._index} is to work on it. "
                "Copy it there first, or name its own device"
            )
        return view

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory for an array, from CuPy's pool."""
        with self._active():
            return self._cupy.empty(shape, dtype)

    def upload(self, array: Array) -> Any:
        """A copy of an array in host memory."""
        with self._active():
            return self._cupy.asarray(array)

    def launch(
        self,
        source: str,
        name: str,
        options: tuple[str, ...],
        grid: Dims,
        block: Dims,
        argument: Array,
    ) -> None:
        """Run a kernel, compiled at its first use on a device."""
        with self._active():
            _kernel(self._cupy, source, name, options)(grid, block, (argument,))

    def synchronize(self) -> None:
        """Wait for the stream."""
        with self._active():
            self._cupy.cuda.get_current_stream().synchronize()

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Make device and stream the ones that CuPy uses in this thread."""
        with self._cupy.cuda.Device(self._index):
            if self._stream is None:
                yield
            else:
                with self._cupy.cuda.ExternalStream(self._stream, self._index):
                    yield


@lru_cache(maxsize=16)
def _kernel(cupy: Any, source: str, name: str, options: tuple[str, ...]) -> Any:
    # It keeps a compiled form for each device.
    return cupy.RawKernel(source, name, options=options)


def device_of(array: Any) -> int | None:
    """Number of the CUDA device that an array lies on; ``None``: in host memory.

    Arrays with ``__cuda_array_interface__`` alone do not say, and are taken to lie on CuPy's current device.
    """
    if callable(getattr(array, "__dlpack_device__", None)):
        kind, index = array.__dlpack_device__()
        # kDLCUDA and kDLCUDAManaged; pinned memory (3) is host memory.
        return int(index) if int(kind) in (2, 13) else None
    if hasattr(array, "__cuda_array_interface__"):
        cupy = _backends.require("cupy", "converting colours on a CUDA device")
        return int(cupy.asarray(array).device.id)
    return None


def open_device(cuda_config: Any, index: int) -> CupyDevice:
    """The device that a configuration or a number names, or the one with this index."""
    if cuda_config is None:
        return CupyDevice(index)
    if isinstance(cuda_config, int | np.integer) and not isinstance(cuda_config, bool):
        return CupyDevice(int(cuda_config))
    if not hasattr(cuda_config, "device_index"):
        raise TypeError(
            f"cuda_config must be a CUDAConfig, the number of a device, or None, not {cuda_config!r}"
        )
    return CupyDevice(cuda_config.device_index, cuda_config.stream)
