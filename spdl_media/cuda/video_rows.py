"""Frames that lie on a device into one array there, several at a launch: cut, size, place and colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from spdl_media.buffer import Buffer
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.cuda.color import Planes, convert_on_device
from spdl_media.cuda.color_plan import SEMI_PLANAR, Plan, make_plan, normalization, plane_plan
from spdl_media.cuda.nvdec import DECODERS, DecoderPool, format_name, open_on_device
from spdl_media.cuda_driver import LEGACY_DEFAULT, current, wait_for
from spdl_media.devices import Device
from spdl_media.errors import ConvertError
from spdl_media.formats import COLOR_RANGES, COLORSPACES, Array
from spdl_media.geometry import Box, Placement, Size, fits, place, stored_flips, swaps_sides
from spdl_media.handover import KEEPER, Block, array_at, in_place
from spdl_media.operations import PictureOps
from spdl_media.row_plan import (
    ArrayLayout,
    Colors,
    FrameKind,
    kinds_differ,
    matrix_and_range,
)
from spdl_media.transfer import buffer_on_stream
from spdl_media.values import Values

# Frames of a launch: so many that its cost does not count, as long as they leave memory to others.
_MOST, _LEAST, _BYTES = 16, 8, 128 << 20


@dataclass(frozen=True, slots=True)
class Output:
    """What is made of each frame.

    Attributes:
        ops: Its cut, size and format: ``"rgb24"``, ``"bgr24"``, or ``"nv12"`` for the decoder's own planes.
        layout: Order of the axes of RGB.
        values: The numbers that RGB becomes; ``None``: it stays as it is.
    """

    ops: PictureOps
    layout: ArrayLayout = "NHWC"
    values: Values | None = None

    @property
    def is_yuv(self) -> bool:
        """Whether planes stay planes."""
        return self.ops.pix_fmt == "nv12"


class Kind(NamedTuple):
    """What frames of a launch have in common: as they are coded, but for the crop and what follows."""

    stored: str
    size: Size
    orientation: int
    matrix: int
    range: int

    def box(self, ops: PictureOps) -> Box:
        """What is cut out of the upright frame.

        Raises:
            ConvertError: It does not lie inside.
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
        """Where it goes, upright.

        Raises:
            ConvertError: The crop does not lie inside the frame.
        """
        return place(self.box(ops)[2:], ops.width, ops.height, ops.scale_mode)

    def views(self, planes: Planes, ops: PictureOps) -> Planes:
        """What is cut out of the planes of a frame, upright and mirrored or not.

        Raises:
            ConvertError: The crop does not lie inside the frame.
        """
        x, y, w, h = box = self.box(ops)
        # A sample of chroma at the edge counts, even where the box has only a part of its pixels.
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
    """The conversion of what :func:`source_of` cuts out to the part of the canvas that it fills.

    Raises:
        ConvertError: The crop does not lie inside the frame.
    """
    ops, placement = output.ops, kind.placement(output.ops)
    source, size = kind.box(source_of(ops))[2:], placement.scaled
    left, top = max(0, -placement.left), max(0, -placement.top)
    algo: Any = ops.scale_algo
    if not ops.is_scaled:
        # The whole frame is converted, and of its tables those of the box are taken.
        x, top, w, _ = kind.box(ops)
        size, algo = source, None
        left = source[0] - x - w if ops.mirror else x
    colors = COLORSPACES.get(kind.matrix), COLOR_RANGES.get(kind.range)
    is_bgr = ops.pix_fmt == "bgr24"
    plan = make_plan(
        kind.stored, source, size, *colors, algo=algo, values=output.values, bgr=is_bgr
    )
    # What the canvas cuts off of the scaled frame is not computed.
    return plan.part(left, top, *map(min, placement.scaled, placement.canvas))


def source_of(ops: PictureOps) -> PictureOps:
    """What is cut out of frames before they are converted."""
    # The box of what the whole frame becomes, as on the CPU, where chroma at its edges has neighbours.
    return ops if ops.is_scaled else replace(ops, box=None)


class Shown(NamedTuple):
    """A frame at its place: of PyAV, on a device."""

    frame: Any
    pts: int | None
    orientation: int
    width: int
    time_base: Fraction


def _kind_of(shown: Shown) -> Kind:
    frame = shown.frame
    colors = int(frame.colorspace), int(frame.color_range)
    return Kind(format_name(frame), (shown.width, frame.height), shown.orientation, *colors)


def frame_planes(shown: Shown) -> Planes:
    """Y, U and V of a frame of NVDEC's, each ``(1, rows, samples)``, as :func:`in_place` has them.

    They keep the frame, whose memory FFmpeg else uses again for a later one. PyAV's own DLPack export cuts
    the chroma of odd sizes and has fewer formats.
    """
    dtype, *_ = SEMI_PLANAR[format_name(shown.frame)]
    frame, wide, size = shown.frame, shown.width, np.dtype(dtype).itemsize

    def view(plane: Any, shape: tuple[int, ...], *steps: int) -> Array:
        place = {"data": (plane.buffer_ptr, True), "strides": (0, plane.line_size, *steps)}
        return array_at({**place, "shape": shape, "typestr": dtype}, frame)

    luma = view(frame.planes[0], (1, frame.height, wide), size)
    half = 1, -(-frame.height // 2), -(-wide // 2), 2
    chroma = view(frame.planes[1], half, 2 * size, size)
    return luma, chroma[..., 0], chroma[..., 1]


class VideoDevice(Device):
    """A device that decodes video.

    Thread safety: safe.
    """

    decoders: DecoderPool = DECODERS

    def open_decoder(self, codec: VideoCodec, config: DecodeConfig, source: str) -> Any:
        """FFmpeg's decoder on this device; see :func:`open_on_device`, whose errors it raises."""
        with current(self.index):
            return open_on_device(codec, config, source, self.index)

    @contextmanager
    def after_decoder(self) -> Iterator[None]:
        """A context whose work follows the decoder's, and which the decoder's later work follows.

        FFmpeg puts frames on the device's default stream, and uses their memory again once they are let go.
        So the device's stream waits for the default one on the way in, and the other way round on the way
        out; the host waits for nothing.
        """
        wait_for(self.index, self.stream, [LEGACY_DEFAULT])
        try:
            yield
        finally:
            wait_for(self.index, LEGACY_DEFAULT, [self.stream])

    def memory(self, shape: Sequence[int], row: Array, *, fill: bool) -> Block:
        """Memory for rows like this one, and with ``fill`` of its values.

        Raises:
            TransferError: There is not enough; the message has the sizes.
        """
        block = self.empty(shape, row.dtype)
        if fill:
            array = in_place(block.array)
            self.copy("HtoD", array[0], row)
            # The copy reads the row in the background, if the memory is pinned.
            KEEPER.keep((self.index, self.stream), self.record(), row)
            # Copies on the device, since an upload of all rows would cross the bus for each.
            for other in array[1:]:
                self.copy("DtoD", other, array[0])
        return block

    convert = convert_on_device

    def buffer(self, block: Block, colors: Colors) -> Buffer:
        """The buffer over an array that is ready when the stream gets where it is now.

        Raises:
            TransferError: The device has failed.
        """
        return buffer_on_stream(block, self, colorspace=colors[0], color_range=colors[1])


class DeviceRows:
    """A sink that writes frames into rows of an array on their device, some at a launch.

    Args:
        device: Where they are, and where the array is made.
        output: What is made of them.
        room: Rows that are made at first.
        source: What they were decoded from, for messages.
        limit: How many frames are wanted; ``None``: all.

    Attributes:
        pts: Of the frames since the last array was taken.
        time_base: Seconds in one unit of these.

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
        """Take a frame, which is kept until it is written.

        Raises:
            ConvertError: Its size or depth makes another array than the first one's, its YUV means other
                colours, or its crop lies outside.
        """
        self._pending.append(shown)
        self.pts.append(shown.pts)
        self.time_base = shown.time_base
        # Of the frames that wait, by the pitch of their rows, which is larger than their width.
        nbytes = _MOST * shown.frame.planes[0].line_size * shown.frame.height * 3 // 2
        if len(self._pending) >= (_MOST if nbytes <= _BYTES else _LEAST):
            self._write()
        return len(self.pts) == self._limit

    def take(self) -> Buffer:
        """The array of the frames, and a new start for those that follow.

        Raises:
            ConvertError: As for :meth:`put`.
        """
        self._write()
        block, count, colors = self._block, self._written, self._first.colors
        assert block is not None, "there is a frame"
        self._begin()
        return self._device.buffer(block.first(count), colors)

    def _write(self) -> None:
        """Write what waits, and let go of the frames."""
        if self._pending:
            with self._device.after_decoder():
                # A stream may change its size or its colours, which is another plan.
                for kind, alike in groupby(self._pending, _kind_of):
                    self._write_alike(kind, list(alike))
            # FFmpeg may write to their memory again: its stream waits for ours.
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
        # Made at the first frame, whose kind tells the shape.
        rows = self._memory(placement, kind.stored, stop)[start:stop]
        if is_yuv:
            self._write_planes(rows, kind, frames, placement.canvas)
        else:
            # The conversion reads and writes in any strides, so views turn frames and order the axes.
            rows = rows if output.layout == "NHWC" else rows.transpose(0, 2, 3, 1)
            planes = [kind.views(frame_planes(shown), source_of(ops)) for shown in frames]
            self._device.convert(planes, plan_of(kind, output), placement.part_of(rows, 1))
        self._written = stop

    def _memory(self, placement: Placement, stored: str, count: int) -> Any:
        """The array, which has room for so many rows."""
        before = None if self._block is None else in_place(self._block.array)
        if before is not None and count <= len(before):
            return before
        # Doubled, so that each row is moved about once however many come.
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
        """A row of the array without a frame, and whether frames leave some of it to see."""
        (width, height), values = placement.canvas, self._output.values
        if self._output.is_yuv:
            # Luma, and below it U and V in turn, in half as many rows.
            shape = height + -(-height // 2), width + width % 2
            return np.zeros(shape, SEMI_PLANAR[stored].dtype), bool(width % 2)
        row = np.zeros((height, width, 3), np.uint8)
        if values is not None and values.is_float:
            # Black is what a level of 0 becomes.
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
