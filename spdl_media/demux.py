"""From a source to packets: one picture, a window of a video or audio stream, or a stream in chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import TracebackType
from typing import Self, overload

from spdl_media._checks import OneThread, check_int
from spdl_media._demuxing.container import Container, Kind, as_audio, as_video
from spdl_media._demuxing.pictures import first_picture, read_image
from spdl_media._demuxing.streaming import ChunkMaker, check_limits, read_chunks
from spdl_media._demuxing.window import read_audio, read_clip, read_video
from spdl_media.codec import AudioCodec, VideoCodec, read_audio_codec, read_video_codec
from spdl_media.config import DemuxConfig, as_demux_config
from spdl_media.inputs import Source, open_input
from spdl_media.packets import (
    AudioPackets,
    ImagePackets,
    PacketMetadata,
    VideoPackets,
)
from spdl_media.timing import Timestamp, Window, parse_window

__all__ = ("Demuxer", "demux_audio", "demux_image", "demux_video")


def demux_image(
    src: Source, *, demux_config: DemuxConfig | None = None, name: str | None = None
) -> ImagePackets:
    """Read one picture.

    JPEG, PNG, WebP, BMP, TIFF, PNM, JPEG 2000 and the like are one packet as they are, and no container
    is opened; the bytes are not copied. For GIF, AVIF and videos it is the packet of the first picture.

    Args:
        src: A path, a URL for fsspec, bytes or another C-contiguous buffer, a 1-D uint8 array or CPU
            tensor, or a binary file-like object.
        demux_config: How to open it. ``format`` also takes the name of a still format, for those
            without a signature: ``demux_config(format="tga")``.
        name: What to call the source in messages.

    Returns:
        One packet. A still given as bytes, a buffer or an array is held as it is, so it must not be
        written to meanwhile.

    Raises:
        SourceError: It cannot be opened or read.
        MissingDependencyError: It is a URL, and fsspec is not installed.
        DemuxError: It is no picture.
        ValueError: ``demux_config`` has a format or an option that FFmpeg does not know.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    config = as_demux_config(demux_config)
    with open_input(src, name=name) as input:
        return read_image(input, config)


def demux_video(
    src: Source,
    *,
    timestamp: Timestamp | Window | None = None,
    stream_index: int | None = None,
    demux_config: DemuxConfig | None = None,
    name: str | None = None,
) -> VideoPackets:
    """Read the packets of a video stream, all or those that a window needs.

    Args:
        src: As for :func:`demux_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock, whose 0 is the
            container's start; ``None`` leaves a side open. Decoding gives exactly the frames with
            ``start <= t < end``.
        stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        demux_config: How to open the source.
        name: What to call the source in messages.

    Returns:
        The packets from where decoding has to begin, in decoding order. They are independent of the
        source.

    Raises:
        SourceError: It cannot be opened or read.
        MissingDependencyError: It is a URL, and fsspec is not installed.
        DemuxError: It is no media, or has no such stream.
        ValueError: The window holds no time, or ``demux_config`` has a format or an option that FFmpeg
            does not know.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    window = parse_window(timestamp)
    with Demuxer(src, demux_config=demux_config, name=name) as demuxer:
        return demuxer.demux_video(window, stream_index=stream_index)


def demux_audio(
    src: Source,
    *,
    timestamp: Timestamp | Window | None = None,
    stream_index: int | None = None,
    demux_config: DemuxConfig | None = None,
    name: str | None = None,
) -> AudioPackets:
    """Read the packets of an audio stream, all or those that a window needs.

    Args:
        src: As for :func:`demux_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock. Decoding gives
            exactly the samples ``ceil(start * rate)`` up to ``ceil(end * rate)``.
        stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        demux_config: How to open the source.
        name: What to call the source in messages.

    Returns:
        The packets from where decoding has to begin, in decoding order. They are independent of the
        source.

    Raises:
        SourceError: It cannot be opened or read.
        MissingDependencyError: It is a URL, and fsspec is not installed.
        DemuxError: It is no media, or has no such stream.
        ValueError: The window holds no time, or ``demux_config`` has a format or an option that FFmpeg
            does not know.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    window = parse_window(timestamp)
    with Demuxer(src, demux_config=demux_config, name=name) as demuxer:
        return demuxer.demux_audio(window, stream_index=stream_index)


class Demuxer:
    """One opened source that serves many windows, streams and chunks.

    Use it as a context manager, or call :meth:`close`. Packets outlive it.

    Args:
        src: As for :func:`demux_image`. A file-like object that cannot seek serves one read.
        demux_config: How to open the source.
        name: What to call the source in messages.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media.

    Thread safety: one thread at a time; a second one gets a RuntimeError.
    """

    def __init__(
        self, src: Source, *, demux_config: DemuxConfig | None = None, name: str | None = None
    ) -> None:
        self._guard = OneThread("Demuxer")
        self._input = open_input(src, name=name)
        self._container: Container | None = None
        try:
            self._container = Container(self._input, as_demux_config(demux_config))
        finally:
            if self._container is None:
                self._input.close()

    def close(self) -> None:
        """Close what was opened. A file-like object of the caller's is left open, where it was found."""
        with self._guard:
            if self._container is not None:
                self._container.close()
                self._container = None
            self._input.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Demuxer: {self._input.name}{', closed' if self._container is None else ''}>"

    def _opened(self) -> Container:
        if self._container is None:
            raise ValueError(f"{self._input.name}: this Demuxer is closed")
        return self._container

    def has_video(self) -> bool:
        """Whether there is a video stream."""
        return self.video_stream_index is not None

    def has_audio(self) -> bool:
        """Whether there is an audio stream."""
        return self.audio_stream_index is not None

    @property
    def video_stream_index(self) -> int | None:
        """Index of the best video stream; ``None``: there is none."""
        return self._best_index("video")

    @property
    def audio_stream_index(self) -> int | None:
        """Index of the best audio stream; ``None``: there is none."""
        return self._best_index("audio")

    def _best_index(self, kind: Kind) -> int | None:
        with self._guard:
            stream = self._opened().av.streams.best(kind)
            return None if stream is None else stream.index

    @property
    def video_codec(self) -> VideoCodec:
        """Parameters of the best video stream.

        Raises:
            DemuxError: There is none.
        """
        with self._guard:
            return read_video_codec(as_video(self._opened().stream("video", None)))

    @property
    def audio_codec(self) -> AudioCodec:
        """Parameters of the best audio stream.

        Raises:
            DemuxError: There is none.
        """
        with self._guard:
            return read_audio_codec(as_audio(self._opened().stream("audio", None)))

    def demux_video(
        self,
        timestamp: Timestamp | Window | None = None,
        *,
        stream_index: int | None = None,
    ) -> VideoPackets:
        """Read the packets of a video stream; see :func:`demux_video`."""
        window = parse_window(timestamp)
        with self._guard:
            container = self._opened()
            stream = as_video(container.stream("video", stream_index))
            # Reading may open the source again, and the stream is gone then: take its facts first.
            index, codec = stream.index, read_video_codec(stream)
            packets = read_video(container, index, codec.time_base, window)
            orientation = container.orientation(index, packets)
            incomplete = container.missing_end(packets)
            facts = PacketMetadata(
                container.name, container.zero, window, orientation, incomplete=incomplete
            )
            return VideoPackets(packets, codec, facts)

    def demux_clip(
        self, timestamp: Timestamp | Window | None = None
    ) -> tuple[VideoPackets, AudioPackets]:
        """Read the packets of the best video and the best audio stream for one window, in one pass.

        The file is sought once and read once, in its own order. What the packets decode to is what those
        of :meth:`demux_video` and :meth:`demux_audio` do.

        Raises:
            DemuxError: One of the two is missing.
            ValueError: The window holds no time.
        """
        window = parse_window(timestamp)
        with self._guard:
            container = self._opened()
            pictures = as_video(container.stream("video", None))
            sound = as_audio(container.stream("audio", None))
            # Reading may open the source again, and the streams are gone then: take their facts first.
            indices = pictures.index, sound.index
            codecs = read_video_codec(pictures), read_audio_codec(sound)
            packets = read_clip(container, indices, codecs, window)
            orientation = container.orientation(indices[0], packets[0])
            facts = [
                PacketMetadata(
                    container.name, container.zero, window, incomplete=container.missing_end(run)
                )
                for run in packets
            ]
            return (
                VideoPackets(packets[0], codecs[0], replace(facts[0], orientation=orientation)),
                AudioPackets(packets[1], codecs[1], facts[1]),
            )

    def demux_audio(
        self,
        timestamp: Timestamp | Window | None = None,
        *,
        stream_index: int | None = None,
    ) -> AudioPackets:
        """Read the packets of an audio stream; see :func:`demux_audio`."""
        window = parse_window(timestamp)
        with self._guard:
            container = self._opened()
            stream = as_audio(container.stream("audio", stream_index))
            index, codec = stream.index, read_audio_codec(stream)
            packets = read_audio(container, index, codec, window)
            incomplete = container.missing_end(packets)
            facts = PacketMetadata(container.name, container.zero, window, incomplete=incomplete)
            return AudioPackets(packets, codec, facts)

    def demux_image(self) -> ImagePackets:
        """Read the packet of the first picture of the best video stream."""
        with self._guard:
            container = self._opened()
            return first_picture(container)

    @overload
    def streaming_demux(
        self,
        indices: int | None = None,
        *,
        duration: float | Fraction | Decimal | None = None,
        num_packets: int | None = None,
    ) -> Iterator[AudioPackets | VideoPackets]: ...
    @overload
    def streaming_demux(
        self,
        indices: Collection[int],
        *,
        duration: float | Fraction | Decimal | None = None,
        num_packets: int | None = None,
    ) -> Iterator[dict[int, AudioPackets | VideoPackets]]: ...
    def streaming_demux(
        self,
        indices: int | Collection[int] | None = None,
        *,
        duration: float | Fraction | Decimal | None = None,
        num_packets: int | None = None,
    ) -> Iterator[AudioPackets | VideoPackets] | Iterator[dict[int, AudioPackets | VideoPackets]]:
        """Read streams from their start in bounded chunks, for files too long to hold.

        Chunks follow each other in decoding order. One that does not start with a key frame cannot be
        decoded alone: give the chunks of a stream to a :class:`~spdl_media.VideoDecoder` or
        :class:`~spdl_media.AudioDecoder`.

        Args:
            indices: A stream's index for packets of that stream; several for dictionaries of index to
                packets, without those that have none in a chunk. The default is the best video stream,
                or the best audio stream where there is no video.
            duration: Seconds of a chunk on the container's clock. A chunk closes when every one of its
                streams has a packet past its end, or has ended.
            num_packets: Packets of a chunk, counted for each stream. A chunk closes when one of its
                streams has that many.

        Returns:
            An iterator over the chunks. It reads as it goes, and needs the Demuxer open.

        Raises:
            ValueError: Not exactly one of ``duration`` and ``num_packets``, or one that is not positive.
            DemuxError: There is no such stream.
            RuntimeError: While iterating: the Demuxer was used for another read meanwhile.
        """
        check_limits(duration, num_packets)
        single = indices is None or hasattr(indices, "__index__")
        chunks = self._chunks(self._stream_indices(indices), duration, num_packets)
        return (next(iter(chunk.values())) for chunk in chunks) if single else chunks

    def _stream_indices(self, indices: int | Collection[int] | None) -> list[int]:
        if indices is None:
            kind: Kind = "video" if self.has_video() else "audio"
            with self._guard:
                return [self._opened().stream(kind, None).index]
        if isinstance(indices, Collection):
            numbers = sorted({_stream_index(index) for index in indices})
        else:
            numbers = [_stream_index(indices)]
        if not numbers:
            raise ValueError("streaming_demux needs at least one stream index")
        with self._guard:
            container = self._opened()
            kinds = {stream.index: stream.type for stream in container.av.streams}
            for number in numbers:
                container.stream("audio" if kinds.get(number) == "audio" else "video", number)
        return numbers

    def _chunks(
        self,
        indices: list[int],
        duration: float | Fraction | Decimal | None,
        num_packets: int | None,
    ) -> Iterator[dict[int, AudioPackets | VideoPackets]]:
        with self._guard:
            container = self._opened()
            container.rewind()
            makers = {index: ChunkMaker(container, index) for index in indices}
            chunks = read_chunks(container, indices, duration=duration, num_packets=num_packets)
            turn = container.turn
        while True:
            # The guard is held while FFmpeg reads, not while the caller works on a chunk, so that a
            # loop left half way does not lock the Demuxer.
            with self._guard:
                if self._opened() is not container or container.turn != turn:
                    raise RuntimeError(
                        f"{container.name}: the Demuxer was used for another read while its chunks were "
                        "iterated; open a second Demuxer"
                    )
                chunk = next(chunks, None)
                if chunk is None:
                    if not any(maker.continues for maker in makers.values()):
                        self._check_end(container)
                    return
                made = {index: makers[index](packets) for index, packets in chunk.items()}
            yield made

    def _check_end(self, container: Container) -> None:
        """No packet came out to carry the news that the file was cut short."""
        if text := container.missing_end(()):
            raise container.error(f"it is cut short: {text}")


def _stream_index(index: object) -> int:
    return check_int("a stream index", index, at_least=None)
