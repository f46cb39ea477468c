"""The CUDA kernel, compiled for the CPU and launched as on a device, equals the reference bit for bit."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import color_kernel
import numpy as np
import pytest
from color_kernel import KERNELS, fake_cupy, host
from color_reference import by_reference, noise, there, to_rgb
from effort import each
from fake_cuda import FakeCupy

import spdl_media as sm
from spdl_media.buffer import CUDABuffer
from spdl_media.cuda.color import CONVERSION, _kernel_code, nv12_to_bgr, nv12_to_rgb
from spdl_media.cuda.color_plan import SEMI_PLANAR

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return color_kernel.compiled(color_kernel.shared_folder(tmp_path_factory))


@pytest.fixture
def cupy(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    return fake_cupy(monkeypatch, library)


def pitched(array: np.ndarray, pad: int) -> np.ndarray:
    """Return the same values with padding after each row."""
    rows = np.full((*array.shape[:-1], array.shape[-1] + pad), 0xA5, array.dtype)
    view = rows[..., : array.shape[-1]]
    view[...] = array
    return view


def apart(pix_fmt: str, width: int, height: int, frames: int | None = None) -> list[np.ndarray]:
    """Make planes with all values, and with padding after each row."""
    return [pitched(plane, 2 * plane.ndim) for plane in noise(pix_fmt, width, height, frames)]


def assert_same(planes: Any, pix_fmt: str, **options: Any) -> np.ndarray:
    """Convert by the reference and by the kernel; both results must be equal, bit for bit."""
    expected = by_reference(to_rgb, planes, pix_fmt, **options)
    result = to_rgb(there(planes), pix_fmt, **options)
    assert isinstance(result, CUDABuffer)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(host(result), expected)
    return expected


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("color_range", ["tv", "pc"])
@pytest.mark.parametrize(
    "matrix", [None, "bt709", "fcc", "bt470bg", "smpte240m", "bt2020nc", "ycgco"]
)
def test_matrices_and_ranges(matrix: str | None, color_range: Any) -> None:
    for pix_fmt in ("nv12", "p010le"):
        assert_same(apart(pix_fmt, 33, 18), pix_fmt, matrix=matrix, color_range=color_range)


@pytest.mark.usefixtures("cupy")
@each("pix_fmt", list(SEMI_PLANAR))
@each("size", [(32, 16), (33, 17), (1, 1)])
def test_formats_and_odd_sizes(pix_fmt: str, size: tuple[int, int]) -> None:
    assert_same(apart(pix_fmt, *size), pix_fmt)


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("normalize", [None, (MEAN, STD), ((0, 0, 0), (1, 1, 1))])
@pytest.mark.parametrize("frames", [None, 3])
def test_layouts_and_types(layout: Any, normalize: Any, frames: int | None) -> None:
    options = {"layout": layout, "normalize": normalize}
    assert_same(apart("nv12", 35, 19, frames), "nv12", **options)
    result = assert_same(apart("p010le", 35, 19, frames), "p010le", **options)
    lead = () if frames is None else (frames,)
    assert result.shape == (*lead, *((19, 35, 3) if layout == "NHWC" else (3, 19, 35)))
    assert result.dtype == ("uint8" if normalize is None else "float32")


@pytest.mark.usefixtures("cupy")
@each("algo", [None, "bicubic", "bilinear"])
@each("size", [(64, 48), (63, 47), (32, 24), (20, 11), (5, 3), (1, 1), (63, 24), (97, 131)])
def test_sizes(algo: Any, size: tuple[int, int]) -> None:
    for pix_fmt in ("nv12", "p010le", "p012le"):
        planes = apart(pix_fmt, 63, 47)
        assert_same(planes, pix_fmt, width=size[0], height=size[1], scale_algo=algo)


@pytest.mark.usefixtures("cupy")
def test_rows_that_run_upwards() -> None:
    assert_same([plane[::-1, ::-1] for plane in apart("nv12", 20, 12)], "nv12")


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("function", [nv12_to_rgb, nv12_to_bgr])
def test_buffers_in_a_list_are_one_launch(function: Any, cupy: FakeCupy) -> None:
    rng = np.random.default_rng(0)
    shapes = [(21, 16), (2, 21, 16), (1, 1, 21, 16)]
    arrays = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
    result = function(there(arrays))
    expected = by_reference(function, arrays)
    assert expected.shape == (4, 3, 14, 16)
    np.testing.assert_array_equal(host(result), expected)
    assert [launch.grid[2] for launch in cupy.card.driver.launches] == [4]


def test_more_frames_than_a_launch_takes(cupy: FakeCupy) -> None:
    assert_same(apart("nv12", 6, 4, 35), "nv12")
    assert [launch.grid for launch in cupy.card.driver.launches] == [(1, 1, n) for n in (16, 16, 3)]


def test_the_tables_of_a_plan_go_to_the_device_once(cupy: FakeCupy) -> None:
    planes = apart("nv12", 16, 8)
    for _ in range(3):
        assert_same(planes, "nv12", width=5)
    assert len([line for line in cupy.card.log if line.startswith("copy in")]) == 1


def test_structs_lie_in_memory_as_the_compiler_lays_them(library: ctypes.CDLL) -> None:
    fields = CONVERSION.fields
    assert fields is not None
    frame = fields["frames"][0].base
    assert frame.fields is not None
    expected = [place for _, place, *_ in fields.values()]
    expected += [CONVERSION.itemsize, frame.fields["out"][1], frame.itemsize]
    assert list((ctypes.c_size_t * len(expected)).in_dll(library, "offsets")) == expected
    assert CONVERSION.itemsize <= 4096  # the limit of a launch's arguments


def test_the_comparison_sees_a_difference(cupy: FakeCupy) -> None:
    planes = apart("nv12", 16, 8)
    result = to_rgb(there(planes), "nv12", matrix="bt709")
    assert (host(result) != by_reference(to_rgb, planes, "nv12", matrix="smpte240m")).any()


@pytest.mark.usefixtures("cupy")
def test_work_on_a_pixel_is_bounded() -> None:
    """A pixel that depends on a whole large image would keep one thread of the device busy for minutes."""

    def planes(side: int, height: int) -> list[np.ndarray]:
        shapes = (height, side), (-(-height // 2), -(-side // 2), 2)
        return [np.broadcast_to(np.zeros((1,) * len(one), np.uint8), one) for one in shapes]

    for side, work in ((1200, 1198**2), (65535, 65533**2)):
        with pytest.raises(sm.TransferError, match=rf"each pixel of 1x1 would sum up {work} sam"):
            to_rgb(there(planes(side, side)), "nv12", width=1, height=1)
    assert host(to_rgb(there(planes(600, 40)), "nv12", width=1)).shape == (40, 1, 3)


# Memory that ends with the arrays, so that a sanitizer detects each access beyond them.
_ADVERSARIAL = """
import sys
import numpy as np, pytest
import color_kernel
from color_kernel import fake_cupy, host
from color_reference import by_reference, there, to_rgb
from pathlib import Path
from spdl_media.cuda.color_plan import SEMI_PLANAR

def exact(shape, dtype, rng):
    values = rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, shape).astype(dtype)
    return np.frombuffer(bytearray(values.tobytes()), dtype).reshape(shape)

patch, rng = pytest.MonkeyPatch(), np.random.default_rng(0)
fake_cupy(patch, color_kernel.compiled(Path(sys.argv[1]), *sys.argv[2:]))
sides = [1, 2, 3, 5, 31, 32, 33, 257]
for number in range(240):
    width, height, w, h = (int(rng.choice(sides)) for _ in range(4))
    name = str(rng.choice(list(SEMI_PLANAR)))
    shapes = (height, width), (-(-height // 2), -(-width // 2), 2)
    planes = [exact(shape, SEMI_PLANAR[name].dtype, rng) for shape in shapes]
    options = {"width": w, "height": h} if number % 3 else {}
    options |= {"normalize": ((0.5,) * 3, (0.2,) * 3)} if number % 5 == 0 else {}
    expected = by_reference(to_rgb, planes, name, **options)
    result = to_rgb(there(planes), name, **options)
    np.testing.assert_array_equal(host(result), expected)
print("no complaint")
"""


@pytest.mark.long
def test_no_size_reads_or_writes_beyond_the_arrays(tmp_path: Path) -> None:
    tool = color_kernel.compiler()
    if tool is None:
        pytest.skip("there is no C++ compiler")
    found = subprocess.run(
        [tool, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    options = {
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(color_kernel.__file__).parent)]),
    }
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    run = [sys.executable, "-c", _ADVERSARIAL, str(tmp_path), *flags]
    done = subprocess.run(
        run, check=False, env=os.environ | options, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "no complaint\n"), done.stderr[-3000:]


def test_the_shipped_code_is_made_of_the_source() -> None:
    head, *_ = _kernel_code().decode().splitlines()
    assert color_kernel.digest() in head, "run python tests/color_kernel.py with NVRTC 11.8"
    assert_is_right_ptx(_kernel_code().decode())
    assert ".version 7.8\n.target sm_75\n" in _kernel_code().decode(), (
        "older drivers refuse newer PTX"
    )


@pytest.mark.parametrize("architecture", ["75", "80", "86", "89", "90", "100", "120"])
def test_every_device_takes_the_shipped_code(architecture: str, tmp_path: Path) -> None:
    ptxas, code = shutil.which("ptxas"), tmp_path / "yuv_to_rgb.ptx"
    if ptxas is None:
        pytest.skip("there is no ptxas")
    code.write_bytes(_kernel_code())
    output = tmp_path / "yuv_to_rgb.cubin"
    run = [ptxas, "-v", "-Werror", f"-arch=sm_{architecture}", "-o", output, code]
    said = subprocess.run(run, check=True, capture_output=True, text=True).stderr
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", said) == [("0", "0")] * len(
        KERNELS
    )


@pytest.mark.parametrize("architecture", ["75", "90", "120"])
def test_nvrtc_compiles_the_source_without_fused_operations(architecture: str) -> None:
    library = color_kernel.nvrtc()
    if library is None:
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc-cu12)")
    assert_is_right_ptx(color_kernel.compile_ptx(library, architecture))


def assert_is_right_ptx(ptx: str) -> None:
    assert re.findall(r"\.visible \.entry (\w+)\(", ptx) == KERNELS
    # Without a rounding mode, the driver's compiler would fuse multiplications and additions.
    operations = set(re.findall(r"\b((?:fma|mad|mul|add|sub)\.[\w.]*f32)", ptx))
    assert operations == {"mul.rn.f32", "add.rn.f32"}
    assert f"[{CONVERSION.itemsize}]" in ptx  # the struct, passed by value
