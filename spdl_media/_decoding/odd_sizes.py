"""Chroma put where it belongs when pictures are converted to formats that have it in full, without scaling.

In 4:2:0, the last chroma sample of an odd row covers one pixel, not two. FFmpeg's scaler stretches the row
of chroma over the row of pixels all the same, so that colour drifts by up to a pixel across the picture:
4 levels of 255 on average for a photograph, and 40 at edges. With one more column of pixels, a copy of
the last, it has nothing to stretch. When a picture is scaled as well, the drift is below a fifth of a pixel
for common sizes (0.2 levels at 224x224), and left alone.

A box cut out of such a picture begins and ends amid chroma samples, too. So a larger one of whole samples is
converted, and cut then: what comes out is the same part of the whole picture's conversion, bit for bit.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import av
import numpy as np

from spdl_media._filters.cuts import like_frame
from spdl_media.formats import chroma_steps, picture_planes, plane_steps
from spdl_media.orientation import Box

# The conversion that the builders write first, without a size.
_CONVERSION = re.compile(r"scale=flags=[\w+]+(?::out_\w+=\w+)*,format=(\w+)(?=,|$)")
# What is converted beyond a box: a sample of chroma in 4:1:0 at least, and up to a multiple of twice that,
# where FFmpeg's patterns of rounding begin anew.
_MARGIN = 4


class Conversion(NamedTuple):
    """A conversion to a format with full chroma, and the filters behind it."""

    filters: str
    rest: str


class Part(NamedTuple):
    """What is converted of a picture, and where the pixels that are wanted lie in it."""

    outer: Box
    inner: Box


@lru_cache(maxsize=512)
def conversion_of(desc: str) -> Conversion | None:
    """The conversion without scaling that a description begins with, if it leads to full chroma."""
    match = _CONVERSION.match(desc)
    if match is None or not _has_full_chroma(match[1]):
        return None
    return Conversion(match[0], desc[match.end() :].removeprefix(","))


def _has_full_chroma(pix_fmt: str) -> bool:
    try:
        format = av.VideoFormat(pix_fmt, 16, 16)
    except ValueError:
        return False
    return len(format.components) > 2 and all(
        part.width == part.height == 16 for part in format.components
    )


def has_cut_chroma(pix_fmt: str, width: int, height: int) -> bool:
    """Whether the last row or column of chroma is for fewer rows or columns of pixels than the others."""
    across, down = chroma_steps(pix_fmt)
    return width % across != 0 or height % down != 0


def part_around(box: Box, width: int, height: int) -> Part:
    """What to convert of a picture of this size for a box that lies inside it."""
    x, y, w, h = box
    left, right = _around(x, x + w, width)
    top, bottom = _around(y, y + h, height)
    return Part((left, top, right - left, bottom - top), (x - left, y - top, w, h))


def _around(start: int, end: int, side: int) -> tuple[int, int]:
    grain = 2 * _MARGIN
    return (
        max(0, start - _MARGIN) // grain * grain,
        min(side, -(-(end + _MARGIN) // grain) * grain),
    )


def crop_text(box: Box) -> str:
    """The filter that cuts a box out, exactly there."""
    x, y, w, h = box
    return f"crop={w}:{h}:{x}:{y}:exact=1"


def whole_samples(frame: av.VideoFrame, box: Box) -> av.VideoFrame:
    """A copy of a box, with further rows and columns, equal to the last, where they make a sample whole.

    The box begins with a sample of its own. The frame itself, if that is the box.
    """
    name = frame.format.name
    if box == (0, 0, frame.width, frame.height) and not has_cut_chroma(name, *box[2:]):
        return frame
    steps = plane_steps(name)
    across, down = chroma_steps(name)
    x, y, w, h = box
    part = like_frame(frame, -(-w // across) * across, -(-h // down) * down)
    for target, whole, (right, below) in zip(
        part.planes, picture_planes(frame), steps, strict=True
    ):
        width, height = -(-w // right), -(-h // below)
        source = whole[y // below :, x // right :][:height, :width]
        rows = np.frombuffer(memoryview(target), np.uint8).reshape(target.height, -1)
        values = rows.view(source.dtype).reshape(target.height, -1, *source.shape[2:])
        values[:height, :width] = source
        values[:height, width : target.width] = source[:, -1:]
        values[height:, : target.width] = values[height - 1 : height, : target.width]
    return part
