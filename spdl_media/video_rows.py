"""Frames of a video to rows of an array, each written as it leaves the filters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from spdl_media._ffmpeg import as_fraction
from spdl_media.arguments import ArrayLayout, VideoDecoder
from spdl_media.buffer import Buffer, CPUBuffer
from spdl_media.config import CUDAConfig, DecodeConfig, as_decode_config
from spdl_media.crops import CropPlan
from spdl_media.decode import decode_into
from spdl_media.errors import ConvertError
from spdl_media.formats import Array
from spdl_media.operations import PictureOps, picture_ops
from spdl_media.packets import VideoPackets, av_packets, metadata_of
from spdl_media.rows import OnShort, RowPlan, check_enough, fill_up, no_frames
from spdl_media.shared_memory import Bytes
from spdl_media.storage import Storage, StoragePool, lease_memory
from spdl_media.timing import ticks_to_seconds
from spdl_media.values import Values

# A graph of the user's own may give more frames than it takes. So many times as many rows are reserved:
# memory that is not touched is address space alone.
_RESERVE = 8


TimedFrames: TypeAlias = tuple[Buffer, Callable[[], tuple[float, ...]]]
"""Frames in an array, and what gives the seconds of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRequest:
    """Checked options of one load of frames, for the CPU and for devices.

    Attributes:
        ops: How frames come out.
        desc: Their filters, which are the caller's own or those of ``ops``.
        cuts: What is cut out of all of them and mirrored.
        is_plain: No graph of the caller's own is run.
        config: The device; ``None`` for host memory.
        decoder: Who decodes.
        purpose: The function, for messages.
    """

    ops: PictureOps
    desc: str | PictureOps | None
    cuts: CropPlan
    is_plain: bool
    num_frames: int | None
    on_short: OnShort | None
    decode_config: DecodeConfig | None
    storage: Storage | None
    layout: ArrayLayout | None
    values: Values | None
    config: CUDAConfig | None
    decoder: VideoDecoder
    purpose: str

    def cut(self, packets: VideoPackets, desc: str | PictureOps | None) -> str | PictureOps | None:
        """Filters, and before them what is cut out of the frames and mirrored.

        Raises:
            ConvertError: The header states no size, or the crop does not lie inside the frames.
        """
        if self.cuts.is_empty:
            return desc
        size = stated_size(packets, as_decode_config(self.decode_config))
        if not size[0]:
            raise ConvertError(
                "crops= and flips= need the size of a video before it is decoded, and this header states "
                "none; load it whole, and cut the array",
                source=packets.source,
            )
        return self.cuts.filter(0, size, desc, packets.source)

    def load(self, packets: VideoPackets) -> tuple[CPUBuffer, Callable[[], tuple[float, ...]]]:
        """Decode packets to an array in host memory, each frame as it leaves the filters.

        The result is that of ``convert_frames(decode_packets(...))``, without keeping the frames.

        Returns:
            The array, and what gives the seconds of each row.

        Raises:
            DecodeError: As for :func:`~spdl_media.decode_packets`, as are FilterError and ValueError.
            ConvertError: As for :func:`~spdl_media.convert_frames`, as is StorageTooSmallError.
        """
        config = as_decode_config(self.decode_config)
        desc = self.cut(packets, self.desc)
        rows = VideoRows(packets, desc, self)
        try:
            decode_into(rows, packets, desc, config, self.num_frames)
            buffer = rows.take()
        except BaseException:
            # The traceback holds on to this frame, and the memory shall be free at once.
            rows.release()
            raise
        buffer.boxes, buffer.flips = self.cuts.drawn([0], [0])
        return buffer, rows.timestamps


def stated_size(packets: VideoPackets, config: DecodeConfig) -> tuple[int, int]:
    """Width and height of frames as the header states them, 0 where it does not."""
    stated = packets if config.orient else packets.codec
    return stated.width, stated.height


class VideoRows:
    """A sink that copies the frames of a video into rows of an array, so that none is kept.

    How many frames come is known at the end: headers are wrong, filters repeat frames or leave some out. So
    memory is reserved for as many as can be expected, and what is left over is never touched. A storage
    lends its whole block.

    Args:
        packets: What is decoded.
        filter_desc: The filters behind the decoder.
        request: How many frames are wanted, in which memory, order of axes and numbers, and what becomes of
            too few.

    Thread safety: one thread at a time.
    """

    def __init__(
        self, packets: VideoPackets, filter_desc: str | PictureOps | None, request: VideoRequest
    ) -> None:
        self._packets, self._request, self._storage = packets, request, request.storage
        # Counted by the packets: the header's number of frames may be wrong.
        self._expected, self._is_exact = expected_frames(packets, filter_desc, request.num_frames)
        if request.on_short is not None and request.num_frames is not None:
            self._expected, self._is_exact = request.num_frames, True
        self._pts: list[int | None] = []
        self._array: Array | None = None
        self._places: list[Array] = []
        self._capacity = 0

    def put(self, frame: Any) -> bool:
        """Copy a frame of FFmpeg's into the next row.

        Raises:
            ConvertError: It has another size, format, matrix or range than the first, or makes no array.
        """
        row, source, request = len(self._pts), self._packets.source, self._request
        if row == 0:
            name = f"frame 0 of item 0 ({source})"
            self._plan = RowPlan(frame, request.layout, name, source, request.values)
            # Filters may have changed it, so it is that of the frames and not of the packets.
            self._time_base = as_fraction(frame.time_base) or Fraction(1)
        self._plan.check(frame, lambda: f"frame {row} of item 0 ({source})", source)
        if row == self._capacity:
            self._make_room()
        if self._places:
            self._plan.copy(frame, self._places, row)
        self._pts.append(frame.pts)
        return row + 1 == request.num_frames

    def _make_room(self) -> None:
        nbytes, filled = self._plan.nbytes, self._array
        if isinstance(self._storage, StoragePool):
            # Whether it is large enough shows with the last frame, and the error shall name the whole size.
            # So frames that find no room are only counted.
            if filled is not None or nbytes > self._storage.nbytes:
                self.release()
                self._capacity = sys.maxsize
                return
            memory = self._storage.acquire(nbytes)
        else:
            memory = self._reserve(nbytes)
        count = memory.size // nbytes
        array = memory[: count * nbytes].view(self._plan.dtype).reshape(count, *self._plan.shape)
        if filled is not None:
            array[: self._capacity] = filled
        self._array, self._capacity = array, count
        self._places = self._plan.places(array)

    def _reserve(self, nbytes: int) -> Bytes:
        """Fresh memory for all rows that can be expected, or for twice as many as there are."""
        count = 2 * self._capacity or self._expected
        # Page-locked memory is there from the start, touched or not.
        if self._storage is None and not self._is_exact:
            try:
                return lease_memory(count * nbytes, None, spare=(_RESERVE - 1) * count * nbytes)
            except MemoryError:  # the system does not reserve more than it has
                pass
        return lease_memory(count * nbytes, self._storage)

    def take(self) -> CPUBuffer:
        """The rows that were filled, and those that stand in for missing ones.

        Raises:
            ConvertError: There are none, or too few.
            StorageTooSmallError: They are more than the storage holds.
        """
        count = len(self._pts)
        packets, request, wanted = self._packets, self._request, count
        if not count:
            raise no_frames(packets)
        if (on_short := request.on_short) is not None and request.num_frames is not None:
            wanted = request.num_frames
            check_enough(count, wanted, on_short, "frames", packets.window, packets.source)
        if self._array is None or self._capacity < wanted:
            # The storage is too small for certain, and says what it lacks.
            lease_memory(wanted * self._plan.nbytes, self._storage)
        assert self._array is not None, "there is room for the rows"
        array = self._array[:wanted]
        self.release()
        if on_short is not None and count < wanted:
            places = fill_up(array, count, on_short)
            missing = [None] * (wanted - count)
            self._pts += missing if places is None else [self._pts[place] for place in places]
        return self._plan.buffer(array)

    def timestamps(self) -> tuple[float, ...]:
        """Seconds of each row on the container's clock; ``nan``: the file has none."""
        return seconds_of(self._pts, self._time_base, metadata_of(self._packets).zero)

    def release(self) -> None:
        """Let go of the memory."""
        self._array, self._places = None, []


def seconds_of(pts: Sequence[int | None], time_base: Fraction, zero: Fraction) -> tuple[float, ...]:
    """Timestamps in seconds on the container's clock; ``nan``: the file has none."""
    return tuple(
        float("nan") if one is None else float(ticks_to_seconds(one, time_base, zero))
        for one in pts
    )


def expected_frames(
    packets: VideoPackets, filter_desc: str | PictureOps | None, limit: int | None
) -> tuple[int, bool]:
    """How many frames are to be expected, and whether hardly more can come."""
    first, stop = packets.window.ticks(packets.time_base, metadata_of(packets).zero)
    pts = [packet.pts for packet in av_packets(packets)]
    count = max(1, sum(p is None or first <= p < stop for p in pts))
    if limit is not None and limit <= count:
        return limit, True
    ops = None if filter_desc is None else picture_ops(filter_desc)
    is_exact = filter_desc is None or (
        ops is not None and (ops.frame_rate, ops.num_frames, ops.filter_desc) == (None,) * 3
    )
    return count, is_exact
