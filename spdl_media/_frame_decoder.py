"""Frames by number: the runs of packets that they need, through one decoder and filters that are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Generic, TypeVar

import av

from spdl_media._ffmpeg import AvPacket
from spdl_media._filters import PictureFilter
from spdl_media._frame_index import FrameIndex, Run
from spdl_media._picture_decoder import PictureDecoder, is_gradual
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError, FilterError
from spdl_media.filter_desc import picture_ops
from spdl_media.frames import FrameMetadata
from spdl_media.image_frames import VideoFrames
from spdl_media.operations import PictureOps
from spdl_media.packets import PacketMetadata
from spdl_media.timing import ticks_to_seconds

P = TypeVar("P")

Take = Callable[[int, av.VideoFrame], None]
"""Takes a frame with its number."""

# Filters of so many descriptions are kept; each has scalers of its own.
_MAX_FILTERS = 4


class FrameDecoder:
    """Decodes the frames of one stream that are asked for by number.

    Args:
        codec: Of the stream.
        metadata: Of its packets.
        index: Of its frames.
        config: How to decode.
        packets_from: Gives the packets of the stream from the one with a number on, which is a key frame, or
            0 for the start of the stream.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec.

    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        codec: VideoCodec,
        metadata: PacketMetadata,
        index: FrameIndex,
        config: DecodeConfig,
        packets_from: Callable[[int], Iterable[AvPacket]],
    ) -> None:
        self._codec, self._metadata, self._config = codec, metadata, config
        self._index, self._packets_from = index, packets_from
        self._decoder = PictureDecoder(codec, metadata, config)
        self._kept_filter = lru_cache(_MAX_FILTERS)(lambda ops: PictureFilter(codec, ops, config))
        # Whether the data ended before the last packet that the index promises.
        self._ended = False

    @property
    def orientation(self) -> int:
        """EXIF number of the orientation of the frames as decoded."""
        return self._decoder.orientation

    def decode(self, frames: list[int], take: Take) -> None:
        """Decode frames, each group of pictures once.

        Args:
            frames: Their numbers, sorted and distinct.
            take: Called with each of them as it is decoded.

        Raises:
            DecodeError: The data is damaged, or a frame that the index promises is not there.
        """
        index = self._index
        for run in index.runs(frames):
            is_whole = run.first == index.first and not index.is_exact
            missing, cause = self._try(run, take, is_whole=is_whole)
            if missing and not is_whole and not self._ended:
                # Not every key frame is a place to begin at, whatever the file says, and what is made up for
                # damaged parts depends on all that came before.
                whole = Run(index.first, run.last, missing)
                missing, cause = self._try(whole, take, is_whole=True)
            if missing:
                raise self._missing(missing[0], cause)

    def _try(
        self, run: Run, take: Take, *, is_whole: bool
    ) -> tuple[list[int], BaseException | None]:
        """Decode a run, and tell which frames have not come, and what FFmpeg said of reading it.

        Args:
            run: What to decode.
            take: As for :meth:`decode`.
            is_whole: From the start of the stream and without leaving out anything; else up to damage.
        """
        left = dict.fromkeys(run.frames)
        self._ended = False
        try:
            self._decode_run(run, left, take, is_whole=is_whole)
        except DecodeError:
            if is_whole:
                raise
        except av.FFmpegError as error:
            self._ended = True
            return list(left), error
        return list(left), None

    def _decode_run(self, run: Run, left: dict[int, None], take: Take, *, is_whole: bool) -> None:
        """Give the frames that are left of a run, and take them out of what is left."""
        index, decoder = self._index, self._decoder
        decoder.restart(run.first)
        decoder.needs_key = len(index.keys) > 0
        # Where timestamps name frames, they are found by them, else counted.
        numbers = {} if index.is_counted else {int(index.pts[frame]): frame for frame in left}
        count = 0
        may_refresh = run.first != index.first
        for packet in self._up_to(run.last if index.is_exact else None, run.first):
            if may_refresh and packet is not None and is_gradual(packet, self._codec):
                return
            may_refresh = False
            is_other = packet is not None and packet.pts not in numbers
            decoder.skip_unreferenced(skip=is_other and index.is_exact and not is_whole)
            for frame in decoder.decode(packet):
                if frame.is_corrupt and not is_whole:
                    return
                number = count if index.is_counted else numbers.get(frame.pts or 0)
                count += 1
                if number in left:
                    del left[number]
                    take(number, frame)
            if not left:
                return

    def _up_to(self, last: int | None, first: int) -> Iterator[AvPacket | None]:
        """The packets from one to another and ``None``, which lets the decoder give all that it has."""
        number = first
        for number, packet in enumerate(self._packets_from(first), first):
            yield packet
            if number == last:
                break
        self._ended = last is not None and number < last
        yield None

    def _missing(self, frame: int, cause: BaseException | None) -> DecodeError:
        index, metadata = self._index, self._metadata
        time = float(ticks_to_seconds(int(index.pts[frame]), self._codec.time_base, metadata.zero))
        reason = "the decoder gives no such frame"
        if metadata.incomplete or cause is not None:
            reason = metadata.incomplete or f"the data ends before it: {cause}"
        error = DecodeError(
            f"frame {frame} of {len(index)}, at {time:.3f} s, is missing: {reason}",
            source=metadata.source,
            pts_seconds=time,
            packet_index=int(index.packets[frame]),
        )
        error.__cause__ = cause
        return error

    def frames(self, numbers: list[int], desc: str | PictureOps | None) -> VideoFrames:
        """Decode frames in any order, and filter them.

        Raises:
            DecodeError: As for :meth:`decode`.
            FilterError: The filters do not take the frames, or do not give one for each.
        """
        found: dict[int, av.VideoFrame] = {}
        source = self._metadata.source
        route = Route(self.filter(desc), found.__setitem__, source)

        def take(number: int, frame: av.VideoFrame) -> None:
            route.push(frame, self.orientation, number)

        self.decode(sorted(set(numbers)), take)
        route.finish()
        metadata = FrameMetadata(
            source,
            self._metadata.zero,
            self._metadata.window,
            orientation=route.filter.orientation or self.orientation,
            corrupt_pts=self._decoder.corrupt_pts | route.filter.copied_corrupt,
        )
        return VideoFrames([found[number] for number in numbers], metadata)

    def filter(self, desc: str | PictureOps | None) -> PictureFilter:
        """The filter of a description; one that can go on is kept for the next call.

        Raises:
            FilterError: FFmpeg does not take the description.
            ValueError: It chooses frames by time or number.
        """
        ops = None if desc is None else picture_ops(desc)
        if ops is not None and (ops.window or ops.num_frames or ops.frame_rate):
            raise ValueError(
                "frames are asked for by number, and a filter_desc with frame_rate=, timestamp= or "
                "num_frames= would choose among them again. Leave these out"
            )
        if ops is None or not ops.gives_one or ops.uncut is not ops:
            return PictureFilter(self._codec, desc, self._config)
        return self._kept_filter(ops)


class Route(Generic[P]):
    """Sends frames through a filter, and each that comes out to the place that was named when it went in.

    Args:
        filter: Gives one frame for each, which it may hold back.
        put: Called with the place and the frame that comes out.
        source: For messages.
    """

    def __init__(
        self, filter: PictureFilter, put: Callable[[P, av.VideoFrame], object], source: str
    ) -> None:
        self.filter = filter
        self._put, self._source = put, source
        self._waiting: deque[P] = deque()

    def push(self, frame: av.VideoFrame, orientation: int, place: P) -> None:
        """Send a frame in, which is given away.

        Raises:
            FilterError: The filter does not take it, or gives more than one.
        """
        self._waiting.append(place)
        self._take(self.filter.push(frame, orientation))

    def finish(self) -> None:
        """Take what the filter holds back; then it takes no more frames.

        Raises:
            FilterError: It has left out frames.
        """
        if self._waiting:
            self._take(self.filter.flush())
        if self._waiting:
            raise self._uneven("fewer")

    def _take(self, frames: Iterable[Any]) -> None:
        for frame in frames:
            if not self._waiting:
                raise self._uneven("more")
            self._put(self._waiting.popleft(), frame)

    def _uneven(self, how: str) -> FilterError:
        return FilterError(
            f"frames are asked for by number, and the filters give {how} frames than they take. Use filters "
            "that give one for each",
            source=self._source,
        )
