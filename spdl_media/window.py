"""Find the packets for a window of time: where to start reading, and where to stop.

Decoding trims to the window exactly. The packets found here contain it: for video from a key frame at or
before its start, for audio from half a second before its start, until no later packet can belong to it.
Times are integer timestamps of the streams, which are fast to compare.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

from spdl_media._container import Begins, Container
from spdl_media._ffmpeg import AvPacket
from spdl_media.audio_clock import AUDIO_PREROLL, preroll, tells_each_sample, tells_sample
from spdl_media.codec import AudioCodec, Codec, VideoCodec, needs_first_packet
from spdl_media.coded_headers import may_have_fields
from spdl_media.coded_units import is_gradual
from spdl_media.packets import AudioPackets, ImagePackets, PacketMetadata, VideoPackets, make_packet
from spdl_media.timing import WHOLE, Window, tick_at

P = TypeVar("P", VideoPackets, ImagePackets)

# Codecs whose decoders, started in mid-stream, soon give the same samples as from the start. Others are read
# from the start: ADPCM, WMA and speech codecs have predictors, and seeks in ADPCM WAV are off by two blocks.
_INDEPENDENT = frozenset("aac ac3 alac dts eac3 flac mp1 mp2 mp3 opus tta vorbis wavpack".split())

# No codec in use shows a frame more than 16 frames later than it is coded (H.264 and HEVC: 16).
_MAX_REORDER = 16
_MOST_WITHOUT_KEY = 1 << 25  # bytes of a part without a key frame


class _VideoRun:
    """Collects the packets of a video stream until those of a window are complete.

    Make it in a block of ``container.reading()``.

    Attributes:
        index: Index of the stream.
        codec: Its codec.
        start: Timestamp at or before which decoding has to begin; ``None``: at the start of the file.
        complete: No later packet can belong to the window.
        goes_on: Frames follow after the window.
    """

    complete = goes_on = False

    def __init__(self, container: Container, stream_index: int | None, window: Window) -> None:
        self.index, codec = container.video(stream_index)
        self.start = _video_start(container, codec, window)
        self.codec = with_x264_build(container, self.index, codec, self.start)
        self._first, self._stop = window.ticks(self.codec.time_base, container.zero)
        self._kept: list[AvPacket] = []
        self._splits = may_have_fields(self.codec)
        self._depth = self.codec.reorder_depth * (2 if self._splits else 1)
        self._inside = self._late = 0
        self._has_key = False

    def begins(self, packet: AvPacket) -> bool | None:
        """Whether decoding may begin at a packet; ``None``: not at this one, but perhaps at a later one."""
        return self._restarts(packet) if packet.is_keyframe else None

    def _restarts(self, packet: AvPacket) -> bool:
        # From a hidden key frame, an edit list may go back in time, so frames before it may be in the window.
        is_key = packet.is_keyframe and not packet.is_discard and _at_or_before(packet, self.start)
        # Frames after the first one of a gradual refresh may refer to frames before it.
        return is_key and not is_gradual(packet, self.codec)

    def add(self, packet: AvPacket) -> bool:
        """Add the next packet of the stream. Return whether no later packet can belong to the window."""
        pts, dts = packet.pts, packet.dts
        if self._restarts(packet):
            self._kept.clear()
        # If the two timestamps of a key frame differ, decode timestamps are shifted so that no frame is shown
        # before its own. In Matroska, the decode timestamps of fields are wrong.
        if packet.is_keyframe and pts != dts and not self._splits:
            self._depth = 0
        self._kept.append(packet)
        # After hidden packets, an edit list may go back in time, so they do not tell the end.
        if packet.is_discard:
            return False
        time = dts if pts is None else pts
        if time is None or time < self._stop:
            self._inside, self._late = len(self._kept), 0
            return False
        self._late += 1
        self.goes_on = True
        # Decode timestamps only increase.
        decoded_late = pts is not None and dts is not None and dts >= self._stop
        self.complete = self._late > (self._depth if decoded_late else _MAX_REORDER)
        # A second field may be a later packet. Without a pts, the frame may be shown before its position.
        if (self._splits and self._late == 1) or (pts is None and not self.complete):
            self._inside = len(self._kept)
        return self.complete

    def fill(self, packets: Iterator[AvPacket], nbytes: float, count: float) -> bool:
        """Add packets until a part is full.

        Args:
            packets: The packets of the stream.
            nbytes: Approximate size of a full part in bytes.
            count: Packets of the window in a full part.

        Returns:
            Whether the window needs no later packet.
        """
        left = nbytes
        for packet in packets:
            count -= packet.pts is None or packet.pts >= self._first
            self._has_key |= packet.is_keyframe
            if self.add(packet):
                return True
            left = (left if len(self._kept) > 1 else nbytes) - packet.size
            # A first part without a key frame would be decoded as a stream of intra refresh.
            is_full = self._has_key and min(left, count) <= 0
            if self._inside and (is_full or left < -_MOST_WITHOUT_KEY):
                return False
        return True

    def take(self) -> list[AvPacket]:
        """Remove and return the packets that the window needs."""
        taken, self._kept = self._kept[: self._inside], self._kept[self._inside :]
        self._inside = 0
        return taken


def read_video(
    container: Container,
    stream_index: int | None,
    window: Window,
    nbytes: float = math.inf,
    num_frames: int | None = None,
) -> Iterator[VideoPackets]:
    """Read the packets that decode to every frame of the window, in decoding order, from a key frame on.

    Args:
        container: The open container.
        stream_index: Index of the stream; ``None``: the best one.
        window: The requested window.
        nbytes: Approximate size in bytes of the packets in a part.
        num_frames: Number of frames wanted; ``None``: all. The first part has as many packets as most videos
            need for them, and each further part twice as many as the previous one.

    Yields:
        The packets in parts, which are read lazily; at least one part. If ``nbytes`` is given, the packets
        are valid only while the container is open.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: There is no such stream, or the container is damaged.
    """
    if stream_index is None and (found := container.for_pillow()):  # Pillow does not know streams
        yield pillow_packets(VideoPackets, *found, window)
        return
    with container.reading():
        run = _VideoRun(container, stream_index, window)
        keep = nbytes == math.inf
        packets, _ = container.packets_from(run.start, {run.index: run.begins}, keep=keep)
    count = math.inf if num_frames is None else num_frames + run.codec.reorder_depth + 1
    is_last = continues = False
    while not is_last:
        with container.reading():
            is_last = run.fill(packets, nbytes, count)
        count *= 2
        more = {"continues": continues, "goes_on": run.goes_on or not is_last}
        yield our_packets(container, run.index, run.codec, run.take(), window, **more)
        continues = True


def read_audio(container: Container, stream_index: int | None, window: Window) -> AudioPackets:
    """Read the packets that decode to every sample of the window, with the preroll that decoders need.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: There is no such stream, or the container is damaged.
    """
    with container.reading():
        index, codec, packets = audio_packets(container, stream_index, window)
        kept = list(packets)
    result: AudioPackets = our_packets(container, index, codec, kept, window)
    return result


def audio_packets(
    container: Container, stream_index: int | None, window: Window, *, keep: bool = True
) -> tuple[int, AudioCodec, Iterator[AvPacket]]:
    """Return index and codec of an audio stream, and an iterator over the packets of :func:`read_audio`.

    Args:
        container: The open container.
        stream_index: Index of the stream; ``None``: the best one.
        window: The requested window.
        keep: Whether packets must stay valid after the container is closed.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: There is no such stream.
    """
    run = _AudioRun(container, stream_index, window)
    tests: dict[int, Begins] = {run.index: run.begins}
    packets, run.is_sought = container.packets_from(run.start, tests, keep=keep)
    return run.index, run.codec, packets if run.is_whole else run.of(packets)


class _AudioRun:
    """Collects the packets of an audio stream that a window needs, as :class:`_VideoRun` does.

    Attributes:
        is_sought: The packets come from a seek, not from the start of the file.
    """

    is_sought = complete = False

    def __init__(self, container: Container, stream_index: int | None, window: Window) -> None:
        self.index, self.codec = container.audio(stream_index)
        base, zero = self.codec.time_base, container.zero
        self._kept: list[AvPacket] = []
        times, lead_in = container.exact_times(self.index), preroll(self.codec)
        # FFmpeg counts the frames of MP3 files itself.
        is_exact = container.format == "mp3" or times is not None
        self._is_exact = is_exact or tells_each_sample(self.codec)
        self.start: int | None = None
        may_seek = _seeks_right(container, self.codec) and not (times and times.only_from_start)
        if may_seek and window.start is not None and window.start > lead_in:
            self.start = tick_at(window.start - lead_in, base, zero)
        # Of packets from a seek, times are exact but for rounding. From the start of the file, they may drift
        # from the count of samples.
        self._stops = window.ticks(base, zero + AUDIO_PREROLL)[1], window.ticks(base, zero)[1] + 2

    @property
    def is_whole(self) -> bool:
        """Whether all packets are needed."""
        return not self.is_sought and self._stops[0] == math.inf

    def begins(self, packet: AvPacket) -> bool:
        # The timestamp must identify a sample.
        return _at_or_before(packet, self.start) and (
            self._is_exact or tells_sample(self.codec, packet.pts or 0, packet.duration or 0)
        )

    def add(self, packet: AvPacket) -> bool:
        # Seeks end at the start of an Ogg page or a Matroska cluster, a second or more too early. At the
        # stream's stated start, packets before it may still be needed to decode it.
        if self.is_sought and packet.pts != self.codec.start_pts and self.begins(packet):
            self._kept.clear()
        self._kept.append(packet)
        # Include one shown packet after the end, which tells whether something before it is missing.
        is_late = packet.pts is not None and packet.pts >= self._stops[self.is_sought]
        self.complete = is_late and not packet.is_discard
        return self.complete

    def take(self) -> list[AvPacket]:
        taken, self._kept = self._kept, []
        return taken

    def of(self, packets: Iterator[AvPacket]) -> Iterator[AvPacket]:
        """Yield the packets that the window needs, as early as possible."""
        for packet in packets:
            is_last = self.add(packet)
            # Packets before the start wait, because decoding may begin at a later one.
            if not (self.is_sought and _at_or_before(packet, self.start)):
                yield from self.take()
            if is_last:
                return
        yield from self.take()


def _seeks_right(container: Container, codec: AudioCodec) -> bool:
    """Whether FFmpeg seeks to packets of the right times, and decoders need only some before a window."""
    if codec.name.startswith("pcm_"):
        # FFmpeg seeks in WAV by the bytes per second stated in the header, which may be wrong.
        true = 8 * codec.block_align * codec.sample_rate
        return not (codec.bit_rate and true and codec.bit_rate != true)
    # In Ogg, FLAC packets of the last page have wrong timestamps after a seek.
    return codec.name in _INDEPENDENT and (container.format, codec.name) != ("ogg", "flac")


def read_clip(
    container: Container,
    window: Window,
    of_audio: Window,
    streams: tuple[int | None, int | None] = (None, None),
) -> tuple[VideoPackets, AudioPackets]:
    """Read the packets of :func:`read_video` and :func:`read_audio` in one pass over both streams.

    Args:
        container: The open container.
        window: Window of the video.
        of_audio: Window of the audio, with the same start.
        streams: Indices of the video stream and the audio stream; ``None``: the best one.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: One of the streams is missing, or the container is damaged.
    """
    with container.reading():
        video = _VideoRun(container, streams[0], window)
        audio = _AudioRun(container, streams[1], of_audio)
        # Seeks use the video stream, at the time where the audio begins.
        place = None
        if video.start is not None and audio.start is not None:
            place = math.floor(audio.start * audio.codec.time_base / video.codec.time_base)
        tests: dict[int, Begins] = {video.index: video.begins, audio.index: audio.begins}
        packets, audio.is_sought = container.packets_from(place, tests)
        for packet in packets:
            run: _VideoRun | _AudioRun = video if packet.stream_index == video.index else audio
            if not run.complete and run.add(packet) and video.complete and audio.complete:
                break
    return (
        our_packets(
            container, video.index, video.codec, video.take(), window, goes_on=video.goes_on
        ),
        our_packets(container, audio.index, audio.codec, audio.take(), of_audio),
    )


def our_packets(
    container: Container,
    index: int,
    codec: Codec,
    packets: list[AvPacket],
    window: Window = WHOLE,
    *,
    continues: bool = False,
    goes_on: bool = False,
) -> Any:
    """Wrap FFmpeg's packets of a stream in :class:`VideoPackets` or :class:`AudioPackets`.

    Raises:
        SourceError: The end of the source cannot be read.
        DemuxError: The source is an image, and FFmpeg returns no packets.
    """
    is_video = isinstance(codec, VideoCodec)
    turn = container.orientation(index, packets) if is_video else 1
    missing, zero = container.missing_end(index), container.zero
    metadata = PacketMetadata(
        container.name, zero, window, turn, continues=continues, goes_on=goes_on, incomplete=missing
    )
    return (VideoPackets if is_video else AudioPackets)(packets, codec, metadata)  # type: ignore[arg-type]


def _at_or_before(packet: AvPacket, pts: int | None) -> bool:
    return pts is not None and packet.pts is not None and packet.pts <= pts


def _video_start(container: Container, codec: VideoCodec, window: Window) -> int | None:
    """Return the timestamp at or before which a key frame is needed; ``None``: read from the file's start."""
    # In ASF, FFmpeg derives other times after a seek than from the start.
    is_known = (container.format, codec.name) != ("asf", "h264")
    if not is_known or needs_first_packet(codec) or window.start is None or window.start <= 0:
        return None
    return tick_at(window.start, codec.time_base, container.zero)


_X264 = re.compile(rb"x264 - core (\d+)")


def with_x264_build(
    container: Container, index: int, codec: VideoCodec, start: int | None
) -> VideoCodec:
    """Add the build number of x264 to the codec, because 4:4:4 of builds before 151 is coded differently.

    Only the first packet of the stream states it, so it is read if a window starts later.

    Raises:
        SourceError: The source cannot be read.
    """
    if start is None or codec.name != "h264" or "444" not in (codec.pix_fmt or ""):
        return codec
    if not container.seek(tick_at(Fraction(0), codec.time_base, container.zero), index):
        return codec  # not seekable, so it is read from its start
    first = next(container.packets([index]), None)
    found = None if first is None else _X264.search(bytes(first))
    return codec if found is None else replace(codec, x264_build=int(found[1]))


PILLOW_TIME_BASE = Fraction(1, 1000)
"""Time base of Pillow's frames: animations state milliseconds."""

_PILLOW_CODEC = VideoCodec("pillow", "pillow", time_base=PILLOW_TIME_BASE)


def pillow_packets(
    kind: type[P], data: bytes | memoryview, source: str, reason: str, window: Window = WHOLE
) -> P:
    """Make one packet of a whole file, which Pillow decodes.

    Animations need it, because FFmpeg loses frames of PNG, and before version 8.1 returns none of WebP.
    """
    metadata = PacketMetadata(source, window=window, pillow=reason)
    return kind([make_packet(data, PILLOW_TIME_BASE)], _PILLOW_CODEC, metadata)
