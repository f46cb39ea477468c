"""Sizes and positions of images that DALI scales, compared with FFmpeg's filters. Needs no DALI."""

from __future__ import annotations

import re

import numpy as np
from effort import each, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import spdl_media as sm
from spdl_media.cuda.video_rows import covered
from spdl_media.geometry import Placement, place

SIDES = st.integers(1, 90)


def pnm(picture: np.ndarray) -> bytes:
    height, width, _ = picture.shape
    return f"P6\n{width} {height}\n255\n".encode() + picture.tobytes()


def white(width: int, height: int) -> bytes:
    return pnm(np.full((height, width, 3), 255, np.uint8))


@settings(max_examples=examples(60))
@given(iw=SIDES, ih=SIDES, width=SIDES, height=SIDES)
def test_border_is_where_ffmpeg_puts_it(iw: int, ih: int, width: int, height: int) -> None:
    found = place((iw, ih), width, height, "pad")
    oracle = np.asarray(sm.load_image(white(iw, ih), width=width, height=height))
    own = np.zeros((height, width, 3), np.uint8)
    covered(own[None], found)[:] = 255
    np.testing.assert_array_equal(own, oracle)
    assert (not found.has_border) is bool(oracle.all())


@settings(max_examples=examples(60))
@given(iw=SIDES, ih=SIDES, width=SIDES, height=SIDES)
def test_covering_size_is_the_one_of_ffmpeg(iw: int, ih: int, width: int, height: int) -> None:
    found = place((iw, ih), width, height, "crop")
    graph = sm.get_video_filter_desc(scale_width=width, scale_height=height, scale_mode="crop")
    assert graph is not None
    uncut = re.sub(r",crop=[^,]*", "", graph)
    frames = sm.decode_packets(sm.demux_image(white(iw, ih)), uncut)
    assert found.scaled == (frames.width, frames.height)
    assert found.canvas == (width, height)


@each("inner", range(10, 26))
@each("outer", [9, 10])
def test_window_lies_where_ffmpeg_cuts(inner: int, outer: int) -> None:
    """Without scaling, the values of each column show its original position."""
    columns = np.repeat(np.arange(inner, dtype=np.uint8)[None, :, None], 8, 0).repeat(3, 2)
    for picture, sides in ((columns, (outer, 8)), (columns.transpose(1, 0, 2), (8, outer))):
        cut = np.asarray(
            sm.load_image(pnm(picture), width=sides[0], height=sides[1], scale_mode="crop")
        )
        size = (picture.shape[1], picture.shape[0])
        found = place(size, *sides, "crop")
        assert found.scaled == size
        assert int(cut[0, 0, 0]) == -min(found.left, found.top)


@settings(max_examples=examples(40))
@given(iw=SIDES, ih=SIDES, side=SIDES, is_width=st.booleans())
def test_one_side_keeps_the_aspect_ratio_as_ffmpeg_does(
    iw: int, ih: int, side: int, is_width: bool
) -> None:
    width, height = (side, None) if is_width else (None, side)
    found = place((iw, ih), width, height, "pad")
    shape = sm.load_image(white(iw, ih), width=width, height=height).shape
    assert found.scaled == shape[1::-1] == found.canvas


def test_without_sizes_nothing_is_done() -> None:
    assert place((7, 5), None, None, "pad") == Placement((7, 5), (7, 5))


def test_stretching_takes_the_sizes_as_they_are() -> None:
    assert place((7, 500), 20, 30, None) == Placement((20, 30), (20, 30))
