"""Frames by number: packets from any key frame on, through one decoder and filters that are kept."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import av
import numpy as np

from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket
from spdl_media._picture_decoder import PictureDecoder
from spdl_media.codec import VideoCodec
from spdl_media.coded_units import is_gradual
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.errors import DecodeError, DemuxError, FilterError
from spdl_media.filters import PictureFilter
from spdl_media.frame_index import HEADER, FrameIndex, Run, load, make_index
from spdl_media.image_frames import VideoFrames
from spdl_media.inputs import Source, open_input
from spdl_media.operations import PictureOps, picture_ops
from spdl_media.packet_table import NO_TIME, mp4_table, read_table
from spdl_media.packets import FrameMetadata, PacketMetadata, VideoPackets, cut_short_error
from spdl_media.stills import HEAD_SIZE, pillow_video_reason
from spdl_media.timing import ticks_to_seconds
from spdl_media.window import with_x264_build

P = TypeVar("P")

Take = Callable[[int, av.VideoFrame], None]
"""Takes a frame with its number."""

# Filters of so many descriptions are kept; each has scalers of its own.
_MAX_FILTERS = 4


class VideoSource:
    """One opened video stream. :class:`~spdl_media.VideoFile` explains the arguments.

    Attributes:
        codec: Of the stream.
        metadata: Of its packets.
        index: Of its frames.
        container: The open file; ``None``: it is closed.

    Raises:
        SourceError: It cannot be opened or read, or the index is not its own.
        DemuxError: It is no media, has no such stream, cannot seek, or is an animated image.
        DecodeError: It is cut short, or no decoder takes it.

    Thread safety: one thread at a time.
    """

    container: Container | None = None

    def __init__(
        self,
        src: Source,
        stream: int | None,
        index: str | os.PathLike[str] | None,
        demux_config: DemuxConfig,
        config: DecodeConfig,
        name: str | None,
    ) -> None:
        self._input = open_input(src, demux_config, name=name)
        self._config = config
        try:
            self._check_input()
            self.container = container = Container(self._input, demux_config)
            self._stream, codec = container.video(stream)
            orientation = container.orientation(self._stream)
            with container.reading():
                self.codec = with_x264_build(container, self._stream, codec, 0)
            self.metadata = PacketMetadata(container.name, container.zero, orientation=orientation)
            # Kept in memory, because the source may have changed until the index is saved.
            head = zlib.crc32(self._input.read_at(0, HEADER))
            size = self._input.size()
            self.identity = {"size": size, "checksum of header": head, "stream": self._stream}
            if index is None:
                found = self._make_index(container)
            else:
                found = load(index, container.name, self.identity)
            self.index = replace(found, time_base=self.codec.time_base, zero=container.zero)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the source."""
        if self.container is not None:
            self.container.close()
            self.container = None
        self._input.close()

    def opened(self) -> Container:
        """The open container.

        Raises:
            ValueError: It is closed.
        """
        if self.container is None:
            raise ValueError(f"{self._input.name}: this VideoFile is closed")
        return self.container

    def _check_input(self) -> None:
        what = None
        if not self._input.seekable:
            what = (
                "the source cannot seek, and frames are asked for in any order. Read it into bytes, or "
                "write it to a file first"
            )
        elif pillow_video_reason(self._input.head(HEAD_SIZE)):
            what = "this is an animated image, whose frames have no index. load_video loads them"
        if what is not None:
            raise DemuxError(what, source=self._input.name)

    def _make_index(self, container: Container) -> FrameIndex:
        codec, last = self.codec, deque[AvPacket](maxlen=1)

        def restart() -> Iterator[AvPacket]:
            container.rewind()
            for packet in container.packets([self._stream], keep=False):
                last.append(packet)
                yield packet

        read, size = self._input.read_at, self._input.size()
        table = mp4_table(container, self._stream, codec, read, size)
        with container.reading():
            table = table or read_table(codec, restart())
            missing = container.missing_end(last) if last else None
            found = VideoPackets((), codec, replace(self.metadata, incomplete=missing))
            if error := cut_short_error(found, self._config):
                raise error
            stream, checks = container.av.streams[self._stream], self._config.on_corrupt == "raise"
            if checks and not len(table) and (stream.duration or stream.frames):
                raise DecodeError(
                    "there is no frame in the file, and its header states some. "
                    "decode_config(on_corrupt='keep') opens it as a video of none",
                    source=container.name,
                )
            return make_index(table, codec, self.metadata, self._config, container.format, restart)

    def packets_from(self, number: int) -> Iterator[AvPacket]:
        """The packets of the stream from the one with a number on, a key frame or the first.

        Raises:
            ValueError: The file is closed.
        """
        container, index = self.opened(), self.index
        # Where packets are frames, nothing of them had to be put right when the index was made.
        mend = not index.is_exact
        key = int(np.searchsorted(index.keys, number))
        target = None if index.is_counted else self._place_of(key)
        for packets, is_sought in container.places([self._stream], target, keep=False, mend=mend):
            found = self._from_key(packets, key) if is_sought else islice(packets, number, None)
            if found is not None:
                break
        keeps = self._config.on_corrupt == "keep" or container.format.startswith("mpeg")
        for packet in found or ():
            # It has fewer bytes than its header states: the file ends inside of it.
            if packet.is_corrupt and not keeps:
                return
            yield packet

    def _place_of(self, key: int) -> int:
        """Timestamp to seek to for a key frame."""
        index = self.index
        pts = int(index.key_pts[key])
        # MP4 is sought by times of decoding, of which the next key frame's may be before this one is shown.
        later = int(index.key_dts[key + 1]) if key + 1 < len(index.keys) else NO_TIME
        return pts if later == NO_TIME else min(pts, later - 1)

    def _from_key(self, packets: Iterator[AvPacket], key: int) -> Iterator[AvPacket] | None:
        """The packets from a key frame on; ``None``: they begin behind it."""
        pts, dts = int(self.index.key_pts[key]), int(self.index.key_dts[key])
        for packet in packets:
            if packet.pts == pts and (dts == NO_TIME or packet.dts in (None, dts)):
                return chain([packet], packets)
            if packet.dts is not None and dts != NO_TIME and packet.dts > dts:
                return None
        return None


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
        route = Route(self.filter(desc), found.__setitem__, self._metadata.source)

        def take(number: int, frame: av.VideoFrame) -> None:
            route.push(frame, self.orientation, number)

        self.decode(sorted(set(numbers)), take)
        route.finish()
        metadata = FrameMetadata.of(
            self._metadata,
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
