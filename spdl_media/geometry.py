"""Compute sizes, offsets and boxes for turning, scaling, padding and cropping images, on CPU and GPU alike.

A stored image is turned upright first. Its orientation is one of the eight numbers of the Exif tag: 1 is
upright, 2 to 4 are mirrored or upside down, and 5 to 8 lie on their side. Scaling, padding and cropping
round as the filters of :mod:`spdl_media.operations` do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

from spdl_media._checks import check_choice, check_positive

Size: TypeAlias = tuple[int, int]
"""Width and height."""

Box: TypeAlias = tuple[int, int, int, int]
"""x, y, width, height."""

ScaleMode: TypeAlias = Literal["pad", "crop"]

CHROMA_GRID = 4
"""A chroma sample covers at most 4x4 pixels, so multiples of 4 are whole samples in every format."""

_Matrix: TypeAlias = tuple[int, int, int, int]


class _Turn(NamedTuple):
    """How an image of one orientation is turned upright.

    Attributes:
        matrix: Where a stored pixel goes: (a, b, c, d) for x' = ax + by, y' = cx + dy, with x to the right
            and y down.
        rotation: Degrees clockwise, applied after mirroring left to right if the matrix mirrors.
        filters: The same as an FFmpeg filter chain.
    """

    matrix: _Matrix
    rotation: int
    filters: str


# PyAV's frame.rotation ignores mirroring, and FFmpeg 8 reports a wrong orientation for some mirrored PNG,
# WebP and AVIF images (6 for 5). Hence this table, and readers of orientation in this package.
_TURNS: Mapping[int, _Turn] = {
    1: _Turn((1, 0, 0, 1), 0, ""),
    2: _Turn((-1, 0, 0, 1), 0, "hflip"),
    3: _Turn((-1, 0, 0, -1), 180, "hflip,vflip"),
    4: _Turn((1, 0, 0, -1), 180, "vflip"),
    5: _Turn((0, 1, 1, 0), 270, "transpose=cclock_flip"),
    6: _Turn((0, -1, 1, 0), 90, "transpose=clock"),
    7: _Turn((0, -1, -1, 0), 90, "transpose=clock_flip"),
    8: _Turn((0, 1, -1, 0), 270, "transpose=cclock"),
}
_ORIENTATIONS = {turn.matrix: orientation for orientation, turn in _TURNS.items()}

UPRIGHT_FILTERS: Mapping[int, str] = MappingProxyType(
    {orientation: turn.filters for orientation, turn in _TURNS.items()}
)
"""The FFmpeg filter chain that turns an image of each orientation upright; empty for 1."""


def _turn(orientation: int) -> _Turn:
    if orientation not in _TURNS:
        raise ValueError(f"orientation must be one of 1 to 8, as in Exif, not {orientation!r}")
    return _TURNS[orientation]


def rotation(orientation: int) -> int:
    """Return the degrees clockwise, 0, 90, 180 or 270, by which the stored image is turned to be upright.

    If :func:`is_mirrored` is true, it is mirrored left to right before.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    return _turn(orientation).rotation


def is_mirrored(orientation: int) -> bool:
    """Whether the stored image is a mirror image (2, 4, 5 and 7).

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    a, b, c, d = _turn(orientation).matrix
    return a * d - b * c < 0


def swaps_sides(orientation: int) -> bool:
    """Whether turning the image upright swaps width and height (5 to 8).

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    return _turn(orientation).matrix[0] == 0


def stored_flips(orientation: int) -> tuple[bool, bool]:
    """Return whether to flip the stored image left to right, and top to bottom, to turn it upright.

    After the flips, swap rows and columns if :func:`swaps_sides` is true.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    a, b, c, d = _turn(orientation).matrix
    # Each column of the matrix has one number that is not 0, so the sum of a column has its sign.
    return a + c < 0, b + d < 0


def stored_box(box: Box, orientation: int, width: int, height: int) -> Box:
    """Map a box of the upright image to the stored image, which is ``width`` by ``height``.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    x, y, w, h = box
    if swaps_sides(orientation):
        x, y, w, h = y, x, h, w
    backwards, upwards = stored_flips(orientation)
    return width - x - w if backwards else x, height - y - h if upwards else y, w, h


# Rotations from a sensor can be slightly off a quarter turn.
_TOLERANCE = math.tan(math.radians(1))


def matrix_orientation(matrix: Sequence[int]) -> int:
    """Read the orientation from a display matrix, including mirrored ones.

    Args:
        matrix: The nine numbers of FFmpeg's display matrix, row by row, at any scale and offset.

    Returns:
        1 to 8; 1 for a rotation more than a degree off every quarter turn, which flips cannot undo.

    See:
        FFmpeg's ``libavutil/display.h``: a pixel (p, q) goes to (ap + cq + x, bp + dq + y) for the
        rows (a, b, u), (c, d, v), (x, y, w).
    """
    right, down = _axis(matrix[0], matrix[1]), _axis(matrix[3], matrix[4])
    return _ORIENTATIONS.get((right[0], down[0], right[1], down[1]), 1)


def display_matrix(orientation: int) -> tuple[int, ...]:
    """Return the display matrix of an orientation, as FFmpeg's nine numbers.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    a, b, c, d = (number << 16 for number in _turn(orientation).matrix)
    return a, c, 0, b, d, 0, 0, 0, 1 << 30


def _axis(x: int, y: int) -> tuple[int, int]:
    """Return the axis within a degree of a direction; (0, 0) if there is none."""
    if x and abs(y) <= abs(x) * _TOLERANCE:
        return (1 if x > 0 else -1), 0
    if y and abs(x) <= abs(y) * _TOLERANCE:
        return 0, (1 if y > 0 else -1)
    return 0, 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Size and position of an upright image in the result.

    Attributes:
        scaled: Size to which the image is scaled.
        canvas: Size of the result; the part that the image does not cover is border.
        left: Column of the image's left edge on the canvas; if negative, so many columns are cropped.
        top: Row of the image's top edge on the canvas; if negative, so many rows are cropped.
    """

    scaled: Size
    canvas: Size
    left: int = 0
    top: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether nothing of the image is cropped."""
        return self.scaled[0] <= self.canvas[0] and self.scaled[1] <= self.canvas[1]

    @property
    def has_border(self) -> bool:
        """Whether the image leaves part of the canvas uncovered."""
        return self.scaled[0] < self.canvas[0] or self.scaled[1] < self.canvas[1]


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
        width: Requested width; without ``height`` the aspect ratio is kept, without both the size.
        height: Requested height.
        mode: With both sides: ``"pad"`` fits the image inside, ``"crop"`` covers the size, ``None``
            stretches.
        sample: Pixels across and down per chroma sample; a padded image is whole samples wide and high.
        grid: Offsets of a crop are multiples of it.

    Raises:
        ValueError: A size is not positive, or the mode is unknown.
    """
    check_choice("scale_mode", mode, (*get_args(ScaleMode), None))
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
        # FFmpeg's pad filter rounds sizes and offsets to whole chroma samples.
        x, y = sample
        across = min(width // x, _round(height * w, h * x)) * x
        down = min(height // y, _round(width * h, w * y)) * y
        scaled = max(x, across), max(y, down)
        # Rounded down, as FFmpeg's pad filter does with (ow-iw)/2.
        left, top = (width - scaled[0]) // 2, (height - scaled[1]) // 2
        return Placement(scaled, canvas, left - left % x, top - top % y)
    # max(): rounding down could leave a line of the canvas uncovered.
    scaled = max(width, _round(height * w, h)), max(height, _round(width * h, w))
    return middle(scaled, canvas, grid)


def middle(size: Size, canvas: Size, grid: int = 1) -> Placement:
    """Crop the centre of an image that is at least as large as the canvas."""
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
    """Divide and round to nearest, halves up."""
    # Python's round() would round halves to even, FFmpeg rounds them up.
    return (2 * numerator + denominator) // (2 * denominator)
