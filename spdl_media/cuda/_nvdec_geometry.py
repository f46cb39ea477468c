"""Where the pixels of a decoded picture go: crop, scale, borders and turning, as numbers.

The sizes are those that the filters of :mod:`spdl_media.filter_desc` give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from spdl_media._checks import check_choice, check_positive
from spdl_media.operations import ScaleMode
from spdl_media.orientation import is_mirrored, rotation, swaps_sides

if TYPE_CHECKING:
    from spdl_media.cuda._nvdec_device import VideoDevice

Size: TypeAlias = tuple[int, int]
"""Width and height."""

INVERSE = MappingProxyType({1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6})
"""The orientation that undoes each."""


@dataclass(frozen=True, slots=True)
class Crop:
    """Pixels cut off each side of the upright picture."""

    left: int = 0
    top: int = 0
    right: int = 0
    bottom: int = 0

    def __post_init__(self) -> None:
        for name in type(self).__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"crop_{name} must be an int, not {value!r}")
            if value < 0:
                raise ValueError(f"crop_{name} must be 0 or more, not {value}")

    @property
    def sides(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom."""
        return self.left, self.top, self.right, self.bottom

    def left_over(self, size: Size) -> Size:
        """The size of what is left of a picture.

        Raises:
            ValueError: Nothing is left.
        """
        width, height = size[0] - self.left - self.right, size[1] - self.top - self.bottom
        if width < 1 or height < 1:
            raise ValueError(
                f"crop_left={self.left}, crop_top={self.top}, crop_right={self.right}, "
                f"crop_bottom={self.bottom} leave nothing of a picture of {size[0]}x{size[1]}"
            )
        return width, height

    def turned_back(self, orientation: int) -> Crop:
        """The same cut in the picture as it is coded."""
        sides = list(self.sides)
        # Upright is the coded picture mirrored, then turned clockwise; this goes the other way.
        quarters = rotation(orientation) // 90
        sides = sides[quarters:] + sides[:quarters]
        if is_mirrored(orientation):
            sides[0], sides[2] = sides[2], sides[0]
        return Crop(*sides)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a picture fills its place in the result, upright.

    Attributes:
        scaled: Size to which it is scaled.
        canvas: Size of the result; what the picture does not cover is black.
        left: Where the picture's first column lies; negative: that many are cut off.
        top: Where its first row lies.
    """

    scaled: Size
    canvas: Size
    left: int = 0
    top: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether nothing of the picture is cut off."""
        return self.scaled[0] <= self.canvas[0] and self.scaled[1] <= self.canvas[1]

    @property
    def has_border(self) -> bool:
        """Whether the picture leaves part of the canvas black."""
        return self.scaled[0] < self.canvas[0] or self.scaled[1] < self.canvas[1]

    def part_of(self, canvas: Any, axis: int = 0) -> Any:
        """The view of a canvas ``(..., H, W, ...)`` that the picture fills; rows are this axis."""
        return _cut(canvas, axis, (max(0, self.top), max(0, self.left)), self._shown())

    def visible(self, picture: Any, axis: int = 0) -> Any:
        """The view of a scaled picture ``(..., H, W, ...)`` that the canvas shows; rows are this axis."""
        return _cut(picture, axis, (max(0, -self.top), max(0, -self.left)), self._shown())

    def _shown(self) -> tuple[int, int]:
        width, height = map(min, self.scaled, self.canvas)
        return height, width


def _cut(array: Any, axis: int, start: tuple[int, int], length: tuple[int, int]) -> Any:
    sides = (slice(first, first + count) for first, count in zip(start, length, strict=True))
    return array[(*[slice(None)] * axis, *sides)]


def place(
    size: Size, width: int | None, height: int | None, mode: ScaleMode | None = None
) -> Placement:
    """Fit a picture into a size.

    Args:
        size: Size of the upright picture.
        width: Width that is asked for; without ``height`` the aspect ratio is kept, without both the size.
        height: Height that is asked for.
        mode: ``"pad"`` fits all of it inside, ``"crop"`` covers all of it, ``None`` stretches.

    Raises:
        ValueError: A size that is not positive, or an unknown mode.
    """
    check_choice("scale_mode", mode, ("pad", "crop", None))
    w, h = size
    if width is not None:
        width = check_positive("width", width)
    if height is not None:
        height = check_positive("height", height)
    if width is None and height is None:
        return Placement(size, size)
    if width is None or height is None:
        side = (
            (max(1, _round(height * w, h)), height)
            if width is None and height is not None
            else (width or 1, max(1, _round((width or 1) * h, w)))
        )
        return Placement(side, side)
    canvas = width, height
    if mode is None:
        return Placement(canvas, canvas)
    across, down = _round(height * w, h), _round(width * h, w)
    if mode == "pad":
        scaled = max(1, min(width, across)), max(1, min(height, down))
        return Placement(scaled, canvas, (width - scaled[0]) // 2, (height - scaled[1]) // 2)
    scaled = max(width, across), max(height, down)
    # FFmpeg's crop filter rounds halves to even, its pad filter downwards; Python's round does the former.
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    return Placement(scaled, canvas, -left, -top)


def _round(numerator: int, denominator: int) -> int:
    """To the nearest, halves upwards."""
    return (2 * numerator + denominator) // (2 * denominator)


def coded_size(size: Size, orientation: int) -> Size:
    """Width and height in the coded picture of what has this size upright, and the other way round."""
    return size[::-1] if swaps_sides(orientation) else size


def upright(device: VideoDevice, array: Any, orientation: int, axes: Sequence[int]) -> Any:
    """Turn pictures upright, as a view.

    Args:
        device: Where the array is.
        array: Pictures or planes.
        orientation: How they stand, 1 to 8.
        axes: The axes of rows and columns.
    """
    rows, columns = axes
    if is_mirrored(orientation):
        array = device.flip(array, [columns])
    quarters = rotation(orientation) // 90
    if quarters == 2:
        return device.flip(array, [rows, columns])
    if quarters == 0:
        return array
    # Clockwise by a quarter: rows run upwards, then rows and columns change places.
    return device.flip(device.swap(array, rows, columns), [columns if quarters == 1 else rows])
