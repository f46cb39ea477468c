"""Demux many windows, streams and chunks of one opened source."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias, overload

from av.stream import Disposition

from spdl_media._checks import check_int
from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket, as_fraction
from spdl_media._threads import ClosedByWith, OneThread
from spdl_media.codec import AudioCodec, Codec, VideoCodec
from spdl_media.config import DemuxConfig
from spdl_media.inputs import Source, open_input
from spdl_media.packets import AudioPackets, ImagePackets, PacketMetadata, Packets, VideoPackets
from spdl_media.timing import Timestamp, Window, parse_duration, parse_window
from spdl_media.window import our_packets, read_audio, read_clip, read_video

__all__ = ("Demuxer",)

Duration: TypeAlias = float | Fraction | Decimal | None
_Chunk: TypeAlias = dict[int, list[AvPacket]]

# Maximum interleaving distance of streams in a file, in seconds. A stream without a packet for longer is
# assumed to have ended or paused, so that chunks stay bounded.
_MAX_INTERLEAVE = Fraction(10)


class Demuxer(ClosedByWith):
    """Reads many windows, streams and chunks of one opened source.

    Use it as a context manager, or call :meth:`close`. Packets stay usable after that.

    Args:
        src: As for :func:`demux_image`. A file-like object that cannot seek can be read only once.
        demux_config: Options of opening the source.
        name: Name of the source in messages.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not a media file.

    Thread safety: one thread at a time; a second one gets a RuntimeError.
    """

    def __init__(
        self, src: Source, *, demux_config: DemuxConfig | None = None, name: str | None = None
    ) -> None:
        self._guard = OneThread("Demuxer")
        self._input = open_input(src, demux_config, name=name)
        try:
            self._container: Container | None = Container(self._input)
        except BaseException:
            # Do not keep the file open if it is not media.
            self._input.close()
            raise

    def close(self) -> None:
        """Close the source. A file-like object of the caller stays open, at its original position.

        Raises:
            RuntimeError: Another thread is using the Demuxer.
        """
        with self._guard:
            if self._container is not None:
                self._container.close()
                self._container = None
            self._input.close()

    def __repr__(self) -> str:
        return f"<Demuxer: {self._input.name}{', closed' if self._container is None else ''}>"

    @contextmanager
    def _opened(self) -> Iterator[Container]:
        """Return the open container, for one thread at a time."""
        with self._guard:
            if self._container is None:
                raise ValueError(f"{self._input.name}: this Demuxer is closed")
            self._input.check()  # after a failed read, FFmpeg states the end of the file
            yield self._container

    @property
    def video_stream_index(self) -> int | None:
        """Index of the best video stream, or ``None``.

        Raises:
            ValueError: The Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        with self._opened() as container:
            return container.best_index("video")

    @property
    def audio_stream_index(self) -> int | None:
        """Index of the best audio stream, or ``None``.

        Raises:
            ValueError: The Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        with self._opened() as container:
            return container.best_index("audio")

    def codec(self, stream_index: int) -> Codec:
        """Return the parameters of the video or audio stream with this index.

        Raises:
            DemuxError: There is no such stream.
            ValueError: The Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        with self._opened() as container:
            return container.codec(stream_index)

    @property
    def duration(self) -> float | None:
        """Duration in seconds that the container's header states, or ``None``.

        Raises:
            ValueError: The Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        with self._opened() as container:
            return container.duration

    @property
    def video_codec(self) -> VideoCodec:
        """Parameters of the best video stream.

        Raises:
            DemuxError: There is none.
            ValueError: The Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        with self._opened() as container:
            return container.video()[1]

    @property
    def audio_codec(self) -> AudioCodec:
        """Parameters of the best audio stream.

        Raises:
            DemuxError: There is none.
            ValueError: The Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        with self._opened() as container:
            return container.audio()[1]

    def demux_video(
        self, timestamp: Timestamp | Window | None = None, *, stream_index: int | None = None
    ) -> VideoPackets:
        """Read the packets of a video stream; see :func:`demux_video`.

        Raises:
            SourceError: The source cannot be read.
            DemuxError: There is no such stream, or the container is damaged.
            ValueError: The window is empty, or the Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        window = parse_window(timestamp)
        with self._opened() as container:
            return next(read_video(container, stream_index, window))

    def demux_clip(
        self,
        timestamp: Timestamp | Window | None = None,
        *,
        audio_timestamp: Timestamp | Window | None = None,
        video_stream_index: int | None = None,
        audio_stream_index: int | None = None,
    ) -> tuple[VideoPackets, AudioPackets]:
        """Read the packets of a video and an audio stream for one window, in one pass over the file.

        The defaults are the streams that FFmpeg finds best. ``audio_timestamp`` is another window for the
        audio, with the same start. The result is that of separate reads.

        Raises:
            SourceError: The source cannot be read.
            DemuxError: There is no such stream, or the container is damaged.
            ValueError: The window is empty, the windows differ in their start, or the Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        window, of_audio = parse_window(timestamp), parse_window(audio_timestamp)
        if audio_timestamp is not None and of_audio.start != window.start:
            raise ValueError(
                f"timestamp and audio_timestamp begin at one time, not as {window} and {of_audio}"
            )
        with self._opened() as container:
            indices = video_stream_index, audio_stream_index
            return read_clip(container, window, of_audio or window, indices)

    def demux_audio(
        self, timestamp: Timestamp | Window | None = None, *, stream_index: int | None = None
    ) -> AudioPackets:
        """Read the packets of an audio stream; see :func:`demux_audio`.

        Raises:
            SourceError: The source cannot be read.
            DemuxError: There is no such stream, or the container is damaged.
            ValueError: The window is empty, or the Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        window = parse_window(timestamp)
        with self._opened() as container:
            return read_audio(container, stream_index, window)

    def demux_image(self) -> ImagePackets:
        """Read the packet of the first image of the best video stream.

        Raises:
            SourceError: The source cannot be read.
            DemuxError: There is no video stream, or no key frame in it.
            ValueError: The Demuxer is closed.
            RuntimeError: Another thread is using the Demuxer.
        """
        with self._opened() as container:
            return first_image(container)

    @overload
    def streaming_demux(
        self,
        indices: int | None = None,
        *,
        duration: Duration = None,
        num_packets: int | None = None,
    ) -> Iterator[Packets]: ...
    @overload
    def streaming_demux(
        self, indices: Collection[int], *, duration: Duration = None, num_packets: int | None = None
    ) -> Iterator[dict[int, Packets]]: ...
    def streaming_demux(
        self,
        indices: int | Collection[int] | None = None,
        *,
        duration: Duration = None,
        num_packets: int | None = None,
    ) -> Iterator[Packets] | Iterator[dict[int, Packets]]:
        """Read streams from their start in chunks, for files that are too long for memory.

        Chunks are in decoding order. Decode them with a :class:`~spdl_media.VideoDecoder` or
        :class:`~spdl_media.AudioDecoder`, because they need not start with a key frame.

        Args:
            indices: One index, for chunks that are packets of that stream; or several, for dictionaries from
                index to packets, without streams that have none. The default is the best video stream, or
                without video the best audio stream.
            duration: Length of a chunk in seconds on the container's clock. A chunk is complete when each of
                its streams has a packet after the chunk's end, or has ended.
            num_packets: Number of packets: a chunk is complete when one of its streams has this many.

        Returns:
            An iterator over the chunks, which reads on demand. The Demuxer must stay open.

        Raises:
            ValueError: Not exactly one of ``duration`` and ``num_packets`` is given, it is not positive, or
                the Demuxer is closed.
            DemuxError: There is no such stream.
            RuntimeError: While iterating: the Demuxer was used for another read.
        """
        _check_limits(duration, num_packets)
        # A collection of indices gives dictionaries, even a collection of one.
        single = indices is None or hasattr(indices, "__index__")
        chunks = self._chunks(self._codecs(indices), duration, num_packets)
        return (next(iter(chunk.values())) for chunk in chunks) if single else chunks

    def _codecs(self, indices: int | Collection[int] | None) -> dict[int, Codec]:
        with self._opened() as container:
            if indices is None:
                video = container.best_index("video")
                return dict([container.audio() if video is None else container.video()])
            # Sorted and without duplicates.
            given = indices if isinstance(indices, Collection) else [indices]
            numbers = sorted({check_int("a stream index", i, at_least=None) for i in given})
            if not numbers:
                raise ValueError("streaming_demux needs at least one stream index")
            # Wrong indices raise in this call, not in the first step of the iteration.
            return {number: container.codec(number) for number in numbers}

    def _chunks(
        self, codecs: dict[int, Codec], duration: Duration, num_packets: int | None
    ) -> Iterator[dict[int, Packets]]:
        # Guard and log are held only while FFmpeg reads, not over a yield: the log belongs to one thread, and
        # an unfinished iteration must not lock the Demuxer.
        with self._opened() as container:
            container.rewind()
            packets, turn = container.packets([*codecs]), container.turn
        if num_packets is not None:
            chunks = _by_count(packets, num_packets)
        else:
            chunks = _by_time(packets, container, [*codecs], Fraction(str(duration)))
        begun: set[int] = set()
        while True:
            with self._opened():
                if container.turn != turn:
                    raise RuntimeError(
                        f"{container.name}: the Demuxer was used for another read while its chunks were "
                        "iterated; open a second Demuxer"
                    )
                with container.reading():
                    chunk = next(chunks, {})
                found: dict[int, Packets] = {
                    i: our_packets(container, i, codecs[i], part, continues=i in begun)
                    for i, part in chunk.items()
                }
                # Packets carry the error of a truncated file, but here are none.
                if not (found or begun) and (text := container.missing_end(min(codecs))):
                    raise container.error(f"it is cut short: {text}")
            if not found:
                return
            yield found
            begun |= chunk.keys()


def _check_limits(duration: Duration, num_packets: int | None) -> None:
    """Raise unless exactly one limit of a chunk is given, and it is positive."""
    if (duration is None) == (num_packets is None):
        raise ValueError(
            "streaming_demux takes exactly one of duration (seconds) and num_packets, got "
            f"duration={duration!r}, num_packets={num_packets!r}"
        )
    if num_packets is not None:
        check_int("num_packets", num_packets)
    elif duration is not None:
        parse_duration(duration)


def _by_count(packets: Iterator[AvPacket], num_packets: int) -> Iterator[_Chunk]:
    """Split packets into chunks of ``num_packets`` packets per stream."""
    chunk: _Chunk = {}
    for packet in packets:
        # Start a chunk only when a packet for it comes, so that the last one is never empty.
        if len(chunk.get(packet.stream_index, ())) == num_packets:
            yield chunk
            chunk = {}
        chunk.setdefault(packet.stream_index, []).append(packet)
    if chunk:
        yield chunk


def _by_time(
    packets: Iterator[AvPacket], container: Container, indices: Sequence[int], duration: Fraction
) -> Iterator[_Chunk]:
    """Split packets into chunks of ``duration`` seconds."""
    bases = {index: as_fraction(container.av.streams[index].time_base) for index in indices}
    # A common unit of time in which all times are integers, which are faster than fractions.
    units = math.lcm(*(each.denominator for each in (*bases.values(), container.zero, duration)))
    size, slack, zero = (int(each * units) for each in (duration, _MAX_INTERLEAVE, container.zero))
    steps = {index: int(base * units) for index, base in bases.items()}
    ends = dict.fromkeys(indices, 0)
    chunks: dict[int, _Chunk] = {}  # incomplete chunks by number
    current, reached = 0, dict.fromkeys(indices, 0)
    for packet in packets:
        index, ticks = packet.stream_index, packet.dts if packet.pts is None else packet.pts
        # A packet without timestamps follows the one before it. Raw streams have none at all.
        time = ends[index] if ticks is None else ticks * steps[index] - zero
        ends[index] = time + (packet.duration or 0) * steps[index]
        number = time // size
        if (time + slack) // size < current:
            # Timestamps jump back, such as in joined recordings. No packet would be after the chunk's end.
            yield from (chunks.pop(each) for each in sorted(chunks))
            current, reached = number, dict.fromkeys(indices, number)
        # Cut in decoding order: after the first packet of a stream that is after the chunk's end, all go to
        # later chunks. Otherwise frames that refer to that packet could not be decoded.
        reached[index] = max(reached[index], number)
        chunks.setdefault(reached[index], {}).setdefault(index, []).append(packet)
        while max(chunks) > current and (
            # A stream without a packet for so long has paused or ended.
            (time - slack) // size > current or min(reached.values()) > current
        ):
            if current in chunks:
                yield chunks.pop(current)
            # Not current + 1, because timestamps may jump by days.
            current = min(chunks)
    yield from (chunks[number] for number in sorted(chunks))


def has_video(demuxer: Demuxer) -> bool:
    """Whether a file has a video, and not only the cover of its audio. Used within this package.

    Raises:
        ValueError: The Demuxer is closed.
        RuntimeError: Another thread is using the Demuxer.
    """
    with demuxer._opened() as container:
        index, streams = container.best_index("video"), container.av.streams
        return index is not None and not streams[index].disposition & Disposition.attached_pic


def first_image(container: Container) -> ImagePackets:
    """Read the first key frame of the best video stream.

    Raises:
        DemuxError: The video has no key frame, or the file no image.
    """
    index, codec = container.video()
    container.rewind()
    with container.reading():
        # Packets before the first key frame cannot be decoded alone.
        packet = None
        for packet in container.packets([index]):
            if packet.is_keyframe:
                break
    if packet is None:
        raise container.error("the video stream is empty, so there is no image")
    if not packet.is_keyframe:
        raise container.error("the video stream has no key frame, so there is no first image")
    orientation = container.orientation(index, [packet])
    metadata = PacketMetadata(container.name, container.zero, orientation=orientation)
    return ImagePackets([packet], codec, metadata)
