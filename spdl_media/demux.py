"""From a source to packets: one picture, a window of a video or audio stream, or a stream in chunks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import TracebackType
from typing import Self, SupportsIndex, overload

import av

from spdl_media._backends._pyav import AvPacket
from spdl_media.codec import AudioCodec, VideoCodec, read_audio_codec, read_video_codec
from spdl_media.completeness import check_complete
from spdl_media.config import DemuxConfig
from spdl_media.config import demux_config as _demux_config
from spdl_media.container import Container, Kind
from spdl_media.errors import DemuxError
from spdl_media.inputs import Input, Source, open_input
from spdl_media.one_thread import OneThread
from spdl_media.orientation import exif_orientation
from spdl_media.packets import (
    AudioPackets,
    ImagePackets,
    PacketFacts,
    VideoPackets,
    make_packet,
)
from spdl_media.stills import HEAD_SIZE, STILL_FORMATS, container_still, still_codec
from spdl_media.streaming import read_chunks
from spdl_media.timing import Timestamp, Window, parse_window
from spdl_media.window import read_audio, read_video

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

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no picture.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    config = demux_config or _demux_config()
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

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or has no such stream.
        ValueError: The window holds no time.

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

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or has no such stream.
        ValueError: The window holds no time.

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
            self._container = Container(self._input, demux_config or _demux_config())
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
            return read_video_codec(_video(self._opened().stream("video", None)))

    @property
    def audio_codec(self) -> AudioCodec:
        """Parameters of the best audio stream.

        Raises:
            DemuxError: There is none.
        """
        with self._guard:
            return read_audio_codec(_audio(self._opened().stream("audio", None)))

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
            stream = _video(container.stream("video", stream_index))
            # Reading may open the source again, and the stream is gone then: take its facts first.
            index, codec = stream.index, read_video_codec(stream)
            packets = read_video(container, index, codec.time_base, window)
            orientation = container.orientation(index, packets)
            incomplete = container.missing_end(packets)
            facts = PacketFacts(
                container.name, container.zero, window, orientation, incomplete=incomplete
            )
            return VideoPackets(packets, codec, facts)

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
            stream = _audio(container.stream("audio", stream_index))
            index, codec = stream.index, read_audio_codec(stream)
            packets = read_audio(container, index, codec, window)
            incomplete = container.missing_end(packets)
            facts = PacketFacts(container.name, container.zero, window, incomplete=incomplete)
            return AudioPackets(packets, codec, facts)

    def demux_image(self) -> ImagePackets:
        """Read the packet of the first picture of the best video stream."""
        with self._guard:
            container = self._opened()
            return _first_picture(container)

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

        Raises:
            ValueError: Not exactly one of ``duration`` and ``num_packets``, or one that is not positive.
            DemuxError: There is no such stream.
            RuntimeError: While iterating: the Demuxer was used for another read meanwhile.
        """
        _check_limits(duration, num_packets)
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
            makers = {index: _ChunkMaker(container, index) for index in indices}
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
    if isinstance(index, bool | str) or not isinstance(index, SupportsIndex):
        raise TypeError(f"a stream index must be an int, not {index!r}")
    return operator.index(index)


def _check_limits(duration: float | Fraction | Decimal | None, num_packets: int | None) -> None:
    if (duration is None) == (num_packets is None):
        raise ValueError(
            "streaming_demux takes exactly one of duration (seconds) and num_packets, got "
            f"duration={duration!r}, num_packets={num_packets!r}"
        )
    if num_packets is not None:
        if isinstance(num_packets, bool) or not isinstance(num_packets, int):
            raise TypeError(f"num_packets must be an int, not {num_packets!r}")
        if num_packets < 1:
            raise ValueError(f"num_packets must be at least 1, not {num_packets}")
    elif isinstance(duration, bool) or not isinstance(duration, int | float | Fraction | Decimal):
        raise TypeError(f"duration must be a number of seconds, not {duration!r}")
    elif not 0 < duration < float("inf"):
        raise ValueError(f"duration must be a positive number of seconds, not {duration!r}")


class _ChunkMaker:
    """Makes packets of ours from the chunks of one stream."""

    def __init__(self, container: Container, index: int) -> None:
        stream = container.av.streams[index]
        self._container = container
        self._index = index
        self._codec = (
            read_audio_codec(stream)
            if isinstance(stream, av.AudioStream)
            else read_video_codec(_video(stream))
        )
        self.continues = False

    def __call__(self, packets: list[AvPacket]) -> AudioPackets | VideoPackets:
        container = self._container
        facts = PacketFacts(
            container.name,
            container.zero,
            continues=self.continues,
            incomplete=container.missing_end(packets),
        )
        self.continues = True
        if isinstance(self._codec, AudioCodec):
            return AudioPackets(packets, self._codec, facts)
        orientation = container.orientation(self._index, packets)
        return VideoPackets(packets, self._codec, replace(facts, orientation=orientation))


def _video(stream: av.stream.Stream) -> av.VideoStream:
    assert isinstance(stream, av.VideoStream), "Container.stream compared its type"
    return stream


def _audio(stream: av.stream.Stream) -> av.AudioStream:
    assert isinstance(stream, av.AudioStream), "Container.stream compared its type"
    return stream


def _still_decoder(input: Input, config: DemuxConfig) -> str | None:
    """The decoder that takes the whole file as one packet; None: a container has to be opened."""
    if config.format is not None:
        return STILL_FORMATS.get(config.format)
    return still_codec(input.head(HEAD_SIZE))


def read_image(input: Input, config: DemuxConfig) -> ImagePackets:
    """Read one picture from an opened input."""
    decoder = _still_decoder(input, config)
    if decoder is not None:
        return _demux_still(input, decoder)
    kind = container_still(input.head(HEAD_SIZE)) if config.format is None else None
    if kind is not None and not input.seekable:
        # It is read twice, by FFmpeg and for what FFmpeg does not tell.
        with open_input(input.read_all(), name=input.name) as whole:
            return read_image(whole, config)
    container = Container(input, config)
    try:
        decoder = container.named_still()
        packets = _first_picture(container) if decoder is None else None
    finally:
        container.close()
    if packets is None:
        return _demux_still(input, decoder or "")
    if kind is None:
        return packets
    data = input.read_all()
    return packets.with_facts(
        orientation=exif_orientation(data), incomplete=check_complete(kind, data)
    )


def is_still(input: Input, config: DemuxConfig) -> bool:
    """Whether the source is one picture, coded as one packet or in a container of stills."""
    if _still_decoder(input, config) is not None:
        return True
    head = input.head(HEAD_SIZE)
    return config.format is None and container_still(head) == "avif" and head[8:12] != b"avis"


def _demux_still(input: Input, decoder: str) -> ImagePackets:
    data = input.read_all()
    if not len(data):
        raise DemuxError("is empty (0 bytes)", source=input.name)
    codec = VideoCodec(av.Codec(decoder, "r").canonical_name, decoder)
    facts = PacketFacts(
        input.name,
        orientation=exif_orientation(data),
        incomplete=check_complete(decoder, data),
    )
    return ImagePackets([make_packet(data, codec.time_base)], codec, facts)


def _first_picture(container: Container) -> ImagePackets:
    stream = _video(container.stream("video", None))
    index, codec = stream.index, read_video_codec(stream)
    container.rewind()
    for packet in container.packets([index]):
        if packet.is_keyframe:
            orientation = container.orientation(index, [packet])
            facts = PacketFacts(container.name, container.zero, orientation=orientation)
            return ImagePackets([packet], codec, facts)
    raise container.error("the video stream has no key frame, so there is no first picture")
