"""A stand-in for CuPy on devices of ``fake_cuda``, with computing arrays and the package's kernel on the CPU.

Writes to an array are queued on the current stream. With ``is_eager``, streams run at once, for NumPy
functions that do not wait for streams.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_cuda import (
    FREED,
    Card,
    CupyEvent,
    CupyStream,
    FakeCupy,
    by_dlpack,
    own_streams,
    values_of,
)


class LazyCard(Card):
    """A card whose pools do not overwrite a block that is reused, because earlier work may still read it."""

    def allocate(self, nbytes: int, device: int, stream: int) -> int:
        key = device, stream or 1, nbytes
        if free := self.pools.get(key):
            block = free.pop()
            self.blocks[block.ctypes.data] = block, key
            return block.ctypes.data
        return super().allocate(nbytes, device, stream)


class Array(np.ndarray):
    """An array on a device."""

    cupy: CupyWithKernels
    index: int

    def __array_finalize__(self, other: Any) -> None:
        if isinstance(other, Array):
            self.cupy, self.index = other.cupy, other.index

    @property
    def data(self) -> Any:  # type: ignore[override]  # CuPy's is another thing
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.index)

    @property
    def values(self) -> np.ndarray:
        return self.view(np.ndarray)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.values.__array_interface__, "stream": 99, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __dlpack__(self, *, stream: int | None = None) -> Array:  # type: ignore[override]
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        target, source = self.values[key], np.asarray(value).view(np.ndarray)

        def write() -> None:
            target[...] = source

        self.cupy.put("write", write)

    def fill(self, value: Any) -> None:
        self[...] = value


class Stream(CupyStream):
    def record(self) -> CupyEvent:
        event = CupyEvent(self._cupy, block=True)
        event.record(self)
        return event


class CupyWithKernels(FakeCupy):
    """The parts of CuPy that ``load_*`` use.

    Args:
        card: The devices.
        library: The compiled kernel.
        is_eager: Whether streams run at once.
    """

    def __init__(self, card: Card, library: ctypes.CDLL, *, is_eager: bool = False) -> None:
        super().__init__(card)
        card.driver.library = library
        card.is_eager = is_eager
        self.ndarray = Array
        self.cuda.Stream = own_streams(self, Stream)
        self.cuda.Stream.null = Stream(self, card.stream(0, 1))
        self.cuda.Stream.ptds = Stream(self, card.stream(0, 2))
        self.cuda.runtime.CUDARuntimeError = RuntimeError

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def from_dlpack(self, array: Any) -> Array:  # type: ignore[override]
        kind, index = array.__dlpack_device__()
        assert kind == 2
        values, _ = by_dlpack(array, index, self.cuda.get_current_stream().stream.address)
        given = values.view(Array)
        given.cupy, given.index = self, index
        return given

    @property
    def launches(self) -> list[Any]:
        """The launches of kernels so far."""
        return self.card.driver.launches


def host(buffer: Any) -> np.ndarray:
    """Finish all work, and return a copy of the values of a buffer on a device."""
    buffer.synchronize()
    values = values_of(buffer).copy()
    assert not (values == FREED).all(), "the memory was given to somebody else"
    return values
