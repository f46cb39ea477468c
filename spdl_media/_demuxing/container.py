"""An open container: its streams, its clock, seeking, and its packets cut loose from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Literal, TypeAlias

import av
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer
from av.stream import Discard, Disposition

from spdl_media._checks import check_int
from spdl_media._demuxing.matrices import decoded_matrix, muxed_matrix
from spdl_media._ffmpeg import AvPacket, as_fraction, ffmpeg_errors, says_checksum_failed
from spdl_media.config import DemuxConfig
from spdl_media.errors import DemuxError
from spdl_media.inputs import Input
from spdl_media.orientation import exif_orientation, matrix_orientation
from spdl_media.stills import HEAD_SIZE, container_still, still_codec, still_orientation
from spdl_media.truncation import check_complete, mp3_frame_size

Stream: TypeAlias = av.VideoStream | av.AudioStream
Kind: TypeAlias = Literal["video", "audio"]

WITHOUT_SIGNATURE = frozenset(
    {"targa", "xbm", "pcx", "pictor", "photocd", "brender_pix", "sunrast"}
)
"""Decoders of pictures that can only be known by the name of their file."""


_SEEKS_TO_START = ("mov,mp4", "mpegts", "avi")

# Pictures found by the name of their file, and animated WebP: FFmpeg says that it has sought, and goes on
# where the file ends.
_STAYS_AT_END = frozenset({"image2", "webp_anim"})

# Of pictures one behind the other (these, and all formats called "..._pipe") FFmpeg does not know the
# places: it lands inside one, or takes a later one for the first.
_SEEKS_ASTRAY = frozenset({"mjpeg", "webp_anim"})


class Container:
    """One open container. Opened once, read from any place as often as the source can be sought."""

    def __init__(self, input: Input, config: DemuxConfig) -> None:
        self._input = input
        self._config = config
        self._orientations: dict[int, int] = {}
        self._content: bytes | memoryview | None = None
        self._ended = self._checksum_failed = self._empty = False
        self.turn = 0
        """How often reading was started, so that a reader can tell that another has moved the place."""
        self._open()

    def _open(self) -> None:
        self._av: InputContainer = self._input.open(self._config)
        self._fresh = True
        self._check_name_against_content()

    def _check_name_against_content(self) -> None:
        """FFmpeg takes a file for a picture by its name alone; text in a .jpg is no picture."""
        decoder = self.named_still()
        if decoder in WITHOUT_SIGNATURE or decoder is None or self._config.format is not None:
            return
        if still_codec(self._input.head(HEAD_SIZE)) != decoder:
            self._av.close()
            raise self.error(
                f"the name says {decoder}, but the content is not: it is no media that FFmpeg knows. If it "
                "is raw data, name its format: demux_config(format=...)"
            )

    def named_still(self) -> str | None:
        """The decoder of a picture that FFmpeg found by the name of the file; None: by its content."""
        if self._av.format.name != "image2" or not self._av.streams.video:
            return None
        context = self._av.streams.video[0].codec_context
        return None if context is None else context.codec.name

    @property
    def name(self) -> str:
        """What is being read, for messages."""
        return self._input.name

    @property
    def av(self) -> InputContainer:
        """PyAV's container."""
        return self._av

    def close(self) -> None:
        """Free FFmpeg's structures. The input is its owner's to close."""
        self._av.close()
        self._content = None

    def error(self, text: str) -> DemuxError:
        """A DemuxError that names the source."""
        return DemuxError(text, source=self.name)

    def stream(self, kind: Kind, index: int | None) -> Stream:
        """The stream with this index, or the best of its kind.

        Raises:
            DemuxError: There is none, it is of another kind, or no decoder knows it.
        """
        stream = self._best(kind) if index is None else self._numbered(kind, index)
        if stream.codec_context is None:
            raise self.error(f"this FFmpeg has no decoder for {kind} stream {stream.index}")
        return stream

    def _best(self, kind: Kind) -> Stream:
        stream = self._av.streams.best(kind)
        if stream is None:
            raise self.error(f"there is no {kind} stream; {self._listed()}")
        if kind == "video":
            self._refuse_tiles()
        return stream  # type: ignore[return-value]  # best("video") is a VideoStream

    def _refuse_tiles(self) -> None:
        """FFmpeg shows a HEIF picture made of tiles as one stream a tile, and a thumbnail beside them."""
        tiles = [s for s in self._av.streams.video if s.disposition & Disposition.dependent]
        # In a movie, a dependent stream is a layer that its main stream can do without.
        if tiles and self._av.duration is None:
            raise self.error(
                f"the picture is split into {len(tiles)} tiles, and joining them is not supported. Write it "
                "anew without tiles, or take one of them: demux_video(src, stream_index="
                f"{tiles[0].index})"
            )

    def _numbered(self, kind: Kind, index: int) -> Stream:
        index = check_int("stream_index", index, at_least=None)
        streams = list(self._av.streams)
        if not 0 <= index < len(streams):
            raise self.error(f"there is no stream {index}; {self._listed()}")
        if streams[index].type != kind:
            raise self.error(
                f"stream {index} is {streams[index].type}, not {kind}; {self._listed()}"
            )
        return streams[index]  # type: ignore[return-value]  # its type was compared above

    def _listed(self) -> str:
        kinds = [f"{stream.index}: {stream.type}" for stream in self._av.streams]
        return f"the streams are {', '.join(kinds)}" if kinds else "it has no streams"

    @property
    def zero(self) -> Fraction:
        """Second 0 of the container on FFmpeg's clock, in seconds.

        FFmpeg rounds the container's start to microseconds. The stream that starts it states the same
        moment exactly, in its own time base; a window's edge must not fall beside a frame by rounding.
        """
        start = self._av.start_time
        if start is None:
            return Fraction(0)
        rounded = Fraction(start, 1_000_000)
        exact = [
            stream.start_time * as_fraction(stream.time_base)
            for stream in self._av.streams
            if stream.start_time is not None and as_fraction(stream.time_base)
        ]
        nearest = min(exact, key=lambda time: abs(time - rounded), default=rounded)
        return nearest if abs(nearest - rounded) <= Fraction(1, 1_000_000) else rounded

    def packets(self, indices: Sequence[int]) -> Iterator[AvPacket]:
        """The packets of these streams from the present place on, independent of the container."""
        self._select(indices)
        from_start, self._fresh = self._fresh, False
        self._ended = False
        self._empty = from_start
        self._checksum_failed = from_start and self._input.checksum_failed
        self.turn += 1
        streams = list(self._av.streams)
        return self._read([streams[index] for index in indices])  # type: ignore[misc]  # checked before

    def _select(self, indices: Collection[int]) -> None:
        """Let FFmpeg skip the other streams; it finds no place in one that it skips."""
        for stream in list(self._av.streams):
            stream.discard = Discard.default if stream.index in indices else Discard.all

    def _read(self, streams: list[Stream]) -> Iterator[AvPacket]:
        # A packet of PyAV keeps its container, and so the whole source, alive. Passing it through a
        # filter that does nothing moves the data into one that does not.
        loose = BitStreamFilterContext("null")
        untimed = {stream.index for stream in streams if self._guesses_pts(stream)}
        reader = self._av.demux(streams)
        while True:
            # Not around the yield: what FFmpeg says is collected for a thread, and a reader can be left
            # half way or go on in another thread.
            with ffmpeg_errors(
                lambda text: self.error(f"the container is damaged: {text}")
            ) as lines:
                packet = next(reader, None)
                if packet is None:
                    break
                # A packet without data or time is PyAV's mark of the end.
                found = loose.filter(packet) if packet.size or packet.dts is not None else []
            self._checksum_failed |= says_checksum_failed(lines)
            for packet in found:
                self._empty = False
                if packet.stream_index in untimed:
                    packet.pts = None
                yield packet
        self._input.check()
        self._ended = True

    def _guesses_pts(self, stream: Stream) -> bool:
        """Whether FFmpeg makes presentation times up, in the order of decoding, which is not that of display.

        AVI has no such times. FFmpeg finds them for MPEG-4, but not for codecs that reorder as they like.
        """
        context = stream.codec_context
        reorders = context is not None and context.name in ("h264", "hevc")
        return self._av.format.name == "avi" and reorders

    def missing_end(self, packets: Sequence[AvPacket]) -> str | None:
        """What is missing of what was read, above all at the end of the file, where the format tells.

        A window that lies in what is there is whole, and nothing is looked at for it.

        Args:
            packets: The last ones that were read of a stream.

        Raises:
            DemuxError: It is a picture of which FFmpeg gives nothing at all.
        """
        if self._checksum_failed:
            return "a page fails its checksum, and FFmpeg leaves it out"
        if not self._ended or self._config.format is not None:
            return None
        head = self._input.head(HEAD_SIZE) if self._input.seekable else b""
        if kind := container_still(head) or still_codec(head):
            if self._empty:  # a parser of FFmpeg's that finds the header implausible
                raise self.error(f"FFmpeg finds no picture in this {kind} data")
            return check_complete(kind, self.content())
        return self._input.missing_end() or self._short_packet(packets)

    def _short_packet(self, packets: Sequence[AvPacket]) -> str | None:
        if not packets:
            return None
        last = packets[-1]
        # FFmpeg marks a packet that has fewer bytes than its header states. In MPEG-TS and -PS the mark is
        # one of transmission errors as well, which decoders are to judge. Those of MP3 state it themselves.
        format = self._av.format.name
        frame_size = mp3_frame_size(bytes(memoryview(last)[:4])) if format == "mp3" else None
        if (frame_size or 0) > last.size or (last.is_corrupt and not format.startswith("mpeg")):
            return "the data ends inside a packet"
        if format != "flac" or not last.duration or last.pts is None:
            return None
        # The header of a FLAC file states its number of samples, or 0.
        stated, found = self._av.streams[0].duration, last.pts + last.duration
        if not stated or found >= stated:
            return None
        return f"the data ends after {found} of {stated} samples"

    def rewind(self) -> None:
        """Go to the first packet of the file."""
        if self._fresh:
            return
        if not self._input.seekable:
            raise self.error(
                "the source cannot seek, so it can be read once; open it again, or read it into bytes first"
            )
        self._select(range(len(list(self._av.streams))))
        if not self._seek_to_start():
            self._av.close()
            self._open()
        self._fresh = True

    def _seek_to_start(self) -> bool:
        """Whether seeking leads to the very first packet; opening again always does, and costs more."""
        # Some formats cannot seek by time, and raw streams, which have none, end up anywhere. Matroska and
        # Ogg say only once after opening how many samples to skip at the start of a sound.
        start, format = self._av.start_time, self._av.format.name
        if start is None or format in _STAYS_AT_END:
            return False
        if self._av.streams.audio and not format.startswith(_SEEKS_TO_START):
            return False
        # In MP4, packets that an edit list skips lie before the start.
        before = 1_000_000 if "mp4" in format else 0
        try:
            self._av.seek(min(start, 0) - before)
        except av.FFmpegError:
            return False
        return True

    def seek(self, seconds: Fraction, index: int) -> bool:
        """Go to about this time on FFmpeg's clock; False where the format or the source cannot."""
        format = self._av.format.name
        if not self._input.seekable or format in _SEEKS_ASTRAY or format.endswith("_pipe"):
            return False
        stream = self._av.streams[index]
        self._select((index,))
        self._fresh = False  # a seek that fails has moved the place as well
        try:
            self._av.seek(int(seconds / as_fraction(stream.time_base)), stream=stream)
        except (av.FFmpegError, OverflowError):  # or a time that no file has
            return False
        return True

    def orientation(self, index: int, packets: Iterable[AvPacket]) -> int:
        """How the pictures of a video stream stand: by the metadata of a still, by the matrix of a video.

        Args:
            index: Index of the stream.
            packets: Some of its packets, the first a key frame, in case one has to be looked at to know.
        """
        format = self._av.format.name
        if format == "image2" or format.endswith("_pipe"):  # each packet is a file
            first = next(iter(packets), None)
            return 1 if first is None else still_orientation(memoryview(first))
        if index not in self._orientations:
            self._orientations[index] = self._stated_orientation(index, packets)
        return self._orientations[index]

    def _stated_orientation(self, index: int, packets: Iterable[AvPacket]) -> int:
        if not any(name in self._av.format.name for name in ("mp4", "matroska")):
            return 1
        stream = as_video(self._av.streams[index])
        if self._is_heif_picture(stream):
            # Kept, because its end is looked at later; what is not HEIF can be a long row of pictures.
            self._content = self.content()
            return exif_orientation(self._content)
        matrix = muxed_matrix(stream) or decoded_matrix(stream, packets)
        return matrix_orientation(matrix) if matrix else 1

    def _is_heif_picture(self, stream: Stream) -> bool:
        """Whether a stream is the picture of a HEIF file, no part of it, and the file can be looked at.

        The file may say to mirror before turning. FFmpeg's matrix is always that of mirroring afterwards.
        """
        if self._av.duration is not None or not self._input.seekable:
            return False
        best = self._av.streams.best("video")
        if best is None or best.index != stream.index or stream.disposition & Disposition.dependent:
            return False
        return container_still(self._input.head(HEAD_SIZE)) == "avif"

    def content(self) -> bytes | memoryview:
        """The whole file of a picture. That of a HEIF is read once."""
        return self._input.read_all() if self._content is None else self._content


def as_video(stream: av.stream.Stream) -> av.VideoStream:
    """The stream, for the type checker, as what :meth:`Container.stream` has found it to be."""
    assert isinstance(stream, av.VideoStream), "Container.stream compared its type"
    return stream


def as_audio(stream: av.stream.Stream) -> av.AudioStream:
    """The stream, for the type checker, as what :meth:`Container.stream` has found it to be."""
    assert isinstance(stream, av.AudioStream), "Container.stream compared its type"
    return stream
