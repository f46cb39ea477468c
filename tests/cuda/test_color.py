"""What the conversion takes and refuses, and what it asks of a device."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import numpy as np
import pytest
from color_kernel import fake_cupy
from color_reference import by_reference, there
from effort import each
from fake_cuda import Card, FakeCupy, FakeTorch, fresh_process, values_of

import spdl_media as sm
from spdl_media.config import cuda_config as cuda_config_of
from spdl_media.cuda.color import nv12_to_bgr, nv12_to_rgb, yuv_to_rgb
from spdl_media.cuda.color_plan import line_taps, yuv_format

Y, UV = np.full((6, 8), 81, np.uint8), np.full((3, 4, 2), 128, np.uint8)
NV12 = np.concatenate([Y, UV.reshape(3, 8)])


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    return fake_cupy(monkeypatch)


def rgb(planes: Any, pix_fmt: str, **options: Any) -> np.ndarray:
    return by_reference(yuv_to_rgb, planes, pix_fmt, **options)


def test_grey_is_grey() -> None:
    result = rgb([Y, UV], "nv12")
    assert result.shape == (6, 8, 3)
    assert (result == round((81 - 16) * 255 / 219)).all()


def test_every_form_of_planes_gives_the_same() -> None:
    rng = np.random.default_rng(0)
    luma, chroma = (
        rng.integers(0, 256, (2, 6, 8), np.uint8),
        rng.integers(0, 256, (2, 3, 8), np.uint8),
    )
    pairs = chroma.reshape(2, 3, 4, 2)
    expected = rgb([luma, pairs], "nv12")
    assert expected.shape == (2, 6, 8, 3)
    block = np.concatenate([luma, chroma], 1)
    swapped = np.ascontiguousarray(pairs[..., ::-1])
    tiles = np.concatenate(
        [luma.reshape(2, -1), pairs[..., 0].reshape(2, -1), pairs[..., 1].reshape(2, -1)], 1
    )
    for planes, pix_fmt in (
        ((luma, pairs), "nv12"),
        (block[:, None], "nv12"),
        ([luma, swapped], "nv21"),
        ([luma, pairs[..., 0], pairs[..., 1]], "yuv420p"),
        (tiles.reshape(2, 1, 9, 8), "yuv420p"),
        (sm.CPUBuffer(tiles.reshape(2, 1, 9, 8)), "yuv420p"),
        ([(part * np.uint16(256)).astype(">u2") for part in (luma, pairs)], "p010be"),
    ):
        np.testing.assert_array_equal(rgb(planes, pix_fmt), expected)
    for index in range(2):
        one = rgb([luma[index], pairs[index]], "nv12")
        np.testing.assert_array_equal(one, expected[index])


def test_what_convert_frames_makes_can_be_converted() -> None:
    picture = sm.testing.index_frames(1, 38, 30)[0]
    for pix_fmt in ("yuvj420p", "yuvj422p", "yuvj444p"):
        jpeg = sm.testing.make_image(picture, codec="mjpeg", pix_fmt=pix_fmt)
        frames = sm.decode_packets(sm.demux_image(jpeg), None)
        expected = rgb(frames.planes, pix_fmt)
        np.testing.assert_array_equal(rgb(sm.convert_frames(frames), pix_fmt), expected)
        planes = sm.convert_frames(frames, layout="planes")
        np.testing.assert_array_equal(rgb(planes, pix_fmt), expected)


@pytest.mark.parametrize("layout", [None, "planes"])
def test_buffers_say_what_their_values_mean(layout: Any) -> None:
    picture = sm.testing.index_frames(1, 38, 30)[0]
    desc = sm.get_video_filter_desc(pix_fmt="nv12", color_matrix="bt709", color_range="pc")
    frames = sm.decode_packets(sm.demux_image(sm.testing.make_image(picture)), desc)
    buffer = sm.convert_frames(frames, layout=layout)
    stated: dict[str, Any] = {"matrix": "bt709", "color_range": "pc"}
    expected = rgb(frames.planes, "nv12", **stated)
    np.testing.assert_array_equal(rgb(buffer, "nv12"), expected)
    other = rgb(frames.planes, "nv12", matrix="fcc", color_range="tv")
    told = rgb(buffer, "nv12", matrix="fcc", color_range="tv")
    np.testing.assert_array_equal(told, other)


def test_nv12_is_what_its_buffers_say_else_as_in_spdl() -> None:
    values = np.arange(54, dtype=np.uint8).reshape(9, 6) * 4
    for colors in (("bt601", "tv"), ("bt2020nc", "pc")):
        buffer = sm.CPUBuffer(values, colorspace=colors[0], color_range=colors[1])
        for coeff, matrix in ((None, colors[0]), (4, "fcc")):
            told = {"matrix": matrix, "color_range": colors[1], "layout": "NCHW"}
            expected = rgb(values[None], "nv12", **told)
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
        with pytest.raises(
            ValueError, match=rf"no nv12 picture fills an array of \(1, {rows}, 8\)"
        ):
            rgb(block, "nv12")
        return
    assert rgb(block, "nv12").shape == (heights[0], 8, 3)


@each("algo", ["bicubic", "bilinear"])
@each("size", [1, 2, 7, 16, 31, 100])
@each("length", [1, 2, 3, 16, 31, 640])
def test_windows_lie_inside_and_weigh_one(length: int, size: int, algo: Any) -> None:
    for sub in (1, 2, 4):
        taps = line_taps(length, size, sub, algo, stretch=True)
        assert taps.first.min() >= 0
        assert (taps.first + len(taps.weights)).max() <= -(-length // sub)
        np.testing.assert_allclose(taps.weights.sum(0, dtype=float), 1, atol=1e-6)


def test_launch_is_asked_for_as_the_kernel_needs_it(cupy: FakeCupy) -> None:
    config = cuda_config_of(1, stream=0xBEEF)
    luma, chroma = np.zeros((3, 20, 100), np.uint8)[:, :, :70], np.zeros((3, 10, 35, 2), np.uint8)
    planes = there([luma, chroma], 1)
    result = yuv_to_rgb(planes, "nv12", layout="NCHW", cuda_config=config)
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
        ("p010", None, "yuv16_to_uint8"),
        ("p010", ((0, 0, 0), (1, 1, 1)), "yuv16_to_float32"),
    ],
)
def test_kernel_is_that_of_the_types(
    cupy: FakeCupy, pix_fmt: str, normalize: Any, name: str
) -> None:
    dtype = yuv_format(pix_fmt).dtype
    yuv_to_rgb(there([Y.astype(dtype), UV.astype(dtype)]), pix_fmt, normalize=normalize)
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
        yuv_to_rgb(there([Y, UV], 1), "nv12", cuda_config=cuda_config)
    assert [launch.device for launch in cupy.card.driver.launches] == [1] * 3


def test_threads_use_their_own_tables(cupy: FakeCupy) -> None:
    def work(width: int) -> None:
        for _ in range(20):
            yuv_to_rgb(there([Y, UV]), "nv12", width=width)

    threads = [threading.Thread(target=work, args=(width,)) for width in (5, 9, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(
        int(launch.argument["luma_x"]["size"][0]) for launch in cupy.card.driver.launches
    ) == ([5] * 20 + [9] * 20 + [13] * 20)


@pytest.mark.parametrize(
    ("planes", "pix_fmt", "message"),
    [
        ([Y, UV], "rgb24", "pix_fmt 'rgb24' is not known here. It may be nv12"),
        ([Y, UV], "yuv420p11", "pix_fmt 'yuv420p11' is not known"),
        ([Y], "nv12", "nv12 has 2 planes, not 1"),
        ([Y, UV[..., 0], UV[..., 1]], "nv12", "nv12 has 2 planes, not 3"),
        ([Y, UV[:2]], "nv12", re.escape("must be (3, 4, 2), not (2, 4, 2)")),
        ([Y, Y, Y], "yuv420p", re.escape("luma of shape (6, 8) must be (3, 4), not (6, 8)")),
        (
            [Y[0], UV],
            "nv12",
            re.escape("must be (height, width) or (frames, height, width), not (8,)"),
        ),
        ([Y[:0], UV], "nv12", re.escape("not (0, 8)")),
        ([Y[None], UV], "nv12", re.escape("must be (1, 3, 4, 2), not (3, 4, 2)")),
        (NV12, "nv12", re.escape("of shape (9, 8), must be as convert_frames")),
        (NV12[None, None], "nv16", "Pass a list with one for each plane"),
        (NV12[None, None].repeat(2, 1), "nv12", re.escape("of (1, 2, 9, 8): it must be (1, 9, 8)")),
        (NV12[None], "yuv444p", re.escape("of (1, 9, 8): it must be (3, 9, 8)")),
        (NV12[None, :, :7].copy(), "nv12", re.escape("of (1, 9, 7): it must be (1, 9, 8)")),
    ],
)
def test_wrong_planes(planes: Any, pix_fmt: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rgb(planes, pix_fmt)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float32", "bool"])
def test_wrong_type_of_planes(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"planes of nv12 must be uint8, not {dtype}"):
        rgb([Y.astype(dtype), UV.astype(dtype)], "nv12")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"matrix": "gbr"}, ValueError, "matrix must be one of bt709, .* or None, not 'gbr'"),
        ({"matrix": "bt2020c"}, ValueError, "or None, not 'bt2020c'"),
        ({"color_range": "full"}, ValueError, "color_range must be 'tv', 'pc' or None, not 'full'"),
        ({"scale_algo": "lanczos"}, ValueError, "scale_algo must be 'bicubic', 'bilinear' or None"),
        ({"layout": "HWC"}, ValueError, "layout must be 'NHWC' or 'NCHW', not 'HWC'"),
        ({"width": 0}, ValueError, "width must be at least 1, not 0"),
        ({"height": 2.0}, TypeError, "height must be an int, not 2.0"),
        ({"width": True}, TypeError, "width must be an int, not True"),
        ({"normalize": 0.5}, TypeError, r"normalize must be \(mean, std\), each a number or one"),
        (
            {"normalize": ((0, 0), (1, 1))},
            ValueError,
            "mean must have one number, or one for each channel",
        ),
        (
            {"normalize": ((0, 0, 0), (1, 0, 1))},
            ValueError,
            "std must be numbers that are finite and above",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rgb([Y, UV], "nv12", **options)


def test_wrong_range_of_a_format_that_states_its_own() -> None:
    with pytest.raises(ValueError, match="color_range='tv' contradicts yuvj444p"):
        rgb(np.zeros((3, 4, 4), np.uint8), "yuvj444p", color_range="tv")


def test_gray_needs_no_matrix_and_has_full_range() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for options in ({}, {"matrix": "gbr", "color_range": "tv"}, {"matrix": "bt709"}):
        result = rgb([levels], "gray", **options)
        np.testing.assert_array_equal(result, np.repeat(levels[..., None], 3, -1))


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
        ([there(Y), UV], {}, TypeError, "not in ndarray: transfer_buffer makes one"),
        (sm.CPUBuffer(NV12), {}, TypeError, "not in CPUBuffer: transfer_buffer makes one"),
        ([there(Y), there(UV, 1)], {}, ValueError, r"one device, not on \[0, 1\]"),
        (
            there([Y, UV]),
            {"cuda_config": 1},
            ValueError,
            "lie on CUDA device 0, and device 1 is",
        ),
        (
            there([Y, UV]),
            {"cuda_config": 2},
            ValueError,
            "CUDA device 2 was asked for, and there are 2",
        ),
        (
            there([Y, UV]),
            {"cuda_config": -1},
            ValueError,
            "device_index must be at least 0, not -1",
        ),
        (
            there([Y, UV]),
            {"cuda_config": True},
            TypeError,
            "cuda_config must be the number of a device",
        ),
        (there([Y, UV]), {"cuda_config": "cuda:0"}, TypeError, "not 'cuda:0'"),
    ],
)
def test_wrong_devices(
    planes: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        yuv_to_rgb(planes, "nv12", **options)


@pytest.mark.usefixtures("cupy")
def test_samples_that_straddle_addresses() -> None:
    raw = np.zeros((6, 17), np.uint8)
    luma = np.ndarray((6, 8), np.uint16, raw, 0, (17, 2))
    with pytest.raises(ValueError, match=r"must begin on whole samples, but the strides are"):
        yuv_to_rgb(there([luma, UV.astype(np.uint16)]), "p010")


def test_planes_on_a_device_need_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    fresh_process(monkeypatch)
    with pytest.raises(
        sm.TransferError, match=r"needs a CUDA device, .*neither torch nor cupy.*pip install"
    ):
        yuv_to_rgb(there([Y, UV]), "nv12")


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
