"""Frames that lie on a device into one array there, each read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from spdl_media._rows import colors_differ, matrix_and_range
from spdl_media.cuda._color_taps import ScaleAlgo
from spdl_media.cuda._nvdec_color import scale_plane, to_rgb
from spdl_media.cuda._nvdec_device import VideoDevice
from spdl_media.cuda._nvdec_geometry import INVERSE, Crop, coded_size, upright
from spdl_media.cuda._nvdec_planes import (
    NO_COLORS,
    SEMI_PLANAR,
    Colors,
    HardwareFrame,
    format_name,
    frame_planes,
)
from spdl_media.errors import ConvertError
from spdl_media.geometry import Placement, Size, place
from spdl_media.operations import ScaleMode

OutputFormat: TypeAlias = Literal["rgb24", "bgr24", "nv12"]
ArrayLayout: TypeAlias = Literal["NHWC", "NCHW"]


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
        if self.crop != Crop() or self.pix_fmt == "nv12":
            _check_even(self)

    @property
    def is_scaled(self) -> bool:
        """Whether another size is asked for."""
        return self.width is not None or self.height is not None

    def placement(self, size: Size) -> Placement:
        """Where an upright frame of this size goes, once it is cut."""
        return place(self.crop.left_over(size), self.width, self.height, self.scale_mode)


def _check_even(output: Output) -> None:
    """Chroma is stored for two pixels by two, so planes are cut and scaled to whole pairs."""
    values = {f"crop_{side}": getattr(output.crop, side) for side in Crop.__slots__}
    if output.pix_fmt == "nv12":
        values |= {"scale_width": output.width or 0, "scale_height": output.height or 0}
    for name, value in values.items():
        if value % 2:
            raise ValueError(
                f"{name} must be even, because chroma is stored for two pixels, not {value}"
            )


class FrameWriter:
    """Puts frames into one array, one behind the other.

    Args:
        device: Where they are, and where the array is made.
        output: What is made of them.
        capacity: As many frames as there can be.
        source: What they were decoded from, for messages.

    Thread safety: one thread at a time.
    """

    def __init__(self, device: VideoDevice, output: Output, capacity: int, source: str) -> None:
        self._device = device
        self._output = output
        self._capacity = capacity
        self._source = source
        self._array: Any = None
        self._canvas: Size = (0, 0)
        self._stored = ""
        self._unset = False
        self._colors = NO_COLORS
        self.count = 0

    @property
    def colors(self) -> Colors:
        """What the values of the last array mean, if they are YUV."""
        return self._colors

    @property
    def is_full(self) -> bool:
        """Whether no frame more goes in."""
        return self.count == self._capacity

    def add(self, frame: HardwareFrame, orientation: int) -> None:
        """Convert or copy one frame, within :meth:`VideoDevice.after_decoder`.

        Raises:
            ConvertError: Its size or depth makes another array than the first one's, or its YUV means other
                colours.
        """
        size = coded_size((frame.width, frame.height), orientation)
        placement = self._output.placement(size)
        if self._array is None:
            self._allocate(placement, format_name(frame))
            self._colors = self._colors_of(frame)
        self._check_same(placement.canvas, format_name(frame), self._colors_of(frame))
        if self.is_full:
            self._grow()
        planes = self._cut_planes(frame, orientation)
        if self._output.pix_fmt == "nv12":
            self._write_planes(planes, orientation, placement)
        else:
            self._write_rgb(planes, frame, orientation, placement)
        self.count += 1

    def result(self) -> Any:
        """The array of the frames so far, and a new start.

        Raises:
            ConvertError: There are none.
        """
        if self._array is None:
            raise ConvertError("there are no frames to convert", source=self._source)
        array, count = self._array, self.count
        # The next batch gets memory of its own.
        self._array, self.count = None, 0
        return array[:count]

    def _grow(self) -> None:
        """Make room for more frames than there are packets."""
        smaller = self._array
        self._capacity *= 2
        make = self._device.zeros if self._unset else self._device.empty
        self._array = make((self._capacity, *smaller.shape[1:]), str(smaller.dtype))
        self._device.copy(self._array[: self.count], smaller[: self.count])

    def _allocate(self, placement: Placement, stored: str) -> None:
        width, height = placement.canvas
        if self._output.pix_fmt == "nv12":
            # Luma, and below it U and V in turn, in half as many rows.
            rows = height + -(-height // 2)
            shape: tuple[int, ...] = (rows, width + width % 2)
            dtype, self._unset = SEMI_PLANAR[stored].dtype, bool(width % 2)
        else:
            chw = self._output.layout == "NCHW"
            shape = (3, height, width) if chw else (height, width, 3)
            dtype, self._unset = "uint8", placement.has_border
        make = self._device.zeros if self._unset else self._device.empty
        self._array = make((self._capacity, *shape), dtype)
        self._canvas, self._stored = placement.canvas, stored

    def _colors_of(self, frame: HardwareFrame) -> Colors:
        return matrix_and_range(frame) if self._output.pix_fmt == "nv12" else NO_COLORS

    def _check_same(self, canvas: Size, stored: str, colors: Colors) -> None:
        deep = self._output.pix_fmt == "nv12" and stored != self._stored
        if canvas != self._canvas or deep:
            raise ConvertError(
                f"frame 0 is {_words(self._canvas, self._stored)}, but frame {self.count} is "
                f"{_words(canvas, stored)}; one array holds one size and depth. Give width= and height= to "
                "scale them to one size",
                source=self._source,
            )
        if colors != self._colors:
            first, other = ("frame 0", self._colors), (f"frame {self.count}", colors)
            raise colors_differ(first, other, self._stored, self._source)

    def _cut_planes(self, frame: HardwareFrame, orientation: int) -> tuple[Any, Any]:
        luma, chroma = map(self._device.view, frame_planes(frame, self._device.kind))
        crop = self._output.crop.turned_back(orientation)
        if crop == Crop():
            return luma, chroma
        # Crops are even, so chroma is cut at whole samples below.
        height, width = luma.shape
        luma = luma[crop.top : height - crop.bottom, crop.left : width - crop.right]
        rows, columns = chroma.shape[:2]
        return luma, chroma[
            crop.top // 2 : rows - crop.bottom // 2, crop.left // 2 : columns - crop.right // 2
        ]

    def _write_planes(
        self, planes: tuple[Any, Any], orientation: int, placement: Placement
    ) -> None:
        width, height = placement.canvas
        target = self._array[self.count]
        luma, chroma = (upright(self._device, plane, orientation, (0, 1)) for plane in planes)
        pairs = target[height:].reshape(-(-height // 2), -1, 2)
        self._put(target[:height, :width], luma)
        for part in range(2):
            self._put(pairs[:, :, part], chroma[:, :, part])

    def _put(self, target: Any, plane: Any) -> None:
        if target.shape != plane.shape:
            plane = scale_plane(self._device, plane, target.shape, self._output.scale_algo)
        self._device.copy(target, plane)

    def _write_rgb(
        self,
        planes: tuple[Any, Any],
        frame: HardwareFrame,
        orientation: int,
        placement: Placement,
    ) -> None:
        target = self._array[self.count]
        if self._output.layout == "NCHW":
            # (3, H, W) seen as (H, W, 3).
            target = self._device.swap(self._device.swap(target, 0, 1), 1, 2)
        if self._output.pix_fmt == "bgr24":
            # Written from the last channel to the first.
            target = target[:, :, ::-1]
        algo = self._output.scale_algo
        if placement.is_inside:
            # The conversion writes in any strides, so a view that is turned back turns the frame.
            into = upright(self._device, placement.part_of(target), INVERSE[orientation], (0, 1))
            to_rgb(planes, frame, into, scale_algo=algo)
            return
        width, height = coded_size(placement.scaled, orientation)
        # It reaches over the canvas: scaled as a whole, of which the visible part is copied.
        scaled = self._device.empty((height, width, 3), "uint8")
        to_rgb(planes, frame, scaled, scale_algo=algo)
        turned = upright(self._device, scaled, orientation, (0, 1))
        self._device.copy(target, placement.visible(turned))


def _words(size: Size, stored: str) -> str:
    return f"{size[0]}x{size[1]} {stored}"
