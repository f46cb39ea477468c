"""One interface to real devices and to those of ``fake_cuda``, so that both run the same tests."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from fake_cuda import Card, FakeCupy, FakeTorch

import spdl_media as sm


class Rig(Protocol):
    """A device, as used by one library.

    Attributes:
        package: Name of the library.
        is_fake: Whether it is a stand-in, whose streams do nothing before ``let_go``.
    """

    package: str
    is_fake: bool

    def new_stream(self) -> int:
        """Return the address of a new stream, which lives as long as the rig."""

    def delay(self, stream: int) -> None:
        """Queue work on a stream that takes a while."""

    def copy_on(self, stream: int, buffer: sm.CUDABuffer) -> Callable[[], np.ndarray]:
        """Copy a buffer on a stream and drop it. Return a function that returns the copied values."""

    def bytes_used(self) -> int:
        """Return the bytes of used device memory."""

    def limited(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the device has at most ``nbytes`` of free memory."""


class FakeRig:
    """A stand-in device."""

    is_fake = True

    def __init__(self, package: str) -> None:
        self.package = package
        self.card = Card(devices=1)
        self.library: Any = {"torch": FakeTorch, "cupy": FakeCupy}[package](self.card)

    def new_stream(self) -> int:
        return self.card.new_stream(0).address

    def delay(self, stream: int) -> None:
        """Stop the stream until the host waits for it."""
        self.card.runs_by_itself = True
        self.card.stream(0, stream).put("delay", lambda: True)

    def copy_on(self, stream: int, buffer: sm.CUDABuffer) -> Callable[[], np.ndarray]:
        out = np.zeros(buffer.shape, buffer.dtype)
        with self._current(stream):
            array = (sm.to_torch if self.package == "torch" else sm.to_cupy)(buffer)
        address = array.data.ptr  # not the array, which would keep the memory
        del array

        def copy() -> bool:
            ctypes.memmove(out.ctypes.data, address, out.nbytes)
            return True

        self.card.stream(0, stream).put("read", copy)

        def result() -> np.ndarray:
            self.card.run()
            return out

        return result

    def _current(self, stream: int) -> Any:
        if self.package == "torch":
            return self.library.cuda.stream(self.library.cuda.ExternalStream(stream, 0))
        return self.library.stream_at(stream, 0)

    def bytes_used(self) -> int:
        return self.card.used[0]

    @contextlib.contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        before, self.card.total = self.card.total, self.card.used[0] + nbytes
        yield
        self.card.total = before


class TorchRig:
    """The first device through PyTorch."""

    package, is_fake = "torch", False

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self._streams: list[Any] = []

    def new_stream(self) -> int:
        self._streams.append(self.torch.cuda.Stream(device=0))
        return int(self._streams[-1].cuda_stream)

    def _current(self, stream: int) -> Any:
        return self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream, device=0))

    def delay(self, stream: int) -> None:
        with self._current(stream):
            square = self.torch.ones((4096, 4096), device="cuda:0")
            for _ in range(40):
                square = square @ square * 1e-4

    def copy_on(self, stream: int, buffer: sm.CUDABuffer) -> Callable[[], np.ndarray]:
        with self._current(stream):
            self.delay(stream)
            copied = sm.to_torch(buffer).clone()

        def result() -> np.ndarray:
            with self._current(stream):
                return np.asarray(copied.cpu())

        return result

    def bytes_used(self) -> int:
        free, total = self.torch.cuda.mem_get_info(0)
        return int(total - free)

    @contextlib.contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        self.torch.cuda.empty_cache()
        _, total = self.torch.cuda.mem_get_info(0)
        allowed = self.torch.cuda.memory_reserved(0) + nbytes
        self.torch.cuda.set_per_process_memory_fraction(allowed / total, 0)
        try:
            yield
        finally:
            self.torch.cuda.set_per_process_memory_fraction(1.0, 0)


class CupyRig:
    """The first device through CuPy."""

    package, is_fake = "cupy", False

    def __init__(self) -> None:
        import cupy

        self.cupy: Any = cupy
        self._streams: list[Any] = []

    def new_stream(self) -> int:
        self._streams.append(self.cupy.cuda.Stream(non_blocking=True))
        return int(self._streams[-1].ptr)

    def _current(self, stream: int) -> Any:
        return next(one for one in self._streams if int(one.ptr) == stream)

    def delay(self, stream: int) -> None:
        with self._current(stream):
            values = self.cupy.ones(1 << 24, "float32")
            for _ in range(400):
                values = values * 1.0001

    def copy_on(self, stream: int, buffer: sm.CUDABuffer) -> Callable[[], np.ndarray]:
        self.delay(stream)
        with self._current(stream):
            copied = sm.to_cupy(buffer).copy()

        def result() -> np.ndarray:
            with self._current(stream):
                return np.asarray(self.cupy.asnumpy(copied))

        return result

    def bytes_used(self) -> int:
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    @contextlib.contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        # Without PyTorch, the package allocates from the driver's pool, which has no limit to set.
        runtime = self.cupy.cuda.runtime
        self.cupy.get_default_memory_pool().free_all_blocks()
        runtime.deviceSynchronize()
        runtime.memPoolTrimTo(runtime.deviceGetDefaultMemPool(0), 0)
        free, _ = runtime.memGetInfo()
        held = self.cupy.cuda.Memory(free - nbytes)
        try:
            yield
        finally:
            del held


@contextlib.contextmanager
def rig_of(name: str, monkeypatch: Any) -> Iterator[Any]:
    """Yield a rig (``"fake torch"``, ``"torch"``, ...), whose library is the only one that the package
    finds."""
    kind, _, package = name.rpartition(" ")
    rig: Any = (
        FakeRig(package) if kind == "fake" else {"torch": TorchRig, "cupy": CupyRig}[package]()
    )
    other = {"torch": "cupy", "cupy": "torch"}[package]
    monkeypatch.setitem(sys.modules, other, None)
    if rig.is_fake:
        monkeypatch.setitem(sys.modules, package, rig.library)
    yield rig
