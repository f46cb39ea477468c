"""How a stored image is turned upright: the eight orientations, and what a display matrix says.

An orientation is one of the eight numbers of the Exif tag: 1 is upright, 2 to 4 are mirrored or upside
down, 5 to 8 lie on their side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

__all__ = (
    "UPRIGHT_FILTERS",
    "combined",
    "display_matrix",
    "is_mirrored",
    "matrix_orientation",
    "rotation",
    "swaps_sides",
)

# x, y, width, height.
Box: TypeAlias = tuple[int, int, int, int]

_Matrix: TypeAlias = tuple[int, int, int, int]


class _Turn(NamedTuple):
    """How an image of one orientation is turned upright.

    Attributes:
        matrix: Where a pixel of the stored image goes: (a, b, c, d) for x' = ax + by, y' = cx + dy, with x
            to the right and y down.
        rotation: Clockwise degrees, after the image was mirrored left to right if the matrix mirrors.
        filters: The same as a filter chain of FFmpeg's.
    """

    matrix: _Matrix
    rotation: int
    filters: str


# PyAV's frame.rotation knows no mirroring, and FFmpeg 8 gives some mirrored PNG, WebP and AVIF images
# another orientation than their metadata has (5 as 6). Hence a table and readers of our own.
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
    """Say by how many degrees the image is turned clockwise, 0, 90, 180 or 270, to be upright.

    It is first mirrored left to right, if :func:`is_mirrored` says so.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    return _turn(orientation).rotation


def is_mirrored(orientation: int) -> bool:
    """Say whether the stored image is a mirror image (2, 4, 5 and 7).

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    a, b, c, d = _turn(orientation).matrix
    return a * d - b * c < 0


def swaps_sides(orientation: int) -> bool:
    """Say whether width and height change places when the image is turned upright (5 to 8).

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    return _turn(orientation).matrix[0] == 0


def stored_flips(orientation: int) -> tuple[bool, bool]:
    """Which axes of the stored image run backwards in the upright one.

    To turn it upright, exchange left and right if the first says so, top and bottom if the second does,
    and then rows and columns if :func:`swaps_sides` says so.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    a, b, c, d = _turn(orientation).matrix
    # Each column of the matrix has one number that is not 0, so its sum has that sign.
    return a + c < 0, b + d < 0


def stored_box(box: Box, orientation: int, width: int, height: int) -> Box:
    """Where a box of the upright image lies in the stored one, which is ``width`` by ``height``.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    x, y, w, h = box
    if swaps_sides(orientation):
        x, y, w, h = y, x, h, w
    backwards, upwards = stored_flips(orientation)
    return width - x - w if backwards else x, height - y - h if upwards else y, w, h


# Rotations from a sensor are sometimes a hair off the quarter turn they mean.
_TOLERANCE = math.tan(math.radians(1))


def matrix_orientation(matrix: Sequence[int]) -> int:
    """Read the orientation out of a display matrix, mirrored ones included.

    Args:
        matrix: The nine numbers of FFmpeg's display matrix, row by row, at any scale and offset.

    Returns:
        1 to 8; 1 for a rotation more than a degree off every quarter turn, which no flip can undo.

    Raises:
        ValueError: There are not nine numbers.

    See:
        FFmpeg's ``libavutil/display.h``: a pixel (p, q) goes to (ap + cq + x, bp + dq + y) for the
        rows (a, b, u), (c, d, v), (x, y, w).
    """
    if len(matrix) != 9:
        raise ValueError(f"a display matrix has 9 numbers, not {len(matrix)}: {matrix!r}")
    right, down = _axis(matrix[0], matrix[1]), _axis(matrix[3], matrix[4])
    return _ORIENTATIONS.get((right[0], down[0], right[1], down[1]), 1)


def display_matrix(orientation: int) -> tuple[int, ...]:
    """The display matrix of an orientation, as FFmpeg's nine numbers.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    a, b, c, d = (number << 16 for number in _turn(orientation).matrix)
    return a, c, 0, b, d, 0, 0, 0, 1 << 30


def _axis(x: int, y: int) -> tuple[int, int]:
    """The axis that a direction lies on within a degree, (0, 0) if none."""
    if x and abs(y) <= abs(x) * _TOLERANCE:
        return (1 if x > 0 else -1), 0
    if y and abs(x) <= abs(y) * _TOLERANCE:
        return 0, (1 if y > 0 else -1)
    return 0, 0


def combined(orientations: Iterable[int]) -> int:
    """The orientation that is undone by undoing several, one after the other.

    Raises:
        ValueError: One of them is not one of 1 to 8.
    """
    a, b, c, d = _TURNS[1].matrix
    for orientation in orientations:
        p, q, r, s = _turn(orientation).matrix
        # A transform applies to the result of those before it, so its matrix goes to the left.
        a, b, c, d = p * a + q * c, p * b + q * d, r * a + s * c, r * b + s * d
    return _ORIENTATIONS[a, b, c, d]
