"""Frames that lie on a device into one array there, several at a launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from spdl_media._driver import LEGACY_DEFAULT, current, wait_for
from spdl_media._handover import Block
from spdl_media._rows import Colors, colors_differ, matrix_and_range
from spdl_media.buffer import Buffer
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.cuda._color_formats import Planes
from spdl_media.cuda._color_launch import convert_on_device, in_place
from spdl_media.cuda._color_plan import Plan, plane_plan
from spdl_media.cuda.nvdec import DECODERS, SEMI_PLANAR, DecoderPool, format_name, open_on_device
from spdl_media.cuda.video_output import (
    INVERSE,
    Kind,
    Output,
    coded_size,
    plan_of,
    upright,
)
from spdl_media.devices import Device
from spdl_media.errors import ConvertError
from spdl_media.geometry import Placement, Size
from spdl_media.transfer import buffer_on_stream

# Frames of a launch: so many that its cost does not count, as long as they leave memory to others.
_MOST, _LEAST, _BYTES = 16, 8, 128 << 20


class Shown(NamedTuple):
    """A frame at its place: of PyAV, on a device."""

    frame: Any
    pts: int | None
    orientation: int
    width: int


def _kind_of(shown: Shown) -> Kind:
    frame = shown.frame
    colors = int(frame.colorspace), int(frame.color_range)
    return Kind(format_name(frame), (shown.width, frame.height), shown.orientation, *colors)


class _Surface:
    """Memory of a frame, which it keeps alive: FFmpeg uses it again for a later one."""

    def __init__(self, frame: Any, address: int, shape: Any, strides: Any, typestr: str) -> None:
        self.frame = frame
        interface = {"shape": shape, "strides": strides, "typestr": typestr, "version": 3}
        self.__cuda_array_interface__ = {**interface, "data": (address, True)}


def frame_planes(shown: Shown) -> Planes:
    """Y, U and V of a frame of NVDEC's, each ``(1, rows, samples)``, as :func:`in_place` has them.

    PyAV's own DLPack export cuts the chroma of odd sizes and has fewer formats. No stream is stated: the
    reader waits for the decoder by an event.
    """
    typestr = SEMI_PLANAR[format_name(shown.frame)][0]
    size, (luma, chroma) = np.dtype(typestr).itemsize, shown.frame.planes
    wide, high = shown.width, shown.frame.height
    half, pairs = (1, -(-high // 2), -(-wide // 2)), (0, chroma.line_size, 2 * size)
    y, u, v = (
        in_place(_Surface(shown.frame, address, shape, strides, typestr))
        for address, shape, strides in (
            (luma.buffer_ptr, (1, high, wide), (0, luma.line_size, size)),
            (chroma.buffer_ptr, half, pairs),
            (chroma.buffer_ptr + size, half, pairs),
        )
    )
    return y, u, v


class VideoDevice:
    """What decoding video needs of a device.

    Args:
        device: A stream of it.

    Thread safety: safe.
    """

    decoders: DecoderPool = DECODERS

    def __init__(self, device: Device) -> None:
        self._device = device
        self.index = device.index

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
        stream = self._device.stream
        wait_for(self.index, stream, [LEGACY_DEFAULT])
        try:
            yield
        finally:
            wait_for(self.index, LEGACY_DEFAULT, [stream])

    def memory(self, shape: Sequence[int], dtype: str, *, zeros: bool) -> Block:
        """Memory for an array.

        Raises:
            TransferError: There is not enough; the message has the sizes.
        """
        block = self._device.empty(shape, dtype)
        if zeros:
            array = self.array(block.array)
            self._device.zero(array.ctypes.data, array.nbytes)
        return block

    def array(self, values: Any) -> Any:
        """An array in place, as one of NumPy's that must not be read."""
        return in_place(values)

    def convert(self, planes: Sequence[Any], plan: Plan, out: Any) -> None:
        """Launch the conversion of frames to ``out``, ``(frames, rows, columns, 3)`` in any strides."""
        convert_on_device(self._device, planes, plan, out)

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array without gaps to another."""
        self._device.copy(target.ctypes.data, source.ctypes.data, source.nbytes)

    def buffer(self, block: Block, colors: Colors) -> Buffer:
        """The buffer over an array that is ready when the stream gets where it is now."""
        matrix, range = colors
        return buffer_on_stream(block, self._device, colorspace=matrix, color_range=range)


class DeviceRows:
    """A sink that writes frames into rows of an array on their device, some at a launch.

    Args:
        device: Where they are, and where the array is made.
        output: What is made of them.
        room: Rows that are made at first.
        source: What they were decoded from, for messages.
        limit: How many frames are wanted; ``None``: all.
        is_batch: The first ``room`` frames are taken when there are so many, and more may wait behind them.

    Attributes:
        pts: Of the frames since the last array was taken.

    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        device: VideoDevice,
        output: Output,
        room: int,
        source: str,
        limit: int | None = None,
        *,
        is_batch: bool = False,
    ) -> None:
        self._device, self._output, self._source = device, output, source
        self._room, self._limit, self._is_batch = room, limit, is_batch
        self._pending: list[Shown] = []
        self._last: Any = None
        # For each frame its row: one that is shown at several moments is written once.
        self._rows: list[int] = []
        self.pts: list[int | None] = []
        self._begin()

    def _begin(self) -> None:
        self._block: Block | None = None
        self._written = 0
        self._first: tuple[Size, str, Colors] = ((0, 0), "", (None, None))

    def put(self, shown: Shown) -> bool:
        """Take a frame, which is kept until it is written.

        Raises:
            ConvertError: Its size or depth makes another array than the first one's, or its YUV means other
                colours.
        """
        if shown.frame is not self._last:
            self._last = shown.frame
            self._pending.append(shown)
        self._rows.append(self._written + len(self._pending) - 1)
        self.pts.append(shown.pts)
        if len(self._pending) >= self._most(shown):
            self._write(self._room - self._written if self._is_batch else None)
        return len(self.pts) == self._limit

    def _most(self, shown: Shown) -> int:
        nbytes = shown.frame.planes[0].line_size * shown.frame.height * 3 // 2
        return _MOST if _MOST * nbytes <= _BYTES else _LEAST

    def _write(self, count: int | None = None) -> None:
        """Write what waits, or the first of it, and let go of the frames."""
        ready = self._pending[:count]
        if not ready:  # a batch is full, and waits to be taken
            return
        with self._device.after_decoder():
            start = 0
            while start < len(ready):
                kind, stop = _kind_of(ready[start]), start + 1
                while stop < len(ready) and _kind_of(ready[stop]) == kind:
                    stop += 1
                self._write_alike(kind, ready[start:stop])
                start = stop
        del self._pending[:count]

    def _write_alike(self, kind: Kind, frames: Sequence[Shown]) -> None:
        output, stop = self._output, self._written + len(frames)
        placement = output.placement(coded_size(kind.size, kind.orientation))
        is_yuv = output.pix_fmt == "nv12"
        colors = matrix_and_range(frames[0].frame) if is_yuv else (None, None)
        found = placement.canvas, kind.stored if is_yuv else "", colors
        if self._block is None:
            self._first = found
        self._check_same(found, kind.stored)
        rows = self._memory(placement, kind.stored, stop)[self._written : stop]
        if is_yuv:
            self._write_planes(rows, kind, frames, placement)
        else:
            rows = rows if output.layout == "NHWC" else rows.transpose(0, 2, 3, 1)
            # The conversion writes in any strides, so a view that is turned back turns the frames.
            into = upright(placement.part_of(rows, 1), INVERSE[kind.orientation], 1)
            planes = [frame_planes(shown) for shown in frames]
            self._device.convert(planes, plan_of(kind, output), into)
        self._written = stop

    def _memory(self, placement: Placement, stored: str, count: int) -> Any:
        """The array, which has room for so many rows."""
        (width, height), output = placement.canvas, self._output
        dtype, zeros, shape = "uint8", placement.has_border, (height, width, 3)
        if output.pix_fmt == "nv12":
            # Luma, and below it U and V in turn, in half as many rows.
            dtype, zeros = np.dtype(SEMI_PLANAR[stored][0]).name, bool(width % 2)
            shape = (height + -(-height // 2), width + width % 2)  # type: ignore[assignment]
        elif output.layout == "NCHW":
            shape = (3, height, width)
        before, room = self._block, max(self._room, 1)
        if before is not None and count <= len(before.array):
            return self._device.array(before.array)
        while room < count:
            room *= 2
        self._block = self._device.memory((room, *shape), dtype, zeros=zeros)
        array = self._device.array(self._block.array)
        if before is not None:  # there are more frames than packets
            self._device.copy(array, self._device.array(before.array)[: self._written])
        return array

    def _check_same(self, found: tuple[Size, str, Colors], stored: str) -> None:
        first, number = self._first, self._written
        if found[:2] != first[:2]:
            words = (f"{one[0][0]}x{one[0][1]} {one[1] or stored}" for one in (first, found))
            raise ConvertError(
                f"frame 0 is {next(words)}, but frame {number} is {next(words)}; one array holds one size "
                "and depth. Give width= and height= to scale them to one size",
                source=self._source,
            )
        if found[2] != first[2]:
            other = f"frame {number}", found[2]
            raise colors_differ(("frame 0", first[2]), other, stored, self._source)

    def _write_planes(
        self, rows: Any, kind: Kind, frames: Sequence[Shown], placement: Placement
    ) -> None:
        width, height = placement.canvas
        crop = self._output.crop.turned_back(kind.orientation)
        pairs = rows[:, height:].reshape(len(rows), -(-height // 2), -1, 2)
        targets = rows[:, :height, :width], pairs[..., 0], pairs[..., 1]
        typestr, unused = SEMI_PLANAR[kind.stored]
        bits = 8 * np.dtype(typestr).itemsize - unused
        parts = zip(*map(frame_planes, frames), strict=True)
        for number, (target, planes) in enumerate(zip(targets, parts, strict=True)):
            left, top, right, bottom = (side // 2 if number else side for side in crop.sides)
            down, across = planes[0].shape[1] - bottom, planes[0].shape[2] - right
            views = [plane[:, top:down, left:across] for plane in planes]
            into = upright(target, INVERSE[kind.orientation], 1)
            source, size = (array.shape[:0:-1] for array in (views[0], into))
            plan = plane_plan(source, size, self._output.scale_algo, bits, unused)
            self._device.convert([(view, view, view) for view in views], plan, into[..., None])

    @property
    def count(self) -> int:
        """Frames since the last array was taken."""
        return len(self.pts)

    def take(self, count: int) -> Buffer:
        """The array of the first frames, and a new start for those behind them.

        Raises:
            ConvertError: As for :meth:`put`.
        """
        rows = self._rows[:count]
        if rows[-1] >= self._written:
            self._write(rows[-1] + 1 - self._written)
        block, colors = self._block, self._first[2]
        assert block is not None
        if rows == list(range(count)):
            block = Block(block.array[:count], block.used_on)
        else:
            block = self._repeated(block, rows)
        self._rows = [row - count for row in self._rows[count:]]
        del self.pts[:count]
        self._begin()
        return self._device.buffer(block, colors)

    def _repeated(self, block: Block, rows: Sequence[int]) -> Block:
        """A copy of these rows."""
        array = self._device.array(block.array)
        result = self._device.memory((len(rows), *array.shape[1:]), array.dtype.name, zeros=False)
        for target, row in zip(self._device.array(result.array), rows, strict=True):
            self._device.copy(target, array[row])
        return result
