"""Chroma of pictures with an odd side, put where it belongs when they are converted to RGB.

In 4:2:0, the last chroma sample of an odd row covers one pixel, not two. FFmpeg's scaler stretches the row
of chroma over the row of pixels all the same, so that colour drifts by up to a pixel across the picture:
4 levels of 255 on average for a photograph, and 40 at edges. With one more column of pixels, a copy of
the last, it has nothing to stretch. When a picture is scaled as well, the drift is below a fifth of a pixel
for common sizes (0.2 levels at 224x224), and left alone.
"""

from __future__ import annotations

import re
from functools import lru_cache

import av
import numpy as np

from spdl_media.frames import ImageFrames

# The conversion to planar RGB that the builders write first, without a size.
_CONVERSION = re.compile(r"scale=flags=[\w+]+,format=gbra?p\w*(?=,|$)")


@lru_cache(maxsize=512)
def conversion_of(desc: str) -> str | None:
    """The conversion to planar RGB, without scaling, that a description begins with."""
    match = _CONVERSION.match(desc)
    return match[0] if match else None


def has_cut_chroma(frame: av.VideoFrame) -> bool:
    """Whether a chroma plane has a last row or column for one row or column of pixels."""
    if frame.width % 2 == 0 and frame.height % 2 == 0:
        return False
    return any(
        (part.width < frame.width and frame.width % 2)
        or (part.height < frame.height and frame.height % 2)
        for part in frame.format.components
    )


def with_even_sides(frame: av.VideoFrame) -> av.VideoFrame:
    """A copy with one more row or column where that makes a side even, equal to the last one."""
    even = av.VideoFrame(
        frame.width + frame.width % 2, frame.height + frame.height % 2, frame.format.name
    )
    for target, source in zip(even.planes, ImageFrames((frame,)).planes, strict=True):
        rows = np.frombuffer(memoryview(target), np.uint8).reshape(target.height, -1)
        values = rows.view(source.dtype).reshape(target.height, -1, *source.shape[2:])
        width, height = source.shape[1], source.shape[0]
        values[:height, :width] = source
        values[:height, width : target.width] = source[:, -1:]
        values[height:, : target.width] = values[height - 1 : height, : target.width]
    for name in ("pts", "dts", "time_base", "duration", "colorspace", "color_range"):
        setattr(even, name, getattr(frame, name))
    even.color_primaries, even.color_trc = frame.color_primaries, frame.color_trc
    return even
