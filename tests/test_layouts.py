"""Arrays of all pixel formats and layouts, compared with arrays computed by NumPy only."""

from __future__ import annotations

from typing import Any

import av
import numpy as np
import pytest
from effort import each
from plane_oracle import ROWS, Row, image

import spdl_media as sm
from spdl_media.formats import pixel_layout

WITHOUT_A_ROW = [
    "pal8",
    "yuyv422",
    "uyvy422",
    "yuv410p",
    "yuv411p",
    "yuv440p",
    "yuva420p",
    "yuva422p",
    "nv16",
    "nv24",
    "p210le",
    "p410le",
    "y210le",
    "rgb0",
    "rgb565le",
    "rgb8",
    "x2rgb10le",
    "gbrpf32le",
    "monow",
    "bayer_rggb8",
    "xyz12le",
]

rows = each("row", ROWS)


@rows
@each("width, height", [(10, 6), (10, 7), (6, 1)])
@each("upwards", [False, True])
def test_one_image(row: Row, width: int, height: int, upwards: bool) -> None:
    planes = row.planes(width, height, seed=1)
    buffer = sm.convert_frames(image(planes, row.pix_fmt, upwards=upwards))
    assert buffer.dtype.isnative
    _same(buffer, row.array(planes))


@each("upwards", [False, True])
def test_the_frames_of_these_tests_have_padded_and_upward_rows(upwards: bool) -> None:
    plane = image(ROWS[0].planes(10, 6, 1), "rgb24", upwards=upwards).planes[0]
    assert abs(plane.strides[0]) > 30
    assert (plane.strides[0] < 0) == upwards


@rows
def test_batches_put_b_and_n_in_front(row: Row) -> None:
    planes = [row.planes(6, 5, seed) for seed in range(6)]
    single = np.stack([row.array(one) for one in planes])
    images = [image(one, row.pix_fmt, upwards=seed == 3) for seed, one in enumerate(planes)]
    videos = [sm.VideoFrames([one._frames[0] for one in images[k : k + 3]]) for k in (0, 3)]
    _same(sm.convert_frames(images), single)
    _same(sm.convert_frames(tuple(images[:1])), single[:1])
    _same(sm.convert_frames(videos[0]), single[:3])
    _same(sm.convert_frames(videos), single.reshape(2, 3, *single.shape[1:]))


@rows
def test_an_odd_width_tiles_or_says_so(row: Row) -> None:
    planes = row.planes(7, 5, seed=2)
    made = image(planes, row.pix_fmt)
    if row.kind in ("HWC", "CHW", "gbr"):
        _same(sm.convert_frames(made), row.array(planes))
        return
    with pytest.raises(sm.ConvertError, match=rf"7x5 {row.pix_fmt} .* width is odd.*planes"):
        sm.convert_frames(made)


@rows
def test_planes_of_every_row(row: Row) -> None:
    planes = [row.planes(7, 5, seed) for seed in range(3)]
    buffers = sm.convert_frames([image(one, row.pix_fmt) for one in planes], layout="planes")
    assert isinstance(buffers, tuple)
    assert len(buffers) == len(planes[0])
    for buffer, *expected in zip(buffers, *planes, strict=True):
        stacked = np.stack(expected)
        if row.channels == 1 and row.kind == "HWC":
            stacked = stacked[..., 0]
        _same(buffer, stacked.astype(stacked.dtype.newbyteorder("=")))
        assert buffer.array.ctypes.data % 64 == 0


@each("row", [row for row in ROWS if row.kind in ("HWC", "CHW", "gbr")])
def test_layout_turns_images_whatever_their_own_order(row: Row) -> None:
    planes = [row.planes(7, 5, seed) for seed in range(2)]
    own = np.stack([row.array(one) for one in planes])
    channels_last = own if row.kind == "HWC" else np.moveaxis(own, 1, -1)
    images = [image(one, row.pix_fmt) for one in planes]
    _same(sm.convert_frames(images, layout="NHWC"), channels_last)
    _same(sm.convert_frames(images, layout="NCHW"), np.moveaxis(channels_last, -1, 1))
    _same(sm.convert_frames(images[0], layout="NCHW"), np.moveaxis(channels_last[0], -1, 0))
    video = sm.VideoFrames([one._frames[0] for one in images])
    _same(sm.convert_frames([video], layout="NCHW"), np.moveaxis(channels_last, -1, 1)[None])


@each("row", [row for row in ROWS if row.kind in ("420", "422", "nv")])
@each("layout", ["NCHW", "NHWC"])
@each("width", [6, 7])
def test_layout_is_not_for_subsampled_chroma(row: Row, layout: Any, width: int) -> None:
    made = image(row.planes(width, 5, 0), row.pix_fmt)
    with pytest.raises(
        sm.ConvertError, match=rf"layout='{layout}' is for RGB and gray; {row.pix_fmt} "
    ):
        sm.convert_frames(made, layout=layout)


def test_colours_are_where_the_format_says(rng: np.random.Generator) -> None:
    """FFmpeg converts these from one RGB image, so the order of planes is its own."""
    picture = rng.integers(0, 256, (5, 8, 3), dtype=np.uint8)
    source = av.VideoFrame.from_ndarray(picture, "rgb24")
    opaque = np.dstack([picture, np.full((5, 8), 255, np.uint8)])
    expected = {
        "rgb24": picture,
        "bgr24": picture[..., ::-1],
        "rgba": opaque,
        "bgra": opaque[..., [2, 1, 0, 3]],
        "argb": opaque[..., [3, 0, 1, 2]],
        "abgr": opaque[..., ::-1],
        "gbrp": np.moveaxis(picture, -1, 0),
        "gbrap": np.moveaxis(opaque, -1, 0),
    }
    for pix_fmt, array in expected.items():
        _same(sm.convert_frames(sm.ImageFrames((source.reformat(format=pix_fmt),))), array)
    for pix_fmt in ("rgb48le", "rgb48be", "gbrp16le", "gbrp16be"):
        made = sm.convert_frames(
            sm.ImageFrames((source.reformat(format=pix_fmt),)), layout="NHWC"
        ).array
        # swscale rounds in the conversion to 16 bits; swapped colours would differ much more.
        assert abs(made / 257 - picture).max() < 2


@each("pix_fmt", WITHOUT_A_ROW)
def test_a_format_without_a_row_names_a_filter(pix_fmt: str) -> None:
    made = sm.ImageFrames((av.VideoFrame(8, 4, pix_fmt),))
    with pytest.raises(
        sm.ConvertError, match=rf"'{pix_fmt}' makes no array.*get_video_filter_desc.*'planes'"
    ):
        sm.convert_frames(made)


@each("pix_fmt", WITHOUT_A_ROW)
def test_planes_take_formats_without_a_row(pix_fmt: str, rng: np.random.Generator) -> None:
    frame = av.VideoFrame(8, 4, pix_fmt)
    for plane in frame.planes:
        plane.update(rng.integers(0, 256, plane.buffer_size, dtype=np.uint8).tobytes())
    made = sm.ImageFrames((frame,))
    buffers = sm.convert_frames([made, made], layout="planes")
    assert len(buffers) == made.num_planes
    for buffer, plane in zip(buffers, made.planes, strict=True):
        # Compare bytes, because random bits may be NaN, which is not equal to itself.
        expected = np.stack([plane, plane])
        assert buffer.array.tobytes() == expected.astype(buffer.dtype).tobytes()
        assert buffer.shape == expected.shape


@each(
    "pix_fmt, shapes",
    [
        ("yuv440p", [(4, 8), (2, 8), (2, 8)]),
        ("yuv411p", [(4, 8), (4, 2), (4, 2)]),
        ("yuva420p", [(4, 8), (2, 4), (2, 4), (4, 8)]),
        ("nv16", [(4, 8), (4, 4, 2)]),
    ],
)
def test_planes_of_other_subsamplings(pix_fmt: str, shapes: list[tuple[int, ...]]) -> None:
    planes = [
        (np.arange(np.prod(shape)) + 50 * k).astype(np.uint8).reshape(shape)
        for k, shape in enumerate(shapes)
    ]
    for upwards in (False, True):
        buffers = sm.convert_frames(image(planes, pix_fmt, upwards=upwards), layout="planes")
        for buffer, plane in zip(buffers, planes, strict=True):
            _same(buffer, plane)


def test_every_format_of_ffmpeg_with_a_row_is_in_the_tables_of_the_tests() -> None:
    names = {name for name in av.video.format.names if pixel_layout(name) is not None}
    assert names - {row.pix_fmt for row in ROWS} == set()


def _same(buffer: sm.CPUBuffer, expected: np.ndarray) -> None:
    assert buffer.shape == expected.shape
    assert buffer.dtype == expected.dtype
    assert np.array_equal(buffer.array, expected)
    assert buffer.array.flags.c_contiguous
    assert buffer.array.flags.writeable
