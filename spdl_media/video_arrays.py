"""Decode a video to one array: from packets, or from a source while it is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from fractions import Fraction
from itertools import chain
from typing import Any, TypeAlias

from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket, as_fraction, unheard_log
from spdl_media._picture_decoder import PicturePath, Sink, decode_into
from spdl_media.batch import FrameRequest
from spdl_media.buffer import Buffer, CPUBuffer
from spdl_media.config import DecodeConfig
from spdl_media.convert import no_frames
from spdl_media.errors import ConvertError, DecodeError, DemuxError, FilterError
from spdl_media.formats import Array
from spdl_media.inputs import Input, Source, open_input
from spdl_media.operations import Desc, picture_ops
from spdl_media.packets import VideoPackets, av_packets, metadata_of
from spdl_media.rows import RowOptions, RowPlan, check_enough, fill_up
from spdl_media.shared_memory import Bytes
from spdl_media.storage import StoragePool, lease_memory
from spdl_media.timing import Timestamp, Window, parse_window, seconds_of
from spdl_media.window import read_video

# load_video holds two parts of coded data of this size, however long the video is.
_PART_BYTES = 8 << 20

TimedFrames: TypeAlias = tuple[Buffer, Callable[[], tuple[float, ...]]]
"""An array of frames, and a function that returns the time of each frame in seconds."""


def load_video_array(
    src: Source,
    timestamp: Timestamp | Window | None,
    request: FrameRequest,
    stream_index: int | None,
) -> CPUBuffer:
    """Read and decode a video to one array in host memory. See :func:`~spdl_media.load_video`.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not a media file, or has no such stream.
        DecodeError: The data is damaged.
        FilterError: The filters do not accept the frames.
        ConvertError: The window contains no frame, or the frames do not make an array.
        ValueError: The window is empty.
    """
    window = parse_window(timestamp)
    with open_input(src, request.demux_config, name=request.name) as input:
        # FFmpeg logs a line for each slice of H.264, and while one thread collects lines, PyAV takes the GIL
        # for those of all threads. So they are collected only to say why a video cannot be loaded, and where
        # the log alone tells damage, as for Ogg.
        if input.seekable and bytes(input.head(4)) != b"OggS":
            with suppress(DemuxError, DecodeError, FilterError), unheard_log():
                return _load_input(input, window, request, stream_index)
        return _load_input(input, window, request, stream_index)


def _load_input(
    input: Input, window: Window, request: FrameRequest, stream_index: int | None
) -> CPUBuffer:
    # The container is closed with the input.
    container, count = Container(input, audio=False), request.num_frames
    parts = read_video(container, stream_index, window, _PART_BYTES, count)
    first = next(parts)
    if count is not None:
        return load_frames(first, request, parts)[0]
    # Most videos are a single part, so the number of rows is known.
    second = next(parts, None)
    more = None if second is None else chain((second,), parts)
    return load_frames(first, request, more)[0]


def load_frames(
    packets: VideoPackets, request: FrameRequest, more: Iterable[VideoPackets] | None = None
) -> tuple[CPUBuffer, Callable[[], tuple[float, ...]]]:
    """Decode packets to an array in host memory, writing each frame as it leaves the filters.

    The result equals that of ``convert_frames(decode_packets(...))``, but frames are not kept.

    Args:
        packets: All packets, or the first ones.
        request: Options of the load.
        more: Packets that continue the first ones; iterated as they are needed.

    Raises:
        DecodeError: As for :func:`~spdl_media.decode_packets`.
        FilterError: As for :func:`~spdl_media.decode_packets`.
        ValueError: As for :func:`~spdl_media.decode_packets`.
        ConvertError: As for :func:`~spdl_media.convert_frames`.
        StorageTooSmallError: As for :func:`~spdl_media.convert_frames`.
    """
    desc = cut_of_all(packets, request, request.desc)
    config, count = request.decode_config, request.num_frames
    with closing(VideoRows(packets, desc, request, are_all=more is None)) as rows:
        decode_into(rows, packets, desc, config, count, _RowsPath, more)
        buffer = rows.take()
    if request.cuts is not None:
        buffer.boxes, buffer.flips = request.cuts.drawn([0], [0])
    return buffer, rows.timestamps


def cut_of_all(packets: VideoPackets, request: FrameRequest, desc: Desc) -> Desc:
    """Return the filters, preceded by the crop and flip of all frames of a video.

    Raises:
        ConvertError: The header states no size, or the crop is not inside the frames.
    """
    if request.cuts is None:
        return desc
    size = stated_size(packets, request.decode_config)
    if not size[0]:
        raise ConvertError(
            "crops= and flips= need the size of a video before it is decoded, and this header states none; "
            "load it whole, and cut the array",
            source=packets.source,
        )
    return request.cuts.filter(0, size, desc, packets.source)


def stated_size(packets: VideoPackets, config: DecodeConfig) -> tuple[int, int]:
    """Return the width and height of frames that the header states; 0: not stated."""
    stated = packets if config.orient else packets.codec
    return stated.width, stated.height


class _RowsPath(PicturePath):
    """A path to rows. It hands on the filter graph, because rows keep none of its frames."""

    def run(self, packets: Iterable[AvPacket], sink: Sink) -> bool:
        try:
            return super().run(packets, sink)
        finally:
            self._filter.release()


# A custom graph may output more frames than it gets, so memory is reserved for so many times the expected
# rows. Untouched memory takes only address space.
_RESERVE = 8


class VideoRows:
    """A sink that copies the frames of a video into rows of an array, so that no frame is kept.

    The number of frames is known only at the end: headers can be wrong, and filters repeat or drop frames. So
    memory is reserved for the expected number, and unused memory is never touched. A storage lends its whole
    block.

    Args:
        packets: The packets that are decoded.
        filter_desc: The filters after the decoder.
        options: Number of rows, memory, axis order and values, and what to do if there are too few frames.
        are_all: No packets follow these.

    Thread safety: one thread at a time.
    """

    def __init__(
        self, packets: VideoPackets, filter_desc: Desc, options: RowOptions, *, are_all: bool
    ) -> None:
        self._packets, self._options, self._storage = packets, options, options.storage
        self._source = packets.source
        # From the packets, because the number of frames in the header may be wrong.
        self._expected, self._is_exact = expected_frames(packets, filter_desc, options.num_frames)
        # Later packets may add frames, up to the limit.
        self._is_exact &= are_all or self._expected == options.num_frames
        if options.on_short is not None and options.num_frames is not None:
            self._expected, self._is_exact = options.num_frames, True
        self._pts: list[int | None] = []
        self._array: Array | None = None
        self._places: list[Array] = []
        self._capacity = 0

    def put(self, frame: Any) -> bool:
        """Copy a frame to the next row. Return whether the limit of rows is reached.

        Raises:
            ConvertError: The frame differs from the first in size, format, matrix or range, or its format has
                no array layout.
        """
        row, source, options = len(self._pts), self._source, self._options
        if row == 0:
            self._plan = RowPlan(frame, 0, source, options, "frame {} of item 0 ({})".format)
            # The time base of the frames, not of the packets, because filters may change it.
            self._time_base = as_fraction(frame.time_base) or Fraction(1)
        self._plan.check(frame, row, source)
        if row == self._capacity:
            self._make_room()
        # Without memory, frames are only counted; see _make_room.
        if self._places:
            self._plan.copy(frame, self._places, row)
        self._pts.append(frame.pts)
        return row + 1 == options.num_frames

    def _make_room(self) -> None:
        nbytes, filled = self._plan.nbytes, self._array
        if isinstance(self._storage, StoragePool):
            # If the storage is too small, the remaining frames are only counted, so that the error can name
            # the size that is needed.
            if filled is not None or nbytes > self._storage.nbytes:
                self.close()
                self._capacity = sys.maxsize
                return
            memory = self._storage.acquire(nbytes)
        else:
            memory = self._reserve(nbytes)
        count = memory.size // nbytes
        array = memory[: count * nbytes].view(self._plan.dtype).reshape(count, *self._plan.shape)
        # The capacity doubles, so each row is moved once on average.
        if filled is not None:
            array[: self._capacity] = filled
        self._array, self._capacity = array, count
        self._places = self._plan.places(array)

    def _reserve(self, nbytes: int) -> Bytes:
        """Allocate memory for the expected rows, or for twice the current rows."""
        count = 2 * self._capacity or self._expected
        # No reserve in a storage, because pinned memory is occupied even if it is not touched.
        if self._storage is None and not self._is_exact:
            with suppress(MemoryError):  # the system does not overcommit
                return lease_memory(count * nbytes, None, spare=(_RESERVE - 1) * count * nbytes)
        return lease_memory(count * nbytes, self._storage)

    def take(self) -> CPUBuffer:
        """Return the filled rows, and those that ``on_short`` adds.

        Raises:
            ConvertError: There are no rows, or too few.
            StorageTooSmallError: The storage is too small for the rows.
        """
        count = len(self._pts)
        packets, options, wanted = self._packets, self._options, count
        if not count:
            raise no_frames(packets)
        if (on_short := options.on_short) is not None and options.num_frames is not None:
            wanted = options.num_frames
            check_enough(count, wanted, on_short, "frames", packets.window, packets.source)
        if self._array is None or self._capacity < wanted:
            # The storage is too small: this raises the error with the size that is needed.
            lease_memory(wanted * self._plan.nbytes, self._storage)
        assert self._array is not None, "there is room for the rows"
        # From here on, only the buffer holds the memory, so deleting the buffer releases it.
        array = self._array[:wanted]
        self.close()
        if on_short is not None and count < wanted:
            places = fill_up(array, count, on_short)
            missing = [None] * (wanted - count)
            self._pts += missing if places is None else [self._pts[place] for place in places]
        return self._plan.buffer(array)

    def timestamps(self) -> tuple[float, ...]:
        """Return the time of each row in seconds on the container's clock; ``nan`` if it has none."""
        return seconds_of(self._pts, self._time_base, metadata_of(self._packets).zero)

    def close(self) -> None:
        """Release the memory."""
        self._array, self._places = None, []


def expected_frames(
    packets: VideoPackets, filter_desc: Desc, limit: int | None
) -> tuple[int, bool]:
    """Estimate the number of frames; the second result tells whether more are unlikely."""
    first, stop = metadata_of(packets).span(packets.time_base)
    pts = [packet.pts for packet in av_packets(packets)]
    # Packets without a timestamp may lie in the window, too.
    count = max(1, sum([p is None or first <= p < stop for p in pts]))
    if limit is not None and limit <= count:
        return limit, True
    ops = None if filter_desc is None else picture_ops(filter_desc)
    is_exact = filter_desc is None or (
        ops is not None and (ops.frame_rate, ops.num_frames, ops.filter_desc) == (None,) * 3
    )
    return count, is_exact
