"""Fit, pad, crop and place images: sizes, offsets and boxes as numbers, for the CPU and the GPU alike.

The numbers are those that the filters of :mod:`spdl_media.filter_desc` give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from spdl_media._checks import check_choice, check_positive
from spdl_media.operations import ScaleMode
from spdl_media.orientation import Box

Size: TypeAlias = tuple[int, int]
"""Width and height."""

CHROMA_GRID = 4
"""Chroma is stored for at most 4x4 pixels, so multiples of it are whole samples in every format."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How an image fills its place in the result, upright.

    Attributes:
        scaled: Size to which it is scaled.
        canvas: Size of the result; what the image does not cover is border.
        left: Where the image's first column lies; negative: that many are cut off.
        top: Where its first row lies.
    """

    scaled: Size
    canvas: Size
    left: int = 0
    top: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether nothing of the image is cut off."""
        return self.scaled[0] <= self.canvas[0] and self.scaled[1] <= self.canvas[1]

    @property
    def has_border(self) -> bool:
        """Whether the image leaves part of the canvas uncovered."""
        return self.scaled[0] < self.canvas[0] or self.scaled[1] < self.canvas[1]

    def part_of(self, canvas: Any, axis: int = 0, step: Size = (1, 1)) -> Any:
        """The view of a canvas ``(..., H, W, ...)`` that the image fills.

        Args:
            canvas: An array.
            axis: Its axis of rows.
            step: Pixels across and down for each of its values, as in a plane of chroma.
        """
        start, sizes = (
            (max(0, self.left), max(0, self.top)),
            zip(self.scaled, self.canvas, strict=True),
        )
        columns, rows = (
            # A sample of chroma at the edge belongs to the image, even where only a part of it is covered.
            slice(first // pixels, -(-(first + min(size)) // pixels))
            for first, size, pixels in zip(start, sizes, step, strict=True)
        )
        return canvas[(*[slice(None)] * axis, rows, columns)]


def place(
    size: Size,
    width: int | None,
    height: int | None,
    mode: ScaleMode | None = None,
    *,
    sample: Size = (1, 1),
    grid: int = 1,
) -> Placement:
    """Fit an image into a size.

    Args:
        size: Size of the upright image.
        width: Width that is asked for; without ``height`` the aspect ratio is kept, without both the size.
        height: Height that is asked for.
        mode: ``"pad"`` fits all of it inside, ``"crop"`` covers all of it, ``None`` stretches.
        sample: Pixels across and down for a sample of chroma; an image with a border has whole samples.
        grid: Offsets are multiples of it.

    Raises:
        ValueError: A size that is not positive, or an unknown mode.
    """
    check_choice("scale_mode", mode, ("pad", "crop", None))
    width = width if width is None else check_positive("width", width)
    height = height if height is None else check_positive("height", height)
    w, h = size
    canvas = (
        width or (max(1, _round(height * w, h)) if height else w),
        height or (max(1, _round(width * h, w)) if width else h),
    )
    if mode is None or width is None or height is None:
        return Placement(canvas, canvas)
    if mode == "pad":
        # FFmpeg's pad filter rounds sizes and offsets to whole samples of chroma, so both are multiples.
        x, y = sample
        across = min(width // x, _round(height * w, h * x)) * x
        down = min(height // y, _round(width * h, w * y)) * y
        scaled = max(x, across), max(y, down)
        # Rounded down, as FFmpeg's pad filter does with (ow-iw)/2.
        left, top = (width - scaled[0]) // 2, (height - scaled[1]) // 2
        return Placement(scaled, canvas, left - left % x, top - top % y)
    # Rounded down, the longer side could leave a line of the canvas uncovered.
    scaled = max(width, _round(height * w, h)), max(height, _round(width * h, w))
    return middle(scaled, canvas, grid)


def middle(size: Size, canvas: Size, grid: int = 1) -> Placement:
    """Cut the middle out of an image that is at least as large as the canvas."""
    left, top = (
        # FFmpeg's crop filter rounds halves to even, as Python's round does; its pad filter rounds down.
        round(rest / 2) if grid == 1 else rest // (2 * grid) * grid
        for rest in (size[0] - canvas[0], size[1] - canvas[1])
    )
    return Placement(size, canvas, -left, -top)


def fits(box: Box, width: int, height: int) -> bool:
    """Whether a box lies inside an image of this size."""
    x, y, w, h = box
    return x + w <= width and y + h <= height


def _round(numerator: int, denominator: int) -> int:
    """To the nearest, halves upwards."""
    # In whole numbers: Python's round takes halves to the even side, FFmpeg's upwards.
    return (2 * numerator + denominator) // (2 * denominator)
