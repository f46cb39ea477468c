"""Chroma of images and crops with odd sides has the same position as in the image with even sides."""

from __future__ import annotations

from functools import cache
from typing import Any

import effort
import numpy as np
import pytest
from effort import each

import spdl_media as sm

# Private: patched to force the filter graph, to compare both paths.
from spdl_media import filters, image_decoder
from spdl_media.testing import index_frames, make_image, make_video


def smooth(width: int, height: int) -> Any:
    """Make smooth colours with an edge in the middle, where a shift is visible."""
    y, x = np.mgrid[:height, :width]
    picture = np.stack([x * 2 % 256, 255 - x, y * 2 % 256], -1).astype(np.uint8)
    picture[:, width // 2 :] = picture[:, width // 2 :, ::-1]
    return picture


def planes_of(data: bytes) -> tuple[Any, ...]:
    return sm.decode_packets(sm.demux_image(data), None).planes


@each("pix_fmt", ["yuvj420p", "yuvj422p"])
@each("size", [(127, 64), (128, 63), (127, 63)])
@each("orientation", [1, 6])
def test_stills(pix_fmt: str, size: tuple[int, int], orientation: int) -> None:
    """The expected image: chroma upsampled by a triangle filter, as in the image with even sides."""
    width, height = size
    options = {"qmin": "2", "qmax": "2"}
    data = make_image(smooth(width, height), codec="mjpeg", pix_fmt=pix_fmt, options=options)
    luma, *chroma = (plane.astype(float) for plane in planes_of(data))
    u, v = (upsampled(plane, height, width) - 128 for plane in chroma)
    wanted = np.stack([luma + 1.402 * v, luma - 0.344136 * u - 0.714136 * v, luma + 1.772 * u], -1)
    wanted = np.clip(wanted, 0, 255)
    if orientation == 6:
        data = with_exif_orientation(data, 6)
        wanted = np.rot90(wanted, -1)
    got = sm.decode_packets(sm.demux_image(data)).planes[0].astype(float)
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).mean() < 0.5
    assert np.abs(got - wanted).max() <= 4


def upsampled(plane: Any, height: int, width: int) -> Any:
    """Upsample linearly; chroma samples are in the middle of the pixels that they cover."""
    for axis, size in enumerate((height, width)):
        if plane.shape[axis] == size:
            continue
        place = (np.arange(size) - 0.5) / 2
        known = np.arange(plane.shape[axis])
        plane = np.apply_along_axis(lambda line: np.interp(place, known, line), axis, plane)  # noqa: B023
    return plane


def with_exif_orientation(jpeg: bytes, value: int) -> bytes:
    tiff = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + bytes([value, 0, 0, 0, 0, 0, 0, 0])
    body = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + jpeg[2:]


BOXES = [
    (0, 0, 127, 95),  # all of it
    (20, 30, 39, 23),  # odd sides
    (21, 31, 40, 24),  # an odd place
    (61, 43, 1, 1),
    (88, 71, 39, 24),  # to the corner
    (0, 3, 127, 2),
    (2, 0, 2, 95),  # few columns at an edge, then few rows
    (125, 0, 2, 95),
    (0, 94, 127, 1),
]
SAMPLINGS = [
    ("mjpeg", "yuvj420p"),
    ("mjpeg", "yuvj422p"),
    ("mjpeg", "yuvj444p"),
    ("tiff", "yuv420p"),
    ("tiff", "yuv410p"),
    ("jpeg2000", "yuv411p"),
    ("jpeg2000", "yuv440p"),
    ("jpeg2000", "yuva420p"),
    ("libsvtav1", "yuv420p10le"),
    ("png", "rgb24"),
]


@cache
def noise_image(made: tuple[str, str], size: tuple[int, int]) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    return make_image(noise, codec=made[0], pix_fmt=made[1])


@each("made", SAMPLINGS)
@each(
    "pix_fmt, size",
    [
        *((pix_fmt, (127, 95)) for pix_fmt in ("rgb24", "rgba", "gbrp", "rgb48", "yuv444p")),
        *((pix_fmt, (128, 96)) for pix_fmt in ("rgb24", "yuv444p")),
    ],
)
def test_what_is_cut_and_mirrored_is_part_of_the_whole(
    made: tuple[str, str], pix_fmt: str, size: tuple[int, int]
) -> None:
    """Bit for bit: a crop equals the same box of the converted image, for any position."""
    data = noise_image(made, size)
    options: dict[str, Any] = {"pix_fmt": pix_fmt, "layout": "NCHW"}
    whole = np.asarray(sm.load_image(data, **options))
    # All boxes meet each sampling, and each format.
    is_usual = (pix_fmt, size) == ("rgb24", (127, 95))
    boxes = BOXES if is_usual or effort.LONG else BOXES[SAMPLINGS.index(made) % 3 :: 3]
    for x, y, w, h in boxes:
        part = whole[:, y : y + h, x : x + w]
        got = sm.load_image_batch(
            [data, data], crops=[(x, y, w, h)] * 2, flips=[False, True], **options
        )
        np.testing.assert_array_equal(np.asarray(got), [part, part[..., ::-1]])
    flipped = sm.load_image_batch([data], flips=[True], **options)
    np.testing.assert_array_equal(np.asarray(flipped)[0], whole[..., ::-1])


@each("box", [None, *BOXES])
@each("flip", [False, True])
def test_cuts_of_turned_images(box: tuple[int, int, int, int] | None, flip: bool) -> None:
    data = make_image(smooth(95, 127), codec="mjpeg", pix_fmt="yuvj420p")
    data = with_exif_orientation(data, 6)
    whole = np.asarray(sm.load_image(data))
    assert whole.shape == (95, 127, 3)
    x, y, w, h = box or (0, 0, 127, 95)
    part = whole[y : y + h, x : x + w]
    got = sm.load_image_batch([data], crops=[box], flips=[flip])
    np.testing.assert_array_equal(np.asarray(got)[0], part[:, ::-1] if flip else part)


@pytest.mark.parametrize("pix_fmt", ["yuvj420p", "yuvj422p"])
@pytest.mark.parametrize("target", ["rgb24", "bgra", "gbrp"])
@pytest.mark.parametrize("flip", [False, True])
def test_cuts_without_a_graph_are_those_of_one(
    pix_fmt: str,
    target: str,
    flip: bool,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    noise = rng.integers(0, 256, (95, 127, 3), np.uint8)
    data = make_image(noise, codec="mjpeg", pix_fmt=pix_fmt)
    graphs = []
    run = filters.PictureFilter._through_graph
    monkeypatch.setattr(
        filters.PictureFilter,
        "_through_graph",
        lambda *args: graphs.append(args) or run(*args),
    )
    for box in (None, *BOXES):
        options: dict[str, Any] = {"crops": [box], "flips": [flip], "pix_fmt": target}
        plain = np.asarray(sm.load_image_batch([data], layout="NCHW", **options))
        assert not graphs
        with monkeypatch.context() as patch:
            patch.setattr(image_decoder, "without_graph", lambda *_: None)
            graph = np.asarray(sm.load_image_batch([data], layout="NCHW", **options))
        assert graphs
        graphs.clear()
        np.testing.assert_array_equal(plain, graph)


@each("size", [(127, 64), (128, 63), (127, 63)])
@each("pix_fmt", ["yuvj420p", "yuvj422p"])
def test_chroma_in_full(pix_fmt: str, size: tuple[int, int]) -> None:
    width, height = size
    options = {"qmin": "2", "qmax": "2"}
    data = make_image(smooth(width, height), codec="mjpeg", pix_fmt=pix_fmt, options=options)
    luma, *chroma = planes_of(data)
    got = np.asarray(sm.load_image(data, pix_fmt="yuv444p"))
    np.testing.assert_array_equal(got[0], luma)
    for plane, stored in zip(got[1:], chroma, strict=True):
        wanted = upsampled(stored.astype(float), height, width)
        assert np.abs(plane - wanted).max() <= 1


def test_video_and_a_damaged_frame_keep_their_marks_and_times() -> None:
    frames = index_frames(5, 63, 47)
    data = make_video(frames, codec="ffv1", pix_fmt="yuv420p")
    packets = sm.demux_video(data)
    rgb = sm.decode_packets(packets)
    assert (rgb.width, rgb.height, rgb.pix_fmt) == (63, 47, "rgb24")
    assert rgb.timestamps == sm.decode_packets(packets, None).timestamps
    for got, wanted in zip(rgb, frames, strict=True):
        assert np.abs(got.planes[0].astype(int) - wanted).mean() < 12  # the loss of 4:2:0 itself


def test_other_filters_see_the_image_as_it_is() -> None:
    data = make_image(smooth(63, 47), codec="mjpeg", pix_fmt="yuvj420p")
    packets = sm.demux_image(data)
    assert sm.decode_packets(packets, "format=yuv420p").width == 63
    small = sm.decode_packets(packets, sm.get_video_filter_desc(scale_width=32, scale_height=24))
    assert (small.width, small.height) == (32, 24)
    cut = sm.decode_packets(packets, sm.get_video_filter_desc(filter_desc="crop=12:8"))
    assert (cut.width, cut.height) == (12, 8)
