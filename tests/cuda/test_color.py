"""Arguments of the colour conversion, its errors, and the work that it launches on a device."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import numpy as np
import pytest
from color_kernel import fake_cupy
from color_reference import by_reference, there, to_rgb
from effort import each
from fake_cuda import Card, FakeCupy, FakeTorch, fresh_process, values_of

import spdl_media as sm
from spdl_media.config import cuda_config as cuda_config_of
from spdl_media.cuda.color import nv12_to_bgr, nv12_to_rgb
from spdl_media.cuda.color_plan import SEMI_PLANAR, line_taps

Y, UV = np.full((6, 8), 81, np.uint8), np.full((3, 4, 2), 128, np.uint8)
NV12 = np.concatenate([Y, UV.reshape(3, 8)])


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    return fake_cupy(monkeypatch)


def rgb(planes: Any, pix_fmt: str, **options: Any) -> np.ndarray:
    return by_reference(to_rgb, planes, pix_fmt, **options)


def test_grey_is_grey() -> None:
    result = rgb([Y, UV], "nv12")
    assert result.shape == (6, 8, 3)
    assert (result == round((81 - 16) * 255 / 219)).all()


def test_every_form_of_planes_gives_the_same() -> None:
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, (2, 9, 8), np.uint8)
    luma, pairs = block[:, :6], block[:, 6:].reshape(2, 3, 4, 2)
    expected = rgb([luma, pairs], "nv12", matrix="bt709")
    assert expected.shape == (2, 6, 8, 3)
    deep = [part.astype(np.uint16) << 8 for part in (luma, pairs)]
    for pix_fmt in ("p010le", "p012le"):
        np.testing.assert_array_equal(rgb(deep, pix_fmt, matrix="bt709"), expected)
    for buffers in (block, block[:, None], list(block), [block[:1], block[1]], sm.CPUBuffer(block)):
        found = by_reference(nv12_to_rgb, buffers)
        np.testing.assert_array_equal(found, expected.transpose(0, 3, 1, 2))


def test_buffers_say_what_their_values_mean() -> None:
    picture = sm.testing.index_frames(1, 38, 30)[0]
    desc = sm.get_video_filter_desc(pix_fmt="nv12", color_matrix="bt601", color_range="pc")
    frames = sm.decode_packets(sm.demux_image(sm.testing.make_image(picture)), desc)
    told = {"matrix": "bt601", "color_range": "pc", "layout": "NCHW"}
    expected = rgb(frames.planes, "nv12", **told)
    found = by_reference(nv12_to_rgb, sm.convert_frames(frames))
    np.testing.assert_array_equal(found[0], expected)


def test_nv12_is_what_its_buffers_say_else_as_in_spdl() -> None:
    values = np.arange(54, dtype=np.uint8).reshape(9, 6) * 4
    for colors in (("bt601", "tv"), ("bt2020nc", "pc"), (None, "pc"), ("fcc", None)):
        buffer = sm.CPUBuffer(values, colorspace=colors[0], color_range=colors[1])
        for coeff, matrix in ((None, colors[0] or "bt709"), (4, "fcc")):
            told = {"matrix": matrix, "color_range": colors[1], "layout": "NCHW"}
            expected = rgb([values[:6], values[6:].reshape(3, 3, 2)], "nv12", **told)
            found = by_reference(nv12_to_rgb, buffer, coeff=coeff)
            np.testing.assert_array_equal(found, expected[None])
    np.testing.assert_array_equal(
        by_reference(nv12_to_rgb, values), by_reference(nv12_to_rgb, values, coeff=1)
    )


def test_buffers_that_contradict_each_other() -> None:
    values = np.zeros((9, 6), np.uint8)
    both = [sm.CPUBuffer(values, colorspace=name, color_range="tv") for name in ("fcc", "bt709")]
    with pytest.raises(ValueError, match=r"state different colours.*'bt709', 'tv'.*'fcc', 'tv'"):
        nv12_to_rgb(there(both))


@each("rows", range(2, 40))
def test_height_of_one_array_is_found(rows: int) -> None:
    heights = [h for h in range(1, 40) if h + -(-h // 2) == rows]
    block = np.zeros((1, rows, 8), np.uint8)
    if not heights:
        with pytest.raises(ValueError, match=rf"no nv12 image fills an array of .*{rows}, 8\)"):
            by_reference(nv12_to_rgb, block)
        return
    assert by_reference(nv12_to_rgb, block).shape == (1, 3, heights[0], 8)


@each("algo", ["bicubic", "bilinear"])
@each("size", [1, 2, 7, 16, 31, 100])
@each("length", [1, 2, 3, 16, 31, 640])
def test_windows_lie_inside_and_weigh_one(length: int, size: int, algo: Any) -> None:
    for sub in (1, 2):
        taps = line_taps(length, size, sub, algo, stretch=True)
        assert taps.first.min() >= 0
        assert (taps.first + len(taps.weights)).max() <= -(-length // sub)
        np.testing.assert_allclose(taps.weights.sum(0, dtype=float), 1, atol=1e-6)


def test_launch_is_asked_for_as_the_kernel_needs_it(cupy: FakeCupy) -> None:
    config = cuda_config_of(1, stream=0xBEEF)
    luma, chroma = np.zeros((3, 20, 100), np.uint8)[:, :, :70], np.zeros((3, 10, 35, 2), np.uint8)
    planes = there([luma, chroma], 1)
    result = to_rgb(planes, "nv12", layout="NCHW", cuda_config=config)
    assert result.shape == (3, 3, 20, 70)
    assert result.device == "cuda:1"
    (launch,) = cupy.card.driver.launches
    assert launch.name == "yuv8_to_uint8"
    assert (launch.grid, launch.block) == ((3, 3, 3), (32, 8, 1))
    assert (launch.device, launch.stream) == (1, 0xBEEF)
    assert (cupy.selected, cupy.current) == (0, []), "the caller's device and stream are back"
    places = launch.frames["planes"]
    base = luma.ctypes.data
    assert places["data"][:, 0].tolist() == [base, base + 2000, base + 4000]
    assert places["row_step"].tolist() == [[100, 70, 70]] * 3
    assert places["sample_step"].tolist() == [[1, 2, 2]] * 3
    assert (places["data"][:, 2] - places["data"][:, 1]).tolist() == [1, 1, 1]
    out = values_of(result).ctypes.data
    assert launch.frames["out"].tolist() == [out, out + 4200, out + 8400]
    steps = [int(launch.argument[f"out_{name}"][0]) for name in ("row", "pixel", "channel")]
    assert steps == [70, 1, 1400]


@pytest.mark.parametrize(
    ("pix_fmt", "normalize", "name"),
    [
        ("nv12", None, "yuv8_to_uint8"),
        ("nv12", ((0, 0, 0), (1, 1, 1)), "yuv8_to_float32"),
        ("p010le", None, "yuv16_to_uint8"),
        ("p010le", ((0, 0, 0), (1, 1, 1)), "yuv16_to_float32"),
    ],
)
def test_kernel_is_that_of_the_types(
    cupy: FakeCupy, pix_fmt: str, normalize: Any, name: str
) -> None:
    dtype = SEMI_PLANAR[pix_fmt].dtype
    to_rgb(there([Y.astype(dtype), UV.astype(dtype)]), pix_fmt, normalize=normalize)
    assert [launch.name for launch in cupy.card.driver.launches] == [name]


@pytest.mark.parametrize("sync", [False, True])
def test_only_sync_waits(cupy: FakeCupy, sync: bool) -> None:
    config = cuda_config_of(0, stream=5)
    kept = [
        function(there([NV12]), cuda_config=config, sync=sync)
        for function in (nv12_to_rgb, nv12_to_bgr)
    ]
    assert len(kept) == 2
    assert all(stream.work for stream in cupy.card.streams.values() if stream.address == 5) != sync


def test_device_may_be_named_by_its_number_or_left_out(cupy: FakeCupy) -> None:
    for cuda_config in (1, np.int64(1), None):
        nv12_to_rgb(there(NV12, 1), cuda_config=cuda_config)
    assert [launch.device for launch in cupy.card.driver.launches] == [1] * 3


def test_threads_use_their_own_tables(cupy: FakeCupy) -> None:
    def work(width: int) -> None:
        for _ in range(20):
            to_rgb(there([Y, UV]), "nv12", width=width)

    threads = [threading.Thread(target=work, args=(width,)) for width in (5, 9, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(
        int(launch.argument["luma_x"]["size"][0]) for launch in cupy.card.driver.launches
    ) == ([5] * 20 + [9] * 20 + [13] * 20)


@each("shape", [(8,), (0, 8), (9, 0), (4, 8), (9, 7), (2, 1, 10, 8)])
def test_wrong_planes(shape: tuple[int, ...]) -> None:
    message = f"no nv12 image fills an array of {re.escape(str(shape))}: it must be"
    with pytest.raises(ValueError, match=message):
        by_reference(nv12_to_rgb, np.zeros(shape, np.uint8))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float32", "bool"])
def test_wrong_type_of_planes(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"planes of nv12 must be uint8, not {dtype}"):
        by_reference(nv12_to_rgb, NV12.astype(dtype))


@pytest.mark.parametrize("matrix", ["gbr", "bt2020c"])
def test_wrong_matrix(matrix: str) -> None:
    buffer = sm.CPUBuffer(NV12, colorspace=matrix, color_range="tv")
    with pytest.raises(
        ValueError, match=f"matrix must be one of bt709, .* or None, not '{matrix}'"
    ):
        by_reference(nv12_to_rgb, buffer)


def test_wrong_buffers() -> None:
    with pytest.raises(ValueError, match="there are no buffers to convert"):
        nv12_to_rgb([])
    with pytest.raises(ValueError, match=r"one size \(width, height\), not \[\(8, 4\), \(8, 6\)\]"):
        by_reference(nv12_to_rgb, [NV12, NV12[:6]])
    with pytest.raises(ValueError, match=r"coeff must be one of 1 \(bt709\), .*, not 2"):
        nv12_to_rgb(there(NV12), coeff=2)


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize(
    ("planes", "options", "error", "message"),
    [
        ([there(NV12), NV12], {}, TypeError, "not in ndarray: transfer_buffer makes one"),
        (sm.CPUBuffer(NV12), {}, TypeError, "not in CPUBuffer: transfer_buffer makes one"),
        ([there(NV12), there(NV12, 1)], {}, ValueError, r"one device, not on \[0, 1\]"),
        (there(NV12), {"cuda_config": 1}, ValueError, "lie on CUDA device 0, and device 1 is"),
        (there(NV12), {"cuda_config": 2}, ValueError, "device 2 was asked for, and there are 2"),
        (there(NV12), {"cuda_config": -1}, ValueError, "device_index must be at least 0, not -1"),
        (there(NV12), {"cuda_config": True}, TypeError, "cuda_config must be the number of a dev"),
        (there(NV12), {"cuda_config": "cuda:0"}, TypeError, "not 'cuda:0'"),
    ],
)
def test_wrong_devices(
    planes: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        nv12_to_rgb(planes, **options)


def test_planes_on_a_device_need_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    fresh_process(monkeypatch)
    with pytest.raises(
        sm.TransferError, match=r"needs a CUDA device, .*neither torch nor cupy.*pip install"
    ):
        nv12_to_rgb(there(NV12))


@pytest.mark.parametrize("stream", [None, 0x4400])
def test_buffers_are_waited_for_and_kept_for_the_stream_of_the_work(
    monkeypatch: pytest.MonkeyPatch, stream: int | None
) -> None:
    fresh_process(monkeypatch)
    torch = FakeTorch(Card(devices=1))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]  # a stand-in
    monkeypatch.setitem(sys.modules, "cupy", None)
    buffer = sm.transfer_buffer(sm.CPUBuffer(NV12), cuda_config=cuda_config_of(0, stream=0x7700))
    log = torch.card.log
    log.clear()
    kept = nv12_to_rgb([buffer], cuda_config=cuda_config_of(0, stream=stream))
    (launched,) = (place for place, line in enumerate(log) if line.startswith("yuv8_to_uint8"))
    used = log[launched].partition(" on ")[2]
    assert stream is None or used == f"stream {stream:#x} of device 0"
    assert f"wait on {used}" in log[:launched], kept
    assert f"memory kept for {used}" in log[:launched]
