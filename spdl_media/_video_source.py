"""An opened video stream with the index of its frames, which gives packets from any key frame on."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket
from spdl_media._frame_index import HEADER, FrameIndex, Identity, load, make_index
from spdl_media._packet_table import NO_TIME, mp4_table, read_table
from spdl_media._window import UNSURE_SEEKS, with_x264_build
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.errors import DecodeError, DemuxError
from spdl_media.inputs import Source, open_input
from spdl_media.packets import PacketMetadata, known_damage
from spdl_media.stills import BESIDE, HEAD_SIZE, pillow_reason


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
            self._open(container, stream)
            # Kept in memory, because the source may have changed until the index is saved.
            head = zlib.crc32(self._input.read_at(0, HEADER))
            self.identity = Identity(self._input.size(), head, self._stream)
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
        name, is_seekable = self._input.name, self._input.seekable
        if not is_seekable:
            raise DemuxError(
                "the source cannot seek, and frames are asked for in any order. Read it into bytes, or "
                "write it to a file first",
                source=name,
            )
        reason = pillow_reason(self._input.head(HEAD_SIZE))
        if reason is not None and not reason.endswith(BESIDE):
            raise DemuxError(
                "this is an animated image, whose frames have no index. load_video loads them",
                source=name,
            )

    def _open(self, container: Container, stream: int | None) -> None:
        self._stream, codec = container.video(stream)
        orientation = container.orientation(self._stream)
        with container.reading():
            self.codec = with_x264_build(container, self._stream, codec, 0)
        self.metadata = PacketMetadata(container.name, container.zero, orientation=orientation)

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
            stream, checks = container.av.streams[self._stream], self._config.on_corrupt == "raise"
            if checks and not len(table) and (stream.duration or stream.frames):
                raise DecodeError(
                    "there is no frame in the file, and its header states some. "
                    "decode_config(on_corrupt='keep') opens it as a video of none",
                    source=container.name,
                )
            if checks and missing is not None:
                text = known_damage(PacketMetadata(incomplete=missing), codec)
                raise DecodeError(
                    f"{text}. decode_config(on_corrupt='keep') opens what is there",
                    source=container.name,
                )
            return make_index(table, codec, self.metadata, self._config, container.format, restart)

    def packets_from(self, number: int) -> Iterator[AvPacket]:
        """The packets of the stream from the one with a number on, a key frame or the first."""
        container, index = self.opened(), self.index
        # Where packets are frames, nothing of them had to be put right when the index was made.
        mend = not index.is_exact
        packets = None
        if not index.is_counted and container.format not in UNSURE_SEEKS:
            packets = self._sought(container, int(np.searchsorted(index.keys, number)), mend=mend)
        if packets is None:
            container.rewind()
            found = container.packets([self._stream], keep=False, mend=mend)
            packets = islice(found, number, None)
        keeps = self._config.on_corrupt == "keep" or container.format.startswith("mpeg")
        for packet in packets:
            # It has fewer bytes than its header states: the file ends inside of it.
            if packet.is_corrupt and not keeps:
                return
            yield packet

    def _sought(self, container: Container, key: int, *, mend: bool) -> Iterator[AvPacket] | None:
        """The packets from a key frame on; ``None``: it cannot be found by seeking."""
        index = self.index
        pts, dts = int(index.key_pts[key]), int(index.key_dts[key])
        # MP4 is sought by times of decoding, of which the next key frame's may be before this one is shown.
        later = int(index.key_dts[key + 1]) if key + 1 < len(index.keys) else NO_TIME
        target = pts if later == NO_TIME else min(pts, later - 1)
        first, back = int(index.key_pts[0]), 0
        second = round(1 / self.codec.time_base)
        while container.seek(target - back, self._stream):
            packets = container.packets([self._stream], keep=False, mend=mend)
            for packet in packets:
                if packet.pts == pts and (dts == NO_TIME or packet.dts in (None, dts)):
                    return chain([packet], packets)
                if packet.dts is not None and dts != NO_TIME and packet.dts > dts:
                    break
            if target - back < first:
                break
            # MPEG-TS lands late, and between key frames.
            back = back * 2 or second
        return None
