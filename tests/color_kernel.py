"""The CUDA source of the colour conversion, compiled for the CPU, and a CuPy that runs it there."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from spdl_media.cuda._color_launch import CONVERSION, FRAME, kernel_source

KERNELS = [f"yuv{bits}_to_{dtype}" for bits in (8, 16) for dtype in ("uint8", "float32")]

# What CUDA has and C++ lacks, in front of the very source, and behind it a loop over the grid.
_BEFORE = """
#include <math.h>
#include <stddef.h>
#define __global__
#define __device__ static inline
struct Dims { unsigned x, y, z; };
static thread_local Dims gridDim, blockDim, blockIdx, threadIdx;
"""
_AFTER = """
typedef void (*Kernel)(Conversion);

static void run(Kernel kernel, Dims grid, Dims block, const Conversion& c) {
    gridDim = grid;
    blockDim = block;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
    for (threadIdx.z = 0; threadIdx.z < block.z; ++threadIdx.z)
    for (threadIdx.y = 0; threadIdx.y < block.y; ++threadIdx.y)
    for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x)
        kernel(c);
}

extern "C" {
size_t sizes[] = {sizeof(Frame), sizeof(Conversion)};
size_t frame_offsets[] = {offsetof(Frame, planes), offsetof(Frame, out)};
size_t conversion_offsets[] = {
    offsetof(Conversion, frames), offsetof(Conversion, luma_x), offsetof(Conversion, luma_y),
    offsetof(Conversion, chroma_x), offsetof(Conversion, chroma_y), offsetof(Conversion, out_row),
    offsetof(Conversion, out_pixel), offsetof(Conversion, out_channel), offsetof(Conversion, matrix),
    offsetof(Conversion, scale), offsetof(Conversion, bias), offsetof(Conversion, ceiling),
    offsetof(Conversion, shift), offsetof(Conversion, num_frames),
};
"""
_ENTRY = """
void run_{name}(const unsigned* d, const Conversion* c) {{
    run({name}, {{d[0], d[1], d[2]}}, {{d[3], d[4], d[5]}}, *c);
}}
"""


def compiler() -> str | None:
    """A C++ compiler of this machine, if there is one."""
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


@cache
def compiled(folder: Path) -> ctypes.CDLL:
    """The kernel's source as a library for the CPU."""
    path, library = folder / "yuv_to_rgb.cpp", folder / "yuv_to_rgb.so"
    entries = "".join(_ENTRY.format(name=name) for name in KERNELS)
    path.write_text(f"{_BEFORE}\n{kernel_source()}\n{_AFTER}{entries}}}\n", encoding="utf-8")
    tool = compiler()
    assert tool is not None
    # Like --fmad=false: no product may be summed up unrounded.
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC"]
    subprocess.run([tool, *options, "-shared", "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


def offsets(library: ctypes.CDLL, name: str, count: int) -> list[int]:
    """Numbers that the library exports."""
    return list((ctypes.c_size_t * count).in_dll(library, name))


class FakeArray:
    """An array "on the device": NumPy's, but for how it is reached."""

    def __init__(self, array: np.ndarray, device: int = 0, owner: Any = None) -> None:
        self._array = array
        self.device = SimpleNamespace(id=device)
        self.owner = owner
        self.shape, self.strides, self.ndim = array.shape, array.strides, array.ndim
        self.dtype, self.itemsize = array.dtype, array.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._array.__array_interface__, "version": 3}

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> FakeArray:
        return FakeArray(self._array[key], self.device.id, self)

    def transpose(self, *axes: int) -> FakeArray:
        return FakeArray(self._array.transpose(axes), self.device.id, self)

    def reshape(self, shape: tuple[int, ...]) -> FakeArray:
        view = self._array.reshape(shape)
        assert np.shares_memory(view, self._array), "a copy would not be seen on the device"
        return FakeArray(view, self.device.id, self)

    def get(self) -> np.ndarray:
        return self._array


class DLPackArray:
    """An array on a device that speaks DLPack alone."""

    def __init__(self, array: FakeArray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.array.device.id


class FakeCupy:
    """As much of CuPy as a conversion uses. It records what it is asked, and may run the kernels."""

    def __init__(self, library: ctypes.CDLL | None = None, devices: int = 1) -> None:
        self.library = library
        self.launches: list[SimpleNamespace] = []
        self.synchronized: list[int | None] = []
        self.device, self.stream = 0, None
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDeviceCount=lambda: devices),
            Device=lambda index: self._setting("device", index),
            ExternalStream=lambda stream, index: self._setting("stream", stream),
            Stream=SimpleNamespace(null=contextlib.nullcontext()),
            get_current_stream=lambda: SimpleNamespace(
                ptr=self.stream or 0, synchronize=lambda: self.synchronized.append(self.stream)
            ),
            Event=lambda **_: SimpleNamespace(
                record=lambda: self.recorded.append(self.stream),
                done=True,
                synchronize=lambda: None,
            ),
        )
        self.recorded: list[int | None] = []

    @contextlib.contextmanager
    def _setting(self, name: str, value: int) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def asarray(self, array: Any) -> FakeArray:
        if isinstance(array, np.ndarray):
            return FakeArray(array.copy(), self.device)
        if isinstance(array, FakeArray):
            return array
        memory = SimpleNamespace(
            __array_interface__={**array.__cuda_array_interface__}, owner=array
        )
        del memory.__array_interface__["stream"]
        return FakeArray(np.asarray(memory), self.device, array)

    def from_dlpack(self, array: DLPackArray) -> FakeArray:
        return array.array

    def empty(self, shape: tuple[int, ...], dtype: str) -> FakeArray:
        return FakeArray(np.full(shape, 0x5A, dtype), self.device)

    def RawKernel(self, source: str, name: str, options: tuple[str, ...]) -> Any:  # noqa: N802
        assert source == kernel_source()

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            (argument,) = args
            assert argument.dtype == CONVERSION
            assert argument.shape == (1,)
            self.launches.append(
                SimpleNamespace(
                    name=name,
                    options=options,
                    grid=grid,
                    block=block,
                    argument=argument.copy(),
                    frames=_frame_table(argument),
                    device=self.device,
                    stream=self.stream,
                )
            )
            if self.library is not None:
                dims = (ctypes.c_uint * 6)(*grid, *block)
                run = getattr(self.library, f"run_{name}")
                run(dims, ctypes.c_void_p(argument.ctypes.data))

        return launch


def _frame_table(argument: np.ndarray) -> np.ndarray:
    """A copy of what the argument's address of frames leads to, which is gone after the launch."""
    size = int(argument["num_frames"][0]) * FRAME.itemsize
    return np.frombuffer(ctypes.string_at(int(argument["frames"][0]), size), FRAME)
