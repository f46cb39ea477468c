"""Compiles the CUDA kernel of the colour conversion for the CPU and for devices, and runs it on the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest

import spdl_media.cuda

# No fused multiply-add: products and sums are rounded one by one, as in the reference.
OPTIONS = ("--std=c++14", "--fmad=false")
KERNELS = [f"yuv{bits}_to_{dtype}" for bits in (8, 16) for dtype in ("uint8", "float32")]
KERNELS += ["plane8", "plane16"]

# Definitions that CUDA has and C++ lacks go before the unchanged source, a loop over the grid after it.
_BEFORE = """
#include <math.h>
#include <stddef.h>
#define __global__
#define __device__ static inline
struct Dims { unsigned x, y, z; };
static thread_local Dims gridDim, blockDim, blockIdx, threadIdx;
"""
_SOURCE = Path(spdl_media.cuda.__file__).with_name("yuv_to_rgb.cu")
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
size_t offsets[] = {
    offsetof(Conversion, frames), offsetof(Conversion, luma_x), offsetof(Conversion, luma_y),
    offsetof(Conversion, chroma_x), offsetof(Conversion, chroma_y), offsetof(Conversion, out_row),
    offsetof(Conversion, out_pixel), offsetof(Conversion, out_channel), offsetof(Conversion, matrix),
    offsetof(Conversion, scale), offsetof(Conversion, bias), offsetof(Conversion, ceiling),
    offsetof(Conversion, shift), sizeof(Conversion), offsetof(Frame, out), sizeof(Frame),
};
"""
_ENTRY = """
size_t size_{name} = sizeof(Conversion);
void run_{name}(const unsigned* d, const Conversion* c) {{
    run({name}, {{d[0], d[1], d[2]}}, {{d[3], d[4], d[5]}}, *c);
}}
"""


def source() -> str:
    """Return the CUDA C++ source."""
    return _SOURCE.read_text(encoding="utf-8")


def compiler() -> str | None:
    """Return the path of a C++ compiler, or ``None``."""
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder that is shared by all tests of a run, including other workers of pytest-xdist."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernel"


@cache
def compiled(folder: Path, *extra: str) -> ctypes.CDLL:
    """Load the kernel as a library for the CPU. It is compiled if it is not in the folder."""
    library = folder / "yuv_to_rgb.so"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            _compile(Path(own), extra).replace(library)
    return ctypes.CDLL(str(library))


def _compile(folder: Path, extra: tuple[str, ...]) -> Path:
    path, library = folder / "yuv_to_rgb.cpp", folder / "yuv_to_rgb.so"
    entries = "".join(_ENTRY.format(name=name) for name in KERNELS)
    path.write_text(f"{_BEFORE}\n{source()}\n{_AFTER}{entries}}}\n", encoding="utf-8")
    tool = compiler()
    assert tool is not None
    # Like --fmad=false: no fused multiply-add.
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC"]
    options += ["-Wno-unknown-pragmas", *extra]
    subprocess.run([tool, *options, "-shared", "-o", library, path], check=True)
    return library


class FakeArray(fake_cuda.DeviceArray):
    """A device array that is not bound to a card when it is made, for parameters of tests."""

    def __init__(self, array: np.ndarray, device: int = 0) -> None:
        super().__init__(fake_cuda.Card(), device, array, None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.values.__array_interface__, "version": 3}


def fake_cupy(
    monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL | None = None
) -> fake_cuda.FakeCupy:
    """Install a stand-in for CuPy with two devices, whose driver runs the compiled kernels."""
    fake_cuda.fresh_process(monkeypatch)
    fake = fake_cuda.FakeCupy(fake_cuda.Card(devices=2, nbytes=1 << 26))
    fake.card.driver.library = library
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]  # a stand-in
    return fake


def host(buffer: Any) -> np.ndarray:
    """Finish all work, and return the values of a buffer on a device."""
    buffer.synchronize()
    values: np.ndarray = fake_cuda.values_of(buffer)
    return values


def nvrtc() -> ctypes.CDLL | None:
    """Load NVIDIA's run-time compiler if a wheel has installed it."""
    found = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/lib/libnvrtc.so.*"))
    return ctypes.CDLL(str(found[0])) if found else None


def compile_ptx(library: ctypes.CDLL, architecture: str) -> str:
    """Compile the source to PTX by NVRTC."""
    program = ctypes.c_void_p()

    def text(name: str) -> str:
        size = ctypes.c_size_t()
        assert getattr(library, f"{name}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(library, name)(program, buffer) == 0
        return buffer.value.decode()

    made = library.nvrtcCreateProgram(
        ctypes.byref(program), source().encode(), b"yuv_to_rgb.cu", 0, None, None
    )
    assert made == 0
    options = [one.encode() for one in (*OPTIONS, f"--gpu-architecture=compute_{architecture}")]
    status = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    assert (status, text("nvrtcGetProgramLog").strip()) == (0, "")
    ptx = text("nvrtcGetPTX")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


def digest() -> str:
    """Return the digest of the source without comments, which the package's PTX contains."""
    return hashlib.sha256(re.sub(r" *//.*", "", source()).encode()).hexdigest()


if __name__ == "__main__":
    # python tests/color_kernel.py libnvrtc.so.11.2: with NVRTC of CUDA 11.8, so that all drivers for CUDA 12
    # accept the PTX.
    lines = compile_ptx(ctypes.CDLL(sys.argv[1]), "75").splitlines()
    code = [line for line in lines if not line.startswith("//")]
    head = [f"// yuv_to_rgb.cu, sha256 {digest()}, by NVRTC 11.8: --fmad=false, compute_75"]
    _SOURCE.with_suffix(".ptx").write_text("\n".join([*head, *code]) + "\n", encoding="utf-8")
