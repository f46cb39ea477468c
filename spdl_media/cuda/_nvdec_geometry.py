"""Which pixels of a coded frame an upright crop takes, and how frames are turned upright on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spdl_media.geometry import Size
from spdl_media.orientation import is_mirrored, rotation, swaps_sides

if TYPE_CHECKING:
    from spdl_media.cuda._nvdec_device import VideoDevice

INVERSE = MappingProxyType({1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6})
"""The orientation that undoes each."""


@dataclass(frozen=True, slots=True)
class Crop:
    """Pixels cut off each side of the upright frame."""

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


def upright(device: VideoDevice, array: Any, orientation: int, axes: Sequence[int]) -> Any:
    """Turn frames upright, as a view.

    Args:
        device: Where the array is.
        array: Frames or planes.
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
