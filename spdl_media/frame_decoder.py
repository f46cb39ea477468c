"""Decode frames by number: from the nearest key frame on, with a decoder and filters that are reused."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Generic, TypeVar

import av
import numpy as np

from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket
from spdl_media._picture_decoder import PictureDecoder
from spdl_media.codec import VideoCodec, needs_first_packet
from spdl_media.coded_units import is_gradual
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.errors import DecodeError, DemuxError, FilterError, SourceError
from spdl_media.filters import PictureFilter
from spdl_media.frame_index import HEADER, FrameIndex, Run, load, make_index
from spdl_media.image_frames import VideoFrames
from spdl_media.inputs import Source, open_input
from spdl_media.operations import Desc, picture_ops
from spdl_media.packet_table import NO_TIME, mp4_table, read_table
from spdl_media.packets import FrameMetadata, PacketMetadata, VideoPackets, check_complete
from spdl_media.stills import pillow_video_reason
from spdl_media.timing import ticks_to_seconds
from spdl_media.window import with_x264_build

P = TypeVar("P")

Take = Callable[[int, av.VideoFrame], None]
"""Called with each decoded frame and its number."""

# Number of filter descriptions whose filters are kept; each has scalers of its own.
_MAX_FILTERS = 4


class VideoSource:
    """One open video stream. :class:`~spdl_media.VideoFile` explains the arguments.

    Attributes:
        codec: Codec of the stream.
        metadata: Metadata of its packets.
        index: Index of its frames.
        container: The open file; ``None`` once it is closed.

    Raises:
        SourceError: The source cannot be opened or read, or the index belongs to another video.
        DemuxError: The source is not media, has no such stream, cannot seek, or is read by Pillow.
        DecodeError: The source is truncated, or no decoder takes it.

    Thread safety: one thread at a time.
    """

    container: Container | None = None
    _failure = ""

    def __init__(
        self,
        src: Source,
        stream: int | None,
        index: str | os.PathLike[str] | None,
        demux_config: DemuxConfig | None,
        config: DecodeConfig,
        name: str | None,
    ) -> None:
        self._process = os.getpid()
        self._input = open_input(src, demux_config, name=name)
        self._config = config
        try:
            self._check_input()
            self.container = container = Container(self._input)
            self._stream, codec = container.video(stream)
            orientation = container.orientation(self._stream)
            with container.reading():
                self.codec = with_x264_build(container, self._stream, codec, 0)
            self.metadata = PacketMetadata(container.name, container.zero, orientation=orientation)
            # Read now, because the source may have changed by the time the index is saved.
            self.identity = self._read_identity()
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

    def close_if_failed(self) -> None:
        """Close the source if a read has failed, because FFmpeg states the end of the file from then on."""
        try:
            self._input.check()
        except BaseException as error:  # noqa: BLE001  # also a Ctrl-C, while FFmpeg read
            self._failure = f"{type(error).__name__}: {getattr(error, 'message', error)}"
            self.close()

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the file, and not the one that it is a fork of."""
        return self._process == os.getpid()

    def opened(self) -> Container:
        """Return the open container.

        Raises:
            ValueError: The file is closed, or was opened before a fork.
            SourceError: The source was closed because a read has failed.
        """
        if self._failure:
            text = f"an earlier read failed, so open it again ({self._failure})"
            raise SourceError(text, source=self._input.name)
        if self.container is None:
            raise ValueError(f"{self._input.name}: this VideoFile is closed")
        if not self.is_ours:
            raise ValueError(
                f"{self._input.name}: this VideoFile was opened before the fork of this process, with whose "
                "parent it shares the position in the file. Open it in each process, or by VideoCache.open"
            )
        return self.container

    def _read_identity(self) -> dict[str, int]:
        head = zlib.crc32(self._input.read_at(0, HEADER))
        return {"size": self._input.size(), "checksum of header": head, "stream": self._stream}

    def _check_input(self) -> None:
        what = (
            "the source cannot seek, which frames in any order need. Read it into bytes, or write it to a "
            "file first"
        )
        if self._input.seekable:
            if not pillow_video_reason(self._input.image_head()):
                return
            what = "Pillow reads this image, so its frames have no index. load_video loads them"
        raise DemuxError(what, source=self._input.name)

    def _make_index(self, container: Container) -> FrameIndex:
        codec = self.codec

        def restart() -> Iterator[AvPacket]:
            container.rewind()
            return container.packets([self._stream], keep=False)

        stream, read = container.av.streams[self._stream], self._input.read_at
        table = mp4_table(stream, container.format, codec, read, self._input.size())
        with container.reading():
            table = table or read_table(codec, restart())
            missing = container.missing_end(self._stream) if len(table) else None
            found = VideoPackets((), codec, replace(self.metadata, incomplete=missing))
            check_complete(found, self._config)
            # Not the stream from above: a rewind may have opened the source again.
            stream, checks = container.av.streams[self._stream], self._config.on_corrupt == "raise"
            if checks and not len(table) and (stream.duration or stream.frames):
                raise DecodeError(
                    "the file has no frames, but its header states some. "
                    "decode_config(on_corrupt='keep') opens it as a video without frames",
                    source=container.name,
                )
            return make_index(table, codec, self.metadata, self._config, container.format, restart)

    def packets_from(self, number: int) -> Iterator[AvPacket]:
        """Yield the packets of the stream, beginning with the given number: a key frame or the first.

        Raises:
            ValueError: The file is closed.
        """
        container, index = self.opened(), self.index
        key = int(np.searchsorted(index.keys, number))
        from_start = index.is_counted or needs_first_packet(self.codec)
        target = None if from_start else self._place_of(key)
        tests = {self._stream: partial(self._begins, key)}
        # An exact index was made from packets that needed no repair.
        mend = not index.is_exact
        packets, is_sought = container.packets_from(target, tests, keep=False, mend=mend)
        keeps = self._config.on_corrupt == "keep" or container.format.startswith("mpeg")
        for packet in packets if is_sought else islice(packets, number, None):
            # The packet has fewer bytes than its header states: the file ends inside it.
            if packet.is_corrupt and not keeps:
                return
            yield packet

    def _place_of(self, key: int) -> int:
        """Return the timestamp to seek to for a key frame."""
        index = self.index
        pts = int(index.key_pts[key])
        # MP4 seeks by decode timestamps, and that of the next key frame may come before this one's pts.
        later = int(index.key_dts[key + 1]) if key + 1 < len(index.keys) else NO_TIME
        return pts if later == NO_TIME else min(pts, later - 1)

    def _begins(self, key: int, packet: AvPacket) -> bool | None:
        """Whether a packet is a key frame; ``None``: it may come before it."""
        pts, dts = int(self.index.key_pts[key]), int(self.index.key_dts[key])
        if packet.pts == pts and (dts == NO_TIME or packet.dts in (None, dts)):
            return True
        is_after = packet.dts is not None and dts != NO_TIME and packet.dts > dts
        return False if is_after else None


class FrameDecoder:
    """Decodes frames of one stream by number.

    Args:
        codec: Codec of the stream.
        metadata: Metadata of its packets.
        index: Index of its frames.
        config: How to decode.
        packets_from: Called with the number of a key frame, or 0 for the start of the stream; returns the
            packets from there on.

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
        # Whether the data ended before the last packet of the index.
        self._ended = False

    @property
    def orientation(self) -> int:
        """EXIF number of the orientation of the frames as decoded."""
        return self._decoder.orientation

    def decode(self, frames: list[int], take: Take) -> None:
        """Decode frames, each group of pictures once.

        Args:
            frames: Frame numbers, sorted and distinct.
            take: Called with each frame as it is decoded.

        Raises:
            DecodeError: The data is damaged, or a frame of the index is missing.
        """
        index = self._index
        for run in index.runs(frames):
            is_whole = run.first == index.first and not index.is_exact
            missing = self._try(run, take, is_whole=is_whole)
            if missing and not is_whole and not self._ended:
                # Decoding cannot begin at every key frame that the file states, and the concealment of
                # damage depends on all frames before it.
                missing = self._try(Run(index.first, run.last, missing), take, is_whole=True)
            if missing:
                raise self._missing(missing[0])

    def _try(self, run: Run, take: Take, *, is_whole: bool) -> list[int]:
        """Decode a run. Return the frames that are missing.

        Args:
            run: The packets to decode.
            take: Called with each frame, as in :meth:`decode`.
            is_whole: The run begins at the start of the stream: no packet is skipped, and damaged frames
                are kept. Otherwise decoding stops at damage.
        """
        left = dict.fromkeys(run.frames)
        self._ended = False
        try:
            self._decode_run(run, left, take, is_whole=is_whole)
        except DecodeError:
            if is_whole:
                raise
        return list(left)

    def _decode_run(self, run: Run, left: dict[int, None], take: Take, *, is_whole: bool) -> None:
        """Pass the wanted frames of a run to ``take``, and remove each from ``left``."""
        index, decoder = self._index, self._decoder
        decoder.restart(run.first)
        decoder.needs_key = len(index.keys) > 0
        # Frames are found by timestamp, or counted if timestamps do not identify them.
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
        """Yield the packets ``first`` to ``last``, then ``None``, which drains the decoder."""
        number = first
        for number, packet in enumerate(self._packets_from(first), first):
            yield packet
            if number == last:
                break
        self._ended = last is not None and number < last
        yield None

    def _missing(self, frame: int) -> DecodeError:
        index, metadata = self._index, self._metadata
        time = float(ticks_to_seconds(int(index.pts[frame]), self._codec.time_base, metadata.zero))
        found = "the data ends before it" if self._ended else "the decoder gives no such frame"
        return DecodeError(
            f"frame {frame} of {len(index)}, at {time:.3f} s, is missing: "
            f"{metadata.incomplete or found}",
            source=metadata.source,
            pts_seconds=time,
            packet_index=int(index.packets[frame]),
        )

    def frames(self, numbers: list[int], desc: Desc) -> VideoFrames:
        """Decode frames by number, in any order, and filter them.

        Raises:
            DecodeError: The data is damaged, or a frame of the index is missing.
            FilterError: The filters do not take the frames, or do not output one for each.
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

    def filter(self, desc: Desc) -> PictureFilter:
        """Return the filter of a description, kept from an earlier call if it can be reused.

        Raises:
            FilterError: FFmpeg does not take the description.
            ValueError: The description selects frames by time or number.
        """
        ops = None if desc is None else picture_ops(desc)
        if ops is not None and (ops.window or ops.num_frames or ops.frame_rate):
            raise ValueError(
                "a filter_desc with frame_rate=, timestamp= or num_frames= chooses frames itself, so it "
                "cannot be used for frames by index. Leave these out"
            )
        if ops is None or not ops.gives_one or ops.uncut is not ops:
            return PictureFilter(self._codec, desc, self._config)
        return self._kept_filter(ops)


class Route(Generic[P]):
    """Filters frames and passes each result on with the place that was given for its input.

    Args:
        filter: Outputs one frame for each input, maybe delayed.
        put: Called with the place and the filtered frame.
        source: Name of the source, for messages.
    """

    def __init__(
        self, filter: PictureFilter, put: Callable[[P, av.VideoFrame], object], source: str
    ) -> None:
        self.filter = filter
        self._put, self._source = put, source
        self._waiting: deque[P] = deque()

    def push(self, frame: av.VideoFrame, orientation: int, place: P) -> None:
        """Filter a frame. Takes ownership of it.

        Raises:
            FilterError: The filter does not take the frame, or outputs more than one.
        """
        self._waiting.append(place)
        self._take(self.filter.push(frame, orientation))

    def finish(self) -> None:
        """Take the frames that the filter holds back. No frame can be pushed afterwards.

        Raises:
            FilterError: The filter has dropped frames.
        """
        if self._waiting:
            self._take(self.filter.flush())
        if self._waiting:
            raise self._count_error("fewer")

    def _take(self, frames: Iterable[Any]) -> None:
        for frame in frames:
            if not self._waiting:
                raise self._count_error("more")
            self._put(self._waiting.popleft(), frame)

    def _count_error(self, how: str) -> FilterError:
        return FilterError(
            f"the filters output {how} frames than they take, so frames by index would be wrong. Use filters "
            "that output one frame for each",
            source=self._source,
        )
