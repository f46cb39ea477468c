"""Writes frames on a device into one array, several per launch: crop, scaling, placement and colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from spdl_media.buffer import Buffer
from spdl_media.codec import VideoCodec
from spdl_media.cuda.color import Planes, convert_on_device
from spdl_media.cuda.color_plan import SEMI_PLANAR, Plan, make_plan, normalization, plane_plan
from spdl_media.cuda.nvdec import DECODERS, DecoderPool
from spdl_media.cuda.session import Session
from spdl_media.devices import Device
from spdl_media.errors import ConvertError
from spdl_media.formats import COLOR_RANGES, COLORSPACES, Array
from spdl_media.geometry import Box, Placement, Size, fits, place, stored_flips, swaps_sides
from spdl_media.handover import KEEPER, Block, array_at, in_place
from spdl_media.operations import PictureOps
from spdl_media.rows import ArrayLayout, Colors, FrameKind, Values, kinds_differ, matrix_and_range
from spdl_media.transfer import buffer_on_stream


@dataclass(frozen=True, slots=True)
class Output:
    """Conversion of each frame.

    Attributes:
        ops: Crop, size and format: ``"rgb24"``, ``"bgr24"``, or ``"nv12"`` for the decoder's own planes.
        layout: Order of the axes of RGB.
        values: Normalisation of RGB; ``None`` means uint8 levels.
    """

    ops: PictureOps
    layout: ArrayLayout = "NHWC"
    values: Values | None = None

    @property
    def is_yuv(self) -> bool:
        """Whether the output is YUV planes instead of RGB."""
        return self.ops.pix_fmt == "nv12"


class Kind(NamedTuple):
    """Properties that all frames of a launch have in common."""

    stored: str
    size: Size
    orientation: int
    matrix: int
    range: int

    def box(self, ops: PictureOps) -> Box:
        """Return the crop box in the upright frame.

        Raises:
            ConvertError: The crop does not lie inside the frame.
        """
        size = self.size[::-1] if swaps_sides(self.orientation) else self.size
        box = ops.box or (0, 0, *size)
        if not fits(box, *size):
            raise ConvertError(
                f"the crop {box} (x, y, width, height) does not lie inside the frame, which is "
                f"{size[0]}x{size[1]}"
            )
        return box

    def placement(self, ops: PictureOps) -> Placement:
        """Return size and position of the crop on the canvas, upright.

        Raises:
            ConvertError: The crop does not lie inside the frame.
        """
        return place(self.box(ops)[2:], ops.width, ops.height, ops.scale_mode)

    def views(self, planes: Planes, ops: PictureOps) -> Planes:
        """Return views of the crop in the planes of a frame, upright and mirrored if ``ops`` says so.

        Raises:
            ConvertError: The crop does not lie inside the frame.
        """
        if self.orientation == 1 and ops.box is None and not ops.mirror:
            return planes
        x, y, w, h = box = self.box(ops)
        # Include a chroma sample at the edge even if only a part of its pixels is in the box.
        half = x // 2, y // 2, -(-w // 2), -(-h // 2)
        luma, u, v = planes
        return self._view(luma, box, ops), self._view(u, half, ops), self._view(v, half, ops)

    def _view(self, plane: Any, box: Box, ops: PictureOps) -> Any:
        x, y, w, h = box
        backwards, upwards = stored_flips(self.orientation)
        plane = plane[:, :: -1 if upwards else 1, :: -1 if backwards else 1]
        if swaps_sides(self.orientation):
            plane = plane.swapaxes(1, 2)
        return plane[:, y : y + h, x : x + w][:, :, :: -1 if ops.mirror else 1]


@lru_cache(maxsize=256)
def plan_of(kind: Kind, output: Output) -> Plan:
    """Return the conversion of the crop by :func:`source_of` to the part of the canvas that it fills.

    Raises:
        ConvertError: The crop does not lie inside the frame.
    """
    ops, placement = output.ops, kind.placement(output.ops)
    source, size = kind.box(source_of(ops))[2:], placement.scaled
    left, top = max(0, -placement.left), max(0, -placement.top)
    algo: Any = ops.scale_algo
    if not ops.is_scaled:
        # Plan the conversion of the whole frame, and take the part of the box.
        x, top, w, _ = kind.box(ops)
        size, algo = source, None
        left = source[0] - x - w if ops.mirror else x
    colors = COLORSPACES.get(kind.matrix), COLOR_RANGES.get(kind.range)
    is_bgr = ops.pix_fmt == "bgr24"
    plan = make_plan(
        kind.stored, source, size, *colors, algo=algo, values=output.values, bgr=is_bgr
    )
    # Do not compute parts of the scaled frame outside of the canvas.
    return plan.part(left, top, *map(min, placement.scaled, placement.canvas))


def source_of(ops: PictureOps) -> PictureOps:
    """Return ``ops`` with the crop that is applied before the conversion."""
    # Without scaling, crop after the conversion, as the CPU does: chroma at the edges then has neighbours.
    return ops if ops.is_scaled else replace(ops, box=None)


class Shown(NamedTuple):
    """A frame on a device, with its presentation time and orientation."""

    frame: Any
    pts: int | None
    orientation: int
    time_base: Fraction


def _kind_of(shown: Shown) -> Kind:
    frame = shown.frame
    colors = int(frame.colorspace), int(frame.color_range)
    return Kind(frame.format.name, (frame.width, frame.height), shown.orientation, *colors)


def frame_planes(shown: Shown) -> Planes:
    """Return Y, U and V of an NVDEC frame as device views ``(1, rows, samples)``, as :func:`in_place` does.

    The views keep the frame alive; otherwise its decoder would reuse its memory for a later frame.

    Raises:
        TransferError: The device fails while the frame is decoded.
    """
    frame = shown.frame
    dtype, *_ = SEMI_PLANAR[frame.format.name]
    size = np.dtype(dtype).itemsize

    def view(plane: Any, shape: tuple[int, ...], *steps: int) -> Array:
        place = {"data": (plane.buffer_ptr, True), "strides": (0, plane.line_size, *steps)}
        return array_at({**place, "shape": shape, "typestr": dtype}, frame)

    planes = frame.planes
    luma = view(planes[0], (1, frame.height, frame.width), size)
    half = 1, -(-frame.height // 2), -(-frame.width // 2), 2
    chroma = view(planes[1], half, 2 * size, size)
    return luma, chroma[..., 0], chroma[..., 1]


class VideoDevice(Device):
    """A device that decodes video.

    Thread safety: safe.
    """

    decoders: DecoderPool = DECODERS

    def open_decoder(self, codec: VideoCodec) -> Any:
        """Return a decoder of NVIDIA's library for streams of this codec."""
        return Session(codec.name, self.index)

    def memory(self, shape: Sequence[int], row: Array, *, fill: bool) -> Block:
        """Allocate memory for rows with the dtype of ``row``; with ``fill``, copy ``row`` to each of them.

        Raises:
            TransferError: There is not enough memory; the message has the sizes.
        """
        block = self.empty(shape, row.dtype)
        if fill:
            array = in_place(block.array)
            self.copy("HtoD", array[0], row)
            # If the row is pinned, the copy reads it in the background.
            KEEPER.keep((self.index, self.stream), self.record(), row)
            # Copy on the device, because an upload of all rows would use the bus for each of them.
            for other in array[1:]:
                self.copy("DtoD", other, array[0])
        return block

    convert = convert_on_device

    def buffer(self, block: Block, colors: Colors) -> Buffer:
        """Return the buffer of an array. It is ready when the stream has done the work queued so far.

        Raises:
            TransferError: The device has failed.
        """
        return buffer_on_stream(block, self, colorspace=colors[0], color_range=colors[1])


class DeviceRows:
    """A sink that writes frames into rows of an array on their device, several per launch.

    Args:
        device: The device of the frames and of the array.
        output: Conversion of the frames.
        room: Initial number of rows.
        source: Name of the decoded source, for messages.
        limit: Maximum number of frames; ``None`` means all.

    Attributes:
        pts: Presentation times of the frames since the last array was taken.
        time_base: Unit of ``pts`` in seconds.

    Thread safety: one thread at a time.
    """

    def __init__(
        self, device: VideoDevice, output: Output, room: int, source: str, limit: int | None = None
    ) -> None:
        self._device, self._output, self._source = device, output, source
        self._room, self._limit = max(room, 1), limit
        self._begin()

    def _begin(self) -> None:
        self.pts: list[int | None] = []
        self._pending: list[Shown] = []
        self._block: Block | None = None
        self._written = 0

    def put(self, shown: Shown) -> bool:
        """Add a frame, which is kept until it is written. Return whether the limit is reached.

        Raises:
            ConvertError: Size, depth or YUV colours of the frame differ from the first one's, or the crop
                does not lie inside the frame.
        """
        self._pending.append(shown)
        self.pts.append(shown.pts)
        self.time_base = shown.time_base
        if len(self._pending) >= shown.frame.per_launch:
            self._write()
        return len(self.pts) == self._limit

    def take(self) -> Buffer:
        """Return the array of the frames so far, and start a new one.

        Raises:
            ConvertError: As for :meth:`put`.
        """
        self._write()
        block, count, colors = self._block, self._written, self._first.colors
        assert block is not None, "there is a frame"
        self._begin()
        return self._device.buffer(block.first(count), colors)

    def drop(self) -> None:
        """Drop the frames that are not written."""
        self._pending.clear()

    def _write(self) -> None:
        """Write the pending frames, and free them."""
        # A stream may change its size or colours, which needs another plan.
        for kind, alike in groupby(self._pending, _kind_of):
            self._write_alike(kind, list(alike))
        # The decoder may reuse their memory now, because it writes on the same stream.
        self._pending.clear()

    def _write_alike(self, kind: Kind, frames: Sequence[Shown]) -> None:
        output, start, stop = self._output, self._written, self._written + len(frames)
        ops, is_yuv = output.ops, output.is_yuv
        try:
            placement = kind.placement(ops)
        except ConvertError as error:
            raise ConvertError(str(error), source=self._source) from error
        colors: Colors = matrix_and_range(frames[0].frame) if is_yuv else (None, None)
        pix_fmt = kind.stored if is_yuv else ops.pix_fmt or ""
        found = FrameKind(*placement.canvas, pix_fmt, colors)
        if start == 0:
            self._first = found
        if found != self._first:
            first = "frame 0", self._first
            raise kinds_differ(first, (f"frame {start}", found), self._source)
        # Allocated at the first frame, whose kind determines the shape.
        rows = self._memory(placement, kind.stored, stop)[start:stop]
        if is_yuv:
            self._write_planes(rows, kind, frames, placement.canvas)
        else:
            # The kernel reads and writes any strides, so views rotate frames and reorder axes without copies.
            rows = rows if output.layout == "NHWC" else rows.transpose(0, 2, 3, 1)
            source = source_of(ops)
            planes = [kind.views(frame_planes(shown), source) for shown in frames]
            self._device.convert(planes, plan_of(kind, output), covered(rows, placement))
        self._written = stop

    def _memory(self, placement: Placement, stored: str, count: int) -> Any:
        """Return the array, enlarged to at least ``count`` rows."""
        before = None if self._block is None else in_place(self._block.array)
        if before is not None and count <= len(before):
            return before
        # Double it, so that each row is copied about once on average.
        while self._room < count:
            self._room *= 2
        row, fill = self._black(placement, stored)
        self._block = self._device.memory((self._room, *row.shape), row, fill=fill)
        array = in_place(self._block.array)
        if before is not None:  # there are more frames than packets
            done = self._written
            self._device.copy("DtoD", array[:done], before[:done])
        return array

    def _black(self, placement: Placement, stored: str) -> tuple[Array, bool]:
        """Return an empty row of the array, and whether frames leave parts of it uncovered."""
        (width, height), values = placement.canvas, self._output.values
        if self._output.is_yuv:
            # Luma, and below it interleaved U and V in half as many rows.
            shape = height + -(-height // 2), width + width % 2
            return np.zeros(shape, SEMI_PLANAR[stored].dtype), bool(width % 2)
        row = np.zeros((height, width, 3), np.uint8)
        if values is not None and values.is_float:
            # Black is the normalised value of level 0.
            row = row + normalization(values)[1]
        if self._output.layout == "NCHW":
            row = np.ascontiguousarray(row.transpose(2, 0, 1))
        return row, placement.has_border

    def _write_planes(self, rows: Any, kind: Kind, frames: Sequence[Shown], canvas: Size) -> None:
        ops, (width, height) = self._output.ops, canvas
        pairs = rows[:, height:].reshape(len(rows), -(-height // 2), -1, 2)
        targets = rows[:, :height, :width], pairs[..., 0], pairs[..., 1]
        parts = zip(*(kind.views(frame_planes(shown), ops) for shown in frames), strict=True)
        for target, planes in zip(targets, parts, strict=True):
            algo: Any = ops.scale_algo
            sizes = planes[0].shape[2:0:-1], target.shape[2:0:-1]
            plan = plane_plan(kind.stored, *sizes, algo)
            self._device.convert(
                [(plane, plane, plane) for plane in planes], plan, target[..., None]
            )


def covered(canvas: Any, placement: Placement) -> Any:
    """Return the view of a canvas ``(N, H, W, ...)`` that the image fills."""
    starts, sizes = (
        (placement.left, placement.top),
        zip(placement.scaled, placement.canvas, strict=True),
    )
    columns, rows = (
        slice(max(0, first), max(0, first) + min(size))
        for first, size in zip(starts, sizes, strict=True)
    )
    return canvas[:, rows, columns]
