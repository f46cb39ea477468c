"""The steps of plain chains: scaling, borders, and the middle cut out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import av
from av.video.reformatter import VideoReformatter

from spdl_media._filters.cuts import RGB, Size, byte_planes, like_frame

HALF_CHROMA = "yuv420p"
"""The quick way to RGB: chroma keeps half of its width and height until RGB is made."""

GBR, FULL_RANGE = 0, 2
_OPAQUE = 255
_UNKNOWN_MATRIX, _UNKNOWN_RANGE = 2, 0


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale to a size, and convert.

    ``fit`` is how the aspect ratio is kept: decrease, increase, disable. ``least`` is what a side is at
    least; 0 is FFmpeg's own way, which then fails.
    """

    width: int | None
    height: int | None
    fit: str
    flags: int
    pix_fmt: str
    least: int = 0

    def size(self, width: int, height: int) -> Size | None:
        """The size of the result for a picture of this size."""
        if self.width is None or self.height is None:
            return width, height
        if self.width < 0 or self.height < 0:
            return (
                self._keep(self.height, width, height) if self.width < 0 else self.width,
                self._keep(self.width, height, width) if self.height < 0 else self.height,
            )
        if self.fit == "disable":
            return self.width, self.height
        choose = min if self.fit == "decrease" else max
        return (
            choose(self.width, self._keep(self.height, width, height)),
            choose(self.height, self._keep(self.width, height, width)),
        )

    def _keep(self, value: int, times: int, by: int) -> int:
        return max(self.least, _rescale(value, times, by))

    def run(self, frame: av.VideoFrame, size: Size, reformatter: VideoReformatter) -> av.VideoFrame:
        """Scale to the size that :meth:`size` gave."""
        tags = self._tags(frame)
        if self.pix_fmt == HALF_CHROMA and frame.format.name in RGB:
            # PNG says that its range is full, as RGB's always is. The scaler alone then makes YUV of full
            # range; in a graph it is of limited range, whatever is said.
            frame.color_range = _UNKNOWN_RANGE
        width, height = size
        result = reformatter.reformat(
            frame, width, height, self.pix_fmt, interpolation=self.flags, threads=1
        )
        if result is not frame:
            result.colorspace, result.color_range = tags
        return result

    def _tags(self, frame: av.VideoFrame) -> tuple[int, int]:
        """Matrix and range of the result, as a graph states them."""
        if self.pix_fmt != HALF_CHROMA:
            return GBR, FULL_RANGE
        if frame.format.name in RGB:
            return _UNKNOWN_MATRIX, _UNKNOWN_RANGE
        return int(frame.colorspace), int(frame.color_range)


@dataclass(frozen=True, slots=True)
class Pad:
    """A black border around the middle, in RGB."""

    width: int
    height: int

    def size(self, width: int, height: int) -> Size | None:
        """The size of the result; ``None`` if the picture is larger."""
        fits = width <= self.width and height <= self.height
        return (self.width, self.height) if fits else None

    def run(self, frame: av.VideoFrame, size: Size, _: VideoReformatter) -> av.VideoFrame:
        """Put the border around it."""
        if (frame.width, frame.height) == size:
            return frame
        left, top = (self.width - frame.width) // 2, (self.height - frame.height) // 2
        result = like_frame(frame, *size)
        sources = byte_planes(frame)
        for index, (target, source) in enumerate(zip(byte_planes(result), sources, strict=True)):
            target[:] = _OPAQUE if index == 3 else 0
            target[top : top + frame.height, left : left + frame.width] = source
        return result


@dataclass(frozen=True, slots=True)
class Crop:
    """The middle of a picture in RGB."""

    width: int
    height: int

    def size(self, width: int, height: int) -> Size | None:
        """The size of the result; ``None`` if the picture is smaller."""
        fits = width >= self.width and height >= self.height
        return (self.width, self.height) if fits else None

    def run(self, frame: av.VideoFrame, size: Size, _: VideoReformatter) -> av.VideoFrame:
        """Cut the middle out."""
        if (frame.width, frame.height) == size:
            return frame
        # FFmpeg rounds halves to the even number, as Python's round does.
        left, top = round((frame.width - self.width) / 2), round((frame.height - self.height) / 2)
        result = like_frame(frame, *size)
        for target, source in zip(byte_planes(result), byte_planes(frame), strict=True):
            target[:] = source[top : top + self.height, left : left + self.width]
        return result


Step: TypeAlias = Scale | Pad | Crop


def _rescale(value: int, times: int, by: int) -> int:
    """As FFmpeg's ``av_rescale``: rounded to the nearest, halves up."""
    return (value * times + by // 2) // by
