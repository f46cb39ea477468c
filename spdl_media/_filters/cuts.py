"""Boxes cut out of decoded pictures and mirrored, and the memory of 8-bit pictures made here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import av
import numpy as np
import numpy.typing as npt

from spdl_media.formats import picture_planes, plane_steps

Size: TypeAlias = tuple[int, int]

INTERLEAVED = {
    "gbrp": frozenset(("rgb24", "bgr24")),
    "gbrap": frozenset(("rgba", "bgra", "argb", "abgr")),
}
"""Planar RGB to the packed formats that it is interleaved to."""

RGB = frozenset(INTERLEAVED).union(*INTERLEAVED.values())

# Formats of 8 bits that are cut and mirrored here.
_CUTTABLE = RGB.union("gray yuv444p yuvj444p yuvj440p yuvj422p yuvj420p".split())


def fits(box: tuple[int, int, int, int], width: int, height: int) -> bool:
    """Whether a box lies inside a picture of this size."""
    x, y, w, h = box
    return x + w <= width and y + h <= height


@dataclass(frozen=True, slots=True)
class Cut:
    """A box of the decoded picture, then left and right exchanged, in one copy.

    Chroma begins with the sample that the box's corner lies in, as in FFmpeg's crop with ``exact=1``.
    """

    box: tuple[int, int, int, int] | None
    mirror: bool

    def fits(self, frame: av.VideoFrame) -> bool:
        """Whether it can be cut here."""
        if frame.format.name not in _CUTTABLE:
            return False
        return self.box is None or fits(self.box, frame.width, frame.height)

    def size(self, width: int, height: int) -> Size:
        """The size of what is cut out of a picture of this size."""
        return (width, height) if self.box is None else self.box[2:]

    def run(self, frame: av.VideoFrame) -> av.VideoFrame:
        """Cut a frame that :meth:`fits` accepts."""
        x, y, width, height = self.box or (0, 0, frame.width, frame.height)
        result = like_frame(frame, width, height)
        planes = byte_planes(result), picture_planes(frame), plane_steps(frame.format.name)
        for target, source, (across, down) in zip(*planes, strict=True):
            left, top = x // across, y // down
            part = source[top : top + target.shape[0], left : left + target.shape[1]]
            target[:] = part[:, ::-1] if self.mirror else part
        return result


def like_frame(frame: av.VideoFrame, width: int, height: int) -> av.VideoFrame:
    """A new frame of this size, whose pixels are not set, with the other facts of a frame."""
    result = av.VideoFrame(width, height, frame.format.name)
    result.pts, result.dts = frame.pts, frame.dts
    if frame.time_base:
        result.time_base = frame.time_base
    result.duration = frame.duration
    result.colorspace, result.color_range = frame.colorspace, frame.color_range
    result.color_primaries, result.color_trc = frame.color_primaries, frame.color_trc
    return result


def byte_planes(frame: av.VideoFrame) -> Iterator[npt.NDArray[np.uint8]]:
    """The planes of an 8-bit frame made here, rows without padding; packed ones as (H, W, C)."""
    planes = frame.planes
    channels = len(frame.format.components) if len(planes) == 1 else 1
    for plane in planes:
        memory: Any = plane  # a buffer, which PyAV's stubs do not say
        rows = np.frombuffer(memory, np.uint8).reshape(plane.height, plane.line_size)
        view = rows[:, : plane.width * channels]
        yield view if channels == 1 else view.reshape(plane.height, plane.width, channels)
