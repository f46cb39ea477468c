"""What is made of a frame on a device, in numbers: its cut, size, place, orientation and colours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from spdl_media.cuda._color_formats import yuv_format
from spdl_media.cuda._color_plan import Look, Plan, make_plan
from spdl_media.cuda._color_taps import ScaleAlgo, Taps
from spdl_media.formats import COLOR_RANGES, COLORSPACES
from spdl_media.geometry import (
    Placement,
    ScaleMode,
    Size,
    is_mirrored,
    place,
    rotation,
    swaps_sides,
)

OutputFormat: TypeAlias = Literal["rgb24", "bgr24", "nv12"]
ArrayLayout: TypeAlias = Literal["NHWC", "NCHW"]

INVERSE = MappingProxyType({1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6})
"""The orientation that undoes each."""


@dataclass(frozen=True, slots=True)
class Crop:
    """Pixels cut off each side of an upright frame."""

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
        """The size of what is left of a frame.

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
        """The same cut in the frame as it is coded."""
        sides = list(self.sides)
        # Upright is the coded frame mirrored, then turned clockwise; this goes the other way.
        quarters = rotation(orientation) // 90
        sides = sides[quarters:] + sides[:quarters]
        if is_mirrored(orientation):
            sides[0], sides[2] = sides[2], sides[0]
        return Crop(*sides)


def coded_size(size: Size, orientation: int) -> Size:
    """Width and height in the coded frame of what has this size upright, and the other way round."""
    return size[::-1] if swaps_sides(orientation) else size


def upright(array: Any, orientation: int, rows: int = 0) -> Any:
    """Turn frames upright, as a view.

    Args:
        array: Frames or planes.
        orientation: How they stand, 1 to 8.
        rows: The axis of rows, before that of columns.
    """

    def flipped(array: Any, *axes: int) -> Any:
        steps = (slice(None, None, -1 if axis in axes else 1) for axis in range(array.ndim))
        return array[tuple(steps)]

    if is_mirrored(orientation):
        array = flipped(array, rows + 1)
    quarters = rotation(orientation) // 90
    if quarters == 2:
        return flipped(array, rows, rows + 1)
    if quarters == 0:
        return array
    # Clockwise by a quarter: rows run upwards, then rows and columns change places.
    return flipped(array.swapaxes(rows, rows + 1), rows + 1 if quarters == 1 else rows)


@dataclass(frozen=True, slots=True)
class Output:
    """What is made of each frame.

    Attributes:
        pix_fmt: ``"rgb24"``, ``"bgr24"``, or ``"nv12"`` for the decoder's own planes.
        layout: Order of the axes of RGB.
        crop: What is cut off the upright frame first.
        width: Width to scale to; see :func:`~spdl_media.geometry.place`.
        height: Height to scale to.
        scale_mode: How the frame fills both.
        scale_algo: ``"bicubic"`` or ``"bilinear"``.
    """

    pix_fmt: OutputFormat = "rgb24"
    layout: ArrayLayout = "NHWC"
    crop: Crop = field(default_factory=Crop)
    width: int | None = None
    height: int | None = None
    scale_mode: ScaleMode | None = None
    scale_algo: ScaleAlgo = "bicubic"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("pix_fmt", self.pix_fmt, ("rgb24", "bgr24", "nv12")),
            ("layout", self.layout, ("NHWC", "NCHW")),
            ("scale_algo", self.scale_algo, ("bicubic", "bilinear")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed} on a device, not {value!r}")
        place((16, 16), self.width, self.height, self.scale_mode)  # refuses what cannot be
        # Chroma is stored for two pixels by two, so planes are cut and scaled to whole pairs.
        even = {f"crop_{side}": getattr(self.crop, side) for side in Crop.__slots__}
        if self.pix_fmt == "nv12":
            even |= {"scale_width": self.width or 0, "scale_height": self.height or 0}
        for name, value in even.items():
            if value % 2:
                raise ValueError(
                    f"{name} must be even, because chroma is stored for two pixels, not {value}"
                )

    def placement(self, size: Size) -> Placement:
        """Where an upright frame of this size goes, once it is cut."""
        return place(self.crop.left_over(size), self.width, self.height, self.scale_mode)


class Kind(NamedTuple):
    """What frames of a launch have in common: as they are coded, but for the crop and what follows."""

    stored: str
    size: Size
    orientation: int
    matrix: int
    range: int


@lru_cache(maxsize=256)
def plan_of(kind: Kind, output: Output) -> Plan:
    """The conversion of a frame, as it is coded, to the part of the canvas that it fills."""
    crop = output.crop.turned_back(kind.orientation)
    source = crop.left_over(kind.size)
    placement = output.placement(coded_size(kind.size, kind.orientation))
    width, height = coded_size(placement.scaled, kind.orientation)
    look = Look(
        matrix=COLORSPACES.get(kind.matrix),
        color_range=COLOR_RANGES.get(kind.range),
        width=width,
        height=height,
        scale_algo=None if source == (width, height) else output.scale_algo,
        bgr=output.pix_fmt == "bgr24",
    )
    plan = make_plan(yuv_format(kind.stored), look, *source)
    # What the canvas cuts off of the scaled frame is not computed.
    left, top = max(0, -placement.left), max(0, -placement.top)
    right = max(0, placement.scaled[0] - left - placement.canvas[0])
    bottom = max(0, placement.scaled[1] - top - placement.canvas[1])
    cut = Crop(left, top, right, bottom).turned_back(kind.orientation)
    columns, rows = slice(cut.left, width - cut.right), slice(cut.top, height - cut.bottom)
    return replace(
        plan,
        luma=(_part(plan.luma[0], columns, crop.left), _part(plan.luma[1], rows, crop.top)),
        chroma=(
            _part(plan.chroma[0], columns, crop.left // 2),
            _part(plan.chroma[1], rows, crop.top // 2),
        ),
    )


def _part(taps: Taps, places: slice, offset: int) -> Taps:
    """The windows of some places of the result, in a line of which more comes before."""
    return Taps(
        taps.first[places] + np.int32(offset), np.ascontiguousarray(taps.weights[:, places])
    )
