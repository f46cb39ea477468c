"""Chroma of pictures with odd sides stands where it does in the same picture with even ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spdl_media as sm
from spdl_media.testing import index_frames, make_image, make_video


def smooth(width: int, height: int) -> Any:
    """Colours that change slowly, but for an edge in the middle, where a drift shows."""
    y, x = np.mgrid[:height, :width]
    picture = np.stack([x * 2 % 256, 255 - x, y * 2 % 256], -1).astype(np.uint8)
    picture[:, width // 2 :] = picture[:, width // 2 :, ::-1]
    return picture


def planes_of(data: bytes) -> tuple[Any, ...]:
    return sm.decode_packets(sm.demux_image(data), None).planes


@pytest.mark.parametrize("pix_fmt", ["yuvj420p", "yuvj422p"])
@pytest.mark.parametrize("size", [(127, 64), (128, 63), (127, 63)])
@pytest.mark.parametrize("orientation", [1, 6])
def test_stills(pix_fmt: str, size: tuple[int, int], orientation: int) -> None:
    """The oracle: chroma repeated to full size by a triangle, as the even picture has it."""
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
    """Chroma samples stand in the middle of the pixels they cover; linear in between."""
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


def test_video_and_a_damaged_frame_keep_their_marks_and_times() -> None:
    frames = index_frames(5, 63, 47)
    data = make_video(frames, codec="ffv1", pix_fmt="yuv420p")
    packets = sm.demux_video(data)
    rgb = sm.decode_packets(packets)
    assert (rgb.width, rgb.height, rgb.pix_fmt) == (63, 47, "rgb24")
    assert rgb.timestamps == sm.decode_packets(packets, None).timestamps
    for got, wanted in zip(rgb, frames, strict=True):
        assert np.abs(got.planes[0].astype(int) - wanted).mean() < 12  # what 4:2:0 itself loses


def test_other_filters_see_the_picture_as_it_is() -> None:
    data = make_image(smooth(63, 47), codec="mjpeg", pix_fmt="yuvj420p")
    packets = sm.demux_image(data)
    assert sm.decode_packets(packets, "format=yuv420p").width == 63
    small = sm.decode_packets(packets, sm.get_video_filter_desc(scale_width=32, scale_height=24))
    assert (small.width, small.height) == (32, 24)
    cut = sm.decode_packets(packets, sm.get_video_filter_desc(filter_desc="crop=12:8"))
    assert (cut.width, cut.height) == (12, 8)
