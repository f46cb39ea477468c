"""The CUDA source, compiled for the CPU and launched as on a device, gives the reference's very bits."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import color_kernel
import numpy as np
import pytest
from color_kernel import KERNELS, FakeArray, FakeCupy
from effort import each

from spdl_media.buffer import CUDABuffer
from spdl_media.cuda._color_formats import yuv_format
from spdl_media.cuda._color_launch import CONVERSION, FRAME, OPTIONS, kernel_source
from spdl_media.cuda.color import nv12_to_bgr, nv12_to_rgb, yuv_to_rgb

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if color_kernel.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return color_kernel.compiled(tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def cupy(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy(library)
    monkeypatch.setattr("spdl_media._optional.require", lambda *_: fake)
    return fake


def pitched(array: np.ndarray, pad: int) -> np.ndarray:
    """The same values in rows that are further apart."""
    rows = np.full((*array.shape[:-1], array.shape[-1] + pad), 0xA5, array.dtype)
    view = rows[..., : array.shape[-1]]
    view[...] = array
    return view


def noise(pix_fmt: str, width: int, height: int, frames: int | None = None) -> list[np.ndarray]:
    """Planes of every value, in rows that are further apart than they are long."""
    rng = np.random.default_rng(width * 1000 + height)
    format = yuv_format(pix_fmt)
    lead = () if frames is None else (frames,)

    def plane(*shape: int) -> np.ndarray:
        values = rng.integers(0, 1 << format.bits, (*lead, *shape)) << format.shift
        return pitched(values.astype(format.dtype), 2 * (len(lead) + 3))

    luma = plane(height, width)
    if not format.sub_x:
        return [luma]
    down, across = format.chroma_shape(height, width)
    if format.pairs:
        return [luma, plane(down, 2 * across)]
    return [luma, plane(down, across), plane(down, across)]


def assert_same(planes: Any, pix_fmt: str, **options: Any) -> np.ndarray:
    """Convert in host memory and "on the device"; both results must be equal, bit for bit."""
    expected = np.asarray(yuv_to_rgb(planes, pix_fmt, **options))
    tiled = not isinstance(planes, list)
    there: Any = FakeArray(planes) if tiled else [FakeArray(plane) for plane in planes]
    result = yuv_to_rgb(there, pix_fmt, **options)
    assert isinstance(result, CUDABuffer)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result.array.get(), expected)
    return expected


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("color_range", ["tv", "pc"])
@pytest.mark.parametrize(
    "matrix", [None, "bt709", "fcc", "bt470bg", "smpte240m", "bt2020nc", "ycgco"]
)
def test_matrices_and_ranges(matrix: str | None, color_range: Any) -> None:
    for pix_fmt in ("nv12", "p010le"):
        assert_same(noise(pix_fmt, 33, 18), pix_fmt, matrix=matrix, color_range=color_range)


@pytest.mark.usefixtures("cupy")
@each(
    "pix_fmt",
    "nv12 nv21 nv16 nv24 nv42 p010 p012 p016 p210 p410 yuv420p yuvj420p yuv422p yuv444p yuv440p yuv411p "
    "yuv410p yuv420p9 yuv420p10 yuv422p12 yuv444p14 yuv444p16 yuv444p10msb yuv444p12msb gray gray10".split(),
)
@each("size", [(32, 16), (33, 17), (1, 1)])
def test_formats_and_odd_sizes(pix_fmt: str, size: tuple[int, int]) -> None:
    assert_same(noise(pix_fmt, *size), pix_fmt)


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("normalize", [None, (MEAN, STD), ((0, 0, 0), (1, 1, 1))])
@pytest.mark.parametrize("frames", [None, 3])
def test_layouts_and_types(layout: Any, normalize: Any, frames: int | None) -> None:
    options = {"layout": layout, "normalize": normalize}
    assert_same(noise("yuv420p", 35, 19, frames), "yuv420p", **options)
    result = assert_same(noise("p010", 35, 19, frames), "p010", **options)
    lead = () if frames is None else (frames,)
    assert result.shape == (*lead, *((19, 35, 3) if layout == "NHWC" else (3, 19, 35)))
    assert result.dtype == ("uint8" if normalize is None else "float32")


@pytest.mark.usefixtures("cupy")
@each("algo", [None, "bicubic", "bilinear"])
@each("size", [(64, 48), (63, 47), (32, 24), (20, 11), (5, 3), (1, 1), (63, 24), (97, 131)])
def test_sizes(algo: Any, size: tuple[int, int]) -> None:
    for pix_fmt in ("nv12", "yuv422p10", "yuv444p"):
        planes = noise(pix_fmt, 63, 47)
        assert_same(planes, pix_fmt, width=size[0], height=size[1], scale_algo=algo)


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize(
    "location", ["left", "center", "topleft", "top", "bottomleft", "bottom", None]
)
def test_places_of_chroma(location: Any) -> None:
    for pix_fmt in ("nv12", "yuv422p", "yuv411p"):
        assert_same(noise(pix_fmt, 21, 14), pix_fmt, chroma_location=location)


@pytest.mark.usefixtures("cupy")
def test_planes_in_one_array_and_rows_that_run_upwards() -> None:
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, (2, 1, 21, 16), np.uint8)  # 14 rows and 7 of chroma
    for pix_fmt in ("nv12", "yuv420p"):
        assert assert_same(block, pix_fmt).shape == (2, 14, 16, 3)
    assert_same(rng.integers(0, 256, (2, 3, 9, 7), np.uint8), "yuv444p")
    assert_same([plane[::-1, ::-1] for plane in noise("yuv420p", 20, 12)], "yuv420p")


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("function", [nv12_to_rgb, nv12_to_bgr])
def test_buffers_in_a_list_are_one_launch(function: Any, cupy: FakeCupy) -> None:
    rng = np.random.default_rng(0)
    shapes = [(21, 16), (2, 21, 16), (1, 1, 21, 16)]
    arrays = [pitched(rng.integers(0, 256, shape, np.uint8), 5) for shape in shapes]
    arrays[1] = pitched(arrays[1], 48)  # another pitch
    result = function([FakeArray(array) for array in arrays])
    expected = np.asarray(function(arrays))
    assert expected.shape == (4, 3, 14, 16)
    np.testing.assert_array_equal(result.array.get(), expected)
    assert [launch.grid[2] for launch in cupy.launches] == [4]


@pytest.mark.usefixtures("cupy")
def test_more_frames_than_a_grid_has_layers(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spdl_media.cuda._color_launch._MOST_LAYERS", 3)
    assert_same(noise("nv12", 6, 4, 8), "nv12")
    assert cupy.launches[0].grid == (1, 1, 3)


@pytest.mark.usefixtures("cupy")
def test_a_view_of_a_larger_array_is_filled() -> None:
    planes = noise("nv12", 32, 16)
    expected = np.asarray(yuv_to_rgb(planes, "nv12", layout="NCHW"))
    whole = np.full((2, 5, 20, 40), 7, np.uint8)
    place = whole[1, 1:4, 2:18, 4:36]
    yuv_to_rgb([FakeArray(plane) for plane in planes], "nv12", layout="NCHW", out=FakeArray(place))
    np.testing.assert_array_equal(place, expected)
    place[...] = 7
    assert (whole == 7).all(), "something beside the result was written"


def test_structs_lie_in_memory_as_the_compiler_lays_them(library: ctypes.CDLL) -> None:
    def places(dtype: np.dtype[Any]) -> list[int]:
        assert dtype.fields is not None
        return [place for _, place, *_ in dtype.fields.values()]

    assert color_kernel.offsets(library, "sizes", 2) == [FRAME.itemsize, CONVERSION.itemsize]
    assert color_kernel.offsets(library, "frame_offsets", 2) == places(FRAME)
    found = places(CONVERSION)
    assert color_kernel.offsets(library, "conversion_offsets", len(found)) == found
    assert CONVERSION.itemsize <= 4096  # what a launch may pass by value


def test_the_comparison_sees_a_difference(cupy: FakeCupy) -> None:
    assert cupy.library is not None
    planes = noise("nv12", 16, 8)
    result = yuv_to_rgb([FakeArray(plane) for plane in planes], "nv12", matrix="bt709")
    assert (result.array.get() != np.asarray(yuv_to_rgb(planes, "nv12", matrix="smpte240m"))).any()


def nvrtc() -> ctypes.CDLL:
    found = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/lib/libnvrtc.so.*"))
    if not found:
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc-cu12)")
    return ctypes.CDLL(str(found[0]))


def test_nvrtc_compiles_the_source_without_fused_operations() -> None:
    library, program = nvrtc(), ctypes.c_void_p()

    def text(name: str) -> str:
        size = ctypes.c_size_t()
        assert getattr(library, f"{name}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(library, name)(program, buffer) == 0
        return buffer.value.decode()

    source = kernel_source().encode()
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), source, b"yuv_to_rgb.cu", 0, None, None
    )
    assert created == 0
    options = [option.encode() for option in OPTIONS]
    status = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    log = text("nvrtcGetProgramLog").strip()
    assert (status, log) == (0, "")
    assert_is_right_ptx(text("nvrtcGetPTX"))
    library.nvrtcDestroyProgram(ctypes.byref(program))


def test_nvcc_compiles_the_source_without_fused_operations(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None or color_kernel.compiler() is None:
        pytest.skip("there is no nvcc, or no C++ compiler for it")
    source, ptx = tmp_path / "yuv_to_rgb.cu", tmp_path / "yuv_to_rgb.ptx"
    source.write_text(kernel_source(), encoding="utf-8")
    subprocess.run([nvcc, *OPTIONS, "-Werror=all-warnings", "-ptx", "-o", ptx, source], check=True)
    assert_is_right_ptx(ptx.read_text(encoding="utf-8"))


def assert_is_right_ptx(ptx: str) -> None:
    assert re.findall(r"\.visible \.entry (\w+)\(", ptx) == KERNELS
    assert set(re.findall(r"\b(?:fma|mad)\.\w*\.?f32", ptx)) == set()
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    assert f"[{CONVERSION.itemsize}]" in ptx  # the struct, passed by value
