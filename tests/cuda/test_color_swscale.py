"""The reference is within one level of FFmpeg's scaler with accurate flags, and of the exact equations."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from color_reference import by_reference, noise, to_rgb
from effort import each
from plane_oracle import frame_of

import spdl_media as sm
from spdl_media.cuda.color_plan import SEMI_PLANAR, rgb_matrix

converted, nv12_to_rgb, nv12_to_bgr = (
    partial(by_reference, function) for function in (to_rgb, sm.nv12_to_rgb, sm.nv12_to_bgr)
)
MEDIA = Path(__file__).resolve().parents[2] / "samples" / "media"
ACCURATE = "accurate_rnd+full_chroma_int+full_chroma_inp"


def swscale(
    frame: av.VideoFrame, size: tuple[int, int], algo: str, *, setparams: str
) -> np.ndarray:
    """Convert a frame by FFmpeg's scaler."""
    graph = av.filter.Graph()
    last = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base="1/1"
    )
    for name, arguments in (
        ("setparams", setparams),
        ("scale", f"{size[0]}:{size[1]}:flags={algo}+{ACCURATE}"),
        ("format", "gbrp"),
        ("format", "rgb24"),
        ("buffersink", None),
    ):
        step = graph.add(name, arguments)
        last.link_to(step)
        last = step
    graph.configure()
    frame.pts = 0
    graph.push(frame)
    result = graph.pull()
    assert isinstance(result, av.VideoFrame)
    return result.to_ndarray()


def pairs_of(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Interleave U and V."""
    return np.stack([u, v], -1)


def assert_within_one(
    pix_fmt: str,
    source: tuple[int, int],
    size: tuple[int, int],
    algo: Any = "bicubic",
    *,
    matrix: str = "bt709",
    color_range: str = "tv",
    contrast: float = 0.3,
) -> None:
    # Moderate values only: where RGB would reach twice white, FFmpeg's integers overflow.
    given = noise(pix_fmt, *source, contrast=contrast)
    expected = swscale(
        frame_of(given, pix_fmt),
        size,
        algo,
        setparams=f"colorspace={matrix}:range={color_range}",
    )
    result = converted(
        given,
        pix_fmt,
        matrix=matrix,
        color_range=color_range,
        width=size[0],
        height=size[1],
        scale_algo=algo,
    )
    difference = np.abs(np.asarray(result).astype(int) - expected)
    assert difference.max() <= 1
    # A difference of one level is rare: only for values near the middle between two levels.
    assert difference.sum() <= max(1, 0.03 * difference.size)


@each("color_range", ["tv", "pc"])
@each("matrix", ["bt709", "fcc", "bt470bg", "smpte170m", "smpte240m", "bt2020nc"])
def test_matrices_and_ranges(matrix: str, color_range: str) -> None:
    for pix_fmt in ("nv12", "p010le"):
        assert_within_one(
            pix_fmt, (64, 48), (64, 48), "bilinear", matrix=matrix, color_range=color_range
        )


@each("pix_fmt", list(SEMI_PLANAR))
@each("size", [(64, 48), (40, 30), (90, 100)])
def test_formats(pix_fmt: str, size: tuple[int, int]) -> None:
    assert_within_one(pix_fmt, (64, 48), size)


@each("algo", ["bicubic", "bilinear"])
@each(
    "source, size",
    [
        ((64, 48), (64, 48)),
        ((64, 48), (63, 48)),
        ((64, 48), (5, 3)),
        ((63, 47), (32, 24)),
        ((63, 47), (63, 24)),
        ((63, 47), (100, 90)),
        ((500, 375), (224, 224)),
        ((640, 360), (1280, 720)),
        ((640, 360), (1920, 1080)),
        ((8, 6), (20, 20)),
        ((4, 4), (4, 4)),
        ((2, 2), (2, 2)),
        ((16, 16), (1, 1)),
    ],
)
def test_sizes(algo: str, source: tuple[int, int], size: tuple[int, int]) -> None:
    assert_within_one("nv12", source, size, algo)


@pytest.mark.parametrize("algo", ["bicubic", "bilinear"])
def test_black_beside_white(algo: str) -> None:
    """The filter overshoots at every edge, and FFmpeg clips scaled rows above white."""
    y = np.where(np.random.default_rng(0).random((47, 63)) < 0.5, 0, 255).astype(np.uint8)
    chroma = np.full((24, 32), 128, np.uint8)
    for size in ((32, 24), (100, 90), (63, 30)):
        expected = swscale(
            frame_of([y, pairs_of(chroma, chroma)], "nv12"),
            size,
            algo,
            setparams="colorspace=smpte170m:range=pc",
        )
        result = converted(
            [y, pairs_of(chroma, chroma)],
            "nv12",
            color_range="pc",
            width=size[0],
            height=size[1],
            scale_algo=algo,
        )
        assert np.abs(np.asarray(result).astype(int) - expected).max() <= 1


def test_full_range_of_deep_formats_is_that_of_ffmpeg() -> None:
    """White is 255 * 2**(bits - 8); by H.273 it would be 2**bits - 1, a difference of up to 1.3 levels."""
    levels = np.linspace(0, 1023, 64).astype("<u2")
    y = np.repeat(levels[None], 8, 0)
    given = [y << 6, np.full((4, 32, 2), 512 << 6, "<u2")]
    expected = swscale(
        frame_of(given, "p010le"),
        (64, 8),
        "bilinear",
        setparams="colorspace=bt709:range=pc",
    )
    exact = np.clip(levels / 4, 0, 255)
    result = np.asarray(converted(given, "p010le", color_range="pc"))
    assert np.abs(result[0, :, 0] - exact).max() <= 0.51
    assert np.abs(result.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("size", [None, (224, 126), (100, 200)])
@pytest.mark.parametrize("name", ["nasa_13013.mp4", "technician_turned.jpg"])
def test_same_as_decoding_to_rgb(name: str, size: tuple[int, int] | None) -> None:
    """Compare with the CPU path, at the original size and scaled."""
    stored = sm.decode_config(orient=False)
    if name.endswith("jpg"):
        packets: Any = sm.demux_image(str(MEDIA / name))
    else:
        packets = sm.demux_video(str(MEDIA / name), timestamp=(1, 1.1))
    width, height = size or (None, None)
    desc = sm.get_video_filter_desc(
        scale_width=width, scale_height=height, scale_mode=None, quality="accurate"
    )
    expected = np.asarray(sm.convert_frames(sm.decode_packets(packets, desc, stored)))
    native = sm.decode_packets(packets, None, stored)
    luma, u, v = map(np.asarray, sm.convert_frames(native, layout="planes"))
    result = converted(
        [luma, pairs_of(u, v)],
        "nv12",
        matrix=native.colorspace,
        color_range=native.color_range,
        width=width,
        height=height,
    )
    assert np.asarray(result).shape == expected.shape
    assert np.abs(np.asarray(result).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("size", [(127, 64), (128, 63), (127, 63)])
def test_odd_sides_keep_chroma_in_place_as_the_cpu_path_does(size: tuple[int, int]) -> None:
    width, height = size
    y, x = np.mgrid[:height, :width]
    picture = np.stack([x * 2 % 256, 255 - x, y * 2 % 256], -1).astype(np.uint8)
    jpeg = sm.testing.make_image(picture, codec="mjpeg", pix_fmt="yuvj420p")
    packets = sm.demux_image(jpeg)
    native = sm.decode_packets(packets, None)
    luma, u, v = native.planes
    colors = {"matrix": native.colorspace, "color_range": native.color_range}
    result = converted([luma, pairs_of(u, v)], "nv12", **colors)
    expected = sm.decode_packets(packets).planes[0].astype(int)
    assert np.abs(np.asarray(result).astype(int) - expected).max() <= 1


def test_ycgco_turns_back_what_h273_makes() -> None:
    """FFmpeg's scaler does not have this matrix; the test uses the equations of H.273 in limited range."""
    rgb = np.random.default_rng(0).random((3, 16, 16))
    red, green, blue = rgb
    y = green / 2 + (red + blue) / 4
    cg, co = green / 2 - (red + blue) / 4, (red - blue) / 2
    coded = np.rint([16 + 219 * y, 128 + 224 * cg, 128 + 224 * co, np.ones_like(y)])
    matrix = rgb_matrix("ycgco", full_range=False, bits=8)
    result = np.einsum("ij,jhw->ihw", matrix, coded)
    assert np.abs(result - 255 * rgb).max() < 2  # half a level of each of three, rounded


def test_nv12_functions_are_spdls() -> None:
    """The defaults are those of SPDL: BT.709, limited range and planar; nv12_to_bgr has blue first."""
    y, uv = noise("nv12", 16, 12, contrast=0.3)
    buffer = np.concatenate([y, uv.reshape(6, 16)])
    rgb = np.asarray(nv12_to_rgb([buffer, buffer]))
    assert rgb.shape == (2, 3, 12, 16)
    plain = np.asarray(converted([y, uv], "nv12", matrix="bt709"))
    np.testing.assert_array_equal(rgb[1], plain.transpose(2, 0, 1))
    np.testing.assert_array_equal(np.asarray(nv12_to_bgr(buffer))[0], rgb[0, ::-1])
    for coeff, matrix in {
        4: "fcc",
        5: "bt601",
        6: "bt601",
        7: "smpte240m",
        8: "ycgco",
        9: "bt2020nc",
        10: "bt2020",
    }.items():
        np.testing.assert_array_equal(
            np.asarray(nv12_to_rgb(buffer, coeff=coeff))[0],
            np.asarray(converted([y, uv], "nv12", matrix=matrix, layout="NCHW")),
        )


@pytest.mark.parametrize("size", [(16, 12), (20, 9)])
def test_float_results_are_normalised_and_not_rounded(size: tuple[int, int]) -> None:
    given = noise("nv12", 16, 12, contrast=0.3)
    sides: dict[str, Any] = {"width": size[0], "height": size[1]}
    whole = np.asarray(converted(given, "nv12", **sides)).astype(float)
    unit = np.asarray(converted(given, "nv12", normalize=((0, 0, 0), (1, 1, 1)), **sides))
    assert unit.dtype == np.float32
    assert unit.min() >= 0
    assert unit.max() <= 1
    assert np.abs(unit * 255.0 - whole).max() <= 0.501
    assert len(np.unique(unit)) > 256
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    result = np.asarray(converted(given, "nv12", normalize=(mean, std), **sides))
    np.testing.assert_allclose(result, (unit - mean) / std, rtol=0, atol=2e-6)
