"""An open container: its streams, its clock, seeking, and its packets cut loose from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import cached_property
from itertools import islice
from typing import Any, Literal, TypeAlias

import av
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer
from av.stream import Discard, Disposition

from spdl_media._checks import check_int
from spdl_media._ffmpeg import (
    AvPacket,
    LogLine,
    as_fraction,
    describe,
    ffmpeg_log,
    says_checksum_failed,
)
from spdl_media.audio_clock import counted_starts, filled_in, straightened
from spdl_media.codec import (
    AudioCodec,
    VideoCodec,
    muxed_matrix,
    read_audio_codec,
    read_video_codec,
)
from spdl_media.coded_units import mended
from spdl_media.config import DEFAULT_DEMUX_CONFIG, DemuxConfig
from spdl_media.errors import DemuxError
from spdl_media.frame_scan import is_mp3, mp3_frame_size
from spdl_media.geometry import matrix_orientation
from spdl_media.inputs import Input
from spdl_media.parts import missing_packets, signed_format
from spdl_media.still_faults import check_complete
from spdl_media.still_headers import exif_orientation
from spdl_media.stills import HEAD_SIZE, WITHOUT_SIGNATURE, container_still, still_codec

Kind: TypeAlias = Literal["video", "audio"]

# Formats whose start is found by seeking. Matroska and Ogg say only once after opening how many samples to
# skip at the start of a stream. Others have other times behind a seek, or FFmpeg lands behind the start.
_SEEKS_TO_START = ("mov,mp4", "avi")

# Of images one behind the other (these, and all formats called "..._pipe") FFmpeg does not know the
# places: it lands inside one, or takes a later one for the first. H.263 has other times after a seek, and of
# H.261 no packet tells whether it is a key frame. In an MPEG program stream a packet has a timestamp only now
# and then; after a seek, those in between are counted from the wrong one.
_SEEKS_ASTRAY = frozenset({"mjpeg", "mpeg", "webp_anim", "h261", "h263", "rm"})

# To try out the decoder takes half of the time to open a file of audio. These tell all without it.
_TELL_STREAMS = frozenset({"ogg", "mov"})

NO_DECODERS = "none"  # in the place of decoders' names


class Container:
    """One open container, read from any place as often as the source can be sought.

    Packets are read, and places sought, inside of :meth:`reading`.

    Attributes:
        name: What is being read, for messages.
        av: PyAV's container. Another one after a rewind that had to open the source anew.
        format: FFmpeg's names of its format.
        turn: Number of reads begun, so that a reader notices when another one has moved the position.
        tried: The decoders that FFmpeg has tried out for what headers do not tell, divided by commas;
            ``None``: all of them.
    """

    def __init__(self, input: Input, config: DemuxConfig, *, tries: str | None = None) -> None:
        self.name = input.name
        self.turn = 0
        self.tried = tries
        self._input = input
        self._config = config
        self._orientations: dict[int, int] = {}
        self._starts: dict[int, dict[int, int] | None] = {}
        self._ended = self._checksum_failed = self._empty = False
        self._log: list[LogLine] = []
        self._log_start = 0
        self._open()

    def _open(self) -> None:
        self.av, self.format = self._open_file()
        self._fresh = True
        decoder = self.named_still()
        if decoder is None or decoder in WITHOUT_SIGNATURE or self._config.format is not None:
            return
        # FFmpeg takes a file for an image by its name alone; text in a .jpg is no image.
        if still_codec(self._input.head(HEAD_SIZE)) != decoder:
            self.av.close()
            raise self.error(
                f"the name says {decoder}, but the content is not: it is no media that FFmpeg knows. If it "
                "is raw data, name its format: demux_config(format=...)"
            )

    def _open_file(self) -> tuple[InputContainer, str]:
        # What cannot seek is opened once.
        if self._config == DEFAULT_DEMUX_CONFIG and self._input.seekable:
            head = self._input.head(HEAD_SIZE)
            known = signed_format(head) or (("mp3", "mp3") if is_mp3(head) else None)
            if known is not None:
                # What is damaged is told in the words for a file of any format.
                with suppress(DemuxError):
                    if known[0] not in _TELL_STREAMS:
                        self.tried = None
                    options = {} if self.tried is None else {"codec_whitelist": self.tried}
                    config = DemuxConfig(format=known[0], format_options=options)
                    return self._input.open(config), known[1]
        self.tried = None
        file = self._input.open(self._config)
        return file, file.format.name

    def named_still(self) -> str | None:
        """The decoder of an image that FFmpeg found by the name of the file; ``None``: by its content."""
        if self.format != "image2" or not self.av.streams.video:
            return None
        context = self.av.streams.video[0].codec_context
        return None if context is None else context.codec.name

    def close(self) -> None:
        """Free FFmpeg's structures. The input is its owner's to close."""
        self.av.close()

    def error(self, text: str) -> DemuxError:
        """A DemuxError that names the source."""
        return DemuxError(text, source=self.name)

    # Streams. Reading may open the source again, and PyAV's streams are gone then: so callers get the
    # index and the codec's parameters as values.

    def video(self, index: int | None = None) -> tuple[int, VideoCodec]:
        """Index and codec of the video stream with this index, or of the best one.

        Raises:
            DemuxError: There is none, it is of another kind, or no decoder knows it.
        """
        stream = self._stream("video", index)
        return stream.index, read_video_codec(stream)

    def audio(self, index: int | None = None) -> tuple[int, AudioCodec]:
        """Index and codec of the audio stream with this index, or of the best one.

        Raises:
            DemuxError: There is none, it is of another kind, or no decoder knows it.
        """
        stream = self._stream("audio", index)
        codec = read_audio_codec(stream)
        return stream.index, filled_in(codec) if self.tried == NO_DECODERS else codec

    def best_index(self, kind: Kind) -> int | None:
        """Index of the best stream of a kind; ``None``: there is none."""
        stream = self.av.streams.best(kind)
        return None if stream is None else stream.index

    def codec(self, index: int) -> AudioCodec | VideoCodec:
        """Codec of the stream with this index.

        Raises:
            DemuxError: There is none, it is neither audio nor video, or no decoder knows it.
        """
        kinds = {stream.index: stream.type for stream in self.av.streams}
        return self.audio(index)[1] if kinds.get(index) == "audio" else self.video(index)[1]

    def _stream(self, kind: Kind, index: int | None) -> Any:  # a stream of that kind
        streams: list[Any] = list(self.av.streams)
        stream: Any
        if index is None:
            stream, problem = self.av.streams.best(kind), f"there is no {kind} stream"
        else:
            index = check_int("stream_index", index, at_least=None)
            stream = streams[index] if 0 <= index < len(streams) else None
            problem = f"there is no stream {index}"
            if stream is not None and stream.type != kind:
                stream, problem = None, f"stream {index} is {stream.type}, not {kind}"
        if stream is None:
            kinds = ", ".join(f"{each.index}: {each.type}" for each in streams)
            listed = f"the streams are {kinds}" if kinds else "it has no streams"
            raise self.error(f"{problem}; {listed}")
        if index is None and kind == "video":
            self._check_whole()
        if stream.codec_context is None:
            raise self.error(f"this FFmpeg has no decoder for {kind} stream {stream.index}")
        return stream

    def _check_whole(self) -> None:
        """Refuse a HEIF image made of tiles, which FFmpeg shows as one stream a tile beside a thumbnail."""
        # In a movie, a dependent stream is a layer that its main stream can do without.
        tiles = [s for s in self.av.streams.video if s.disposition & Disposition.dependent]
        if tiles and self.av.duration is None:
            raise self.error(
                f"the image is split into {len(tiles)} tiles, and joining them is not supported. Write it "
                "anew without tiles, or take one of them: demux_video(src, stream_index="
                f"{tiles[0].index})"
            )

    @cached_property
    def zero(self) -> Fraction:
        """Second 0 of the container on FFmpeg's clock, in seconds."""
        start = self.av.start_time
        if start is None:
            return Fraction(0)
        # FFmpeg rounds the container's start to microseconds. The stream that starts it states the same
        # moment exactly, in its own time base; a window's edge must not fall beside a frame by rounding.
        pairs = [(stream.start_time, stream.time_base) for stream in self.av.streams]
        stated = [(ticks, base) for ticks, base in pairs if ticks is not None and base]
        # In microseconds, and whole numbers up to the last step: fractions take ten times as long.
        errors = [
            abs(ticks * base.numerator * 1_000_000 - start * base.denominator) / base.denominator
            for ticks, base in stated
        ]
        if min(errors, default=2.0) > 1:
            return Fraction(start, 1_000_000)
        ticks, base = stated[errors.index(min(errors))]
        exact: Fraction = ticks * as_fraction(base)
        return exact

    @property
    def duration(self) -> float | None:
        """Seconds by the header; ``None``: it does not say."""
        # FFmpeg counts in microseconds.
        return None if self.av.duration is None else self.av.duration / 1_000_000

    # Reading.

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Translate FFmpeg's errors while packets are read, and note failed checksums.

        It is entered once for all packets of a call: to collect the log takes longer than to read a packet.
        A generator must not hold it over a ``yield``, since the log is that of a thread.

        Raises:
            DemuxError: FFmpeg cannot read the container.
        """
        with ffmpeg_log() as self._log:
            self._log_start = 0
            try:
                yield
            except av.FFmpegError as error:
                said = describe(error, self._log[self._log_start :])
                raise self.error(f"the container is damaged: {said}") from error
            self._checksum_failed |= says_checksum_failed(self._log[self._log_start :])

    def packets(
        self, indices: Sequence[int], *, keep: bool = True, mend: bool = True
    ) -> Iterator[AvPacket]:
        """The packets of these streams from the present place on.

        Args:
            indices: Of the streams.
            keep: They outlive the container, which takes half as long again as to read them.
            mend: What FFmpeg states wrongly of them is put right, for which some are read ahead.
        """
        self._select(indices)
        from_start, self._fresh = self._fresh, False
        self._ended = False
        self._empty = from_start
        self._checksum_failed = from_start and self._input.checksum_failed
        # What FFmpeg said of other places, and while it looked for this one, is not about these packets.
        self._log_start = len(self._log)
        self.turn += 1
        streams = [self.av.streams[index] for index in indices]
        found = self._read(streams, keep=keep)
        if not mend:
            return found
        found = mended(found, self.format, streams)
        wavering = {index: starts for index in indices if (starts := self._counted_starts(index))}
        return straightened(found, wavering) if wavering else found

    def counts_samples(self, index: int) -> bool:
        """Whether each packet of an audio stream states the sample with which it begins."""
        # FFmpeg counts the frames of MP3 files itself.
        return self.format == "mp3" or self._counted_starts(index) is not None

    def _counted_starts(self, index: int) -> dict[int, int] | None:
        """Timestamps of an audio stream's packets by those that an MP4 states; ``None``: it has no index."""
        if index not in self._starts:
            stream = self.av.streams[index]
            # In fragments the index grows while it is read, and the header states no packets.
            if stream.type == "audio" and self.format.startswith("mov") and stream.frames:
                codec = self.audio(index)[1]
                self._starts[index] = counted_starts(codec, stream.index_entries)
        return self._starts.setdefault(index, None)

    def _select(self, indices: Collection[int]) -> None:
        """Let FFmpeg skip the other streams; it finds no place in one that it skips."""
        for stream in list(self.av.streams):
            stream.discard = Discard.default if stream.index in indices else Discard.all

    def _read(self, streams: list[av.stream.Stream], *, keep: bool) -> Iterator[AvPacket]:
        # A packet of PyAV keeps its container, and so the whole source, alive. Passing it through a
        # filter that does nothing moves the data into one that does not.
        loosened = BitStreamFilterContext("null").filter if keep else None
        for packet in self.av.demux(streams):
            if not packet.size:  # PyAV's mark of the end
                continue
            self._empty = False
            if loosened is None:
                yield packet
            else:
                yield from loosened(packet)
        self._input.check()
        self._ended = True

    def missing_end(self, packets: Sequence[AvPacket]) -> str | None:
        """Say what is missing from the packets that were read, where the format tells.

        A window that lies in what is there is whole, and nothing is looked at for it.

        Args:
            packets: The last ones that were read of a stream.

        Raises:
            DemuxError: It is an image of which FFmpeg gives nothing at all.
        """
        if self._checksum_failed:
            return "a page fails its checksum, and FFmpeg leaves it out"
        if not self._ended or self._config.format is not None:
            return None
        head = self._input.head(HEAD_SIZE) if self._input.seekable else b""
        if kind := container_still(head) or still_codec(head):
            if self._empty:  # a parser of FFmpeg's that finds the header implausible
                raise self.error(f"FFmpeg finds no image in this {kind} data")
            return check_complete(kind, self._input.read_all())
        missing = self._input.missing_end()
        if missing is None and self.format.startswith("mov") and self._input.seekable:
            missing = missing_packets(self.av.streams, self._input.size())
        return missing or self._short_packet(packets)

    def _short_packet(self, packets: Sequence[AvPacket]) -> str | None:
        if not packets:
            return None
        last = packets[-1]
        # FFmpeg marks a packet that has fewer bytes than its header states. In MPEG-TS and -PS the mark is
        # one of transmission errors as well, which decoders are to judge. Those of MP3 state it themselves.
        is_mp3 = self.format == "mp3"
        frame_size = mp3_frame_size(bytes(memoryview(last)[:4])) if is_mp3 else None
        marked = last.is_corrupt and not self.format.startswith("mpeg")
        if (frame_size or 0) > last.size or marked:
            return "the data ends inside a packet"
        if self.format != "flac" or not last.duration or last.pts is None:
            return None
        # The header of a FLAC file states its number of samples, or 0.
        stated, found = self.av.streams[0].duration, last.pts + last.duration
        if not stated or found >= stated:
            return None
        return f"the data ends after {found} of {stated} samples"

    def rewind(self) -> None:
        """Go to the first packet of the file.

        Raises:
            SourceError: It cannot be opened again.
            DemuxError: It cannot seek, or is no media any more.
        """
        if self._fresh:
            return
        if not self._input.seekable:
            raise self.error(
                "the source cannot seek, so it can be read once; open it again, or read it into bytes first"
            )
        self._select(range(len(list(self.av.streams))))
        # Opening again always leads to the very first packet, and costs more than seeking.
        if not self._seek_to_start():
            self.av.close()
            self._open()
        self._fresh = True

    def _seek_to_start(self) -> bool:
        if self.av.start_time is None or not self.format.startswith(_SEEKS_TO_START):
            return False
        try:
            # In MP4, packets that an edit list skips lie before the start.
            self.av.seek(min(self.av.start_time, 0) - 1_000_000)
        except av.FFmpegError:
            return False
        return True

    def seek(self, pts: int, index: int) -> bool:
        """Go to about this timestamp of a stream; False where the format or the source cannot."""
        astray = self.format in _SEEKS_ASTRAY or self.format.endswith("_pipe")
        if astray or not self._input.seekable:
            return False
        self._select((index,))
        self._fresh = False  # a seek that fails has moved the place as well
        try:
            self.av.seek(pts, stream=self.av.streams[index])
        except (av.FFmpegError, OverflowError):  # or a time that no file has
            return False
        return True

    def places(
        self, indices: Sequence[int], pts: int | None, *, keep: bool = True, mend: bool = True
    ) -> Iterator[tuple[Iterator[AvPacket], bool]]:
        """Packets from about a timestamp on, from further and further back, at last from the file's start.

        MPEG-TS lands late and between key frames; an open group's key frame can be shown after frames that
        are asked for. The caller stops where decoding can begin.

        Args:
            indices: Of the streams; the first one is sought in.
            pts: Where to seek to; ``None``: the start of the file.
            keep: As for :meth:`packets`, as is ``mend``.
            mend: What FFmpeg states wrongly is put right.

        Yields:
            Packets, and whether their place was sought.
        """
        base = as_fraction(self.av.streams[indices[0]].time_base)
        back = 0
        while pts is not None and self.seek(pts - back, indices[0]):
            yield self.packets(indices, keep=keep, mend=mend), True
            if (pts - back) * base < self.zero:
                break
            back = back * 2 or round(1 / base)
        self.rewind()
        yield self.packets(indices, keep=keep, mend=mend), False

    # Orientation.

    def orientation(self, index: int, packets: Iterable[AvPacket] | None = None) -> int:
        """EXIF number of the images of a video stream: by a still's metadata, or a video's display matrix.

        Args:
            index: Index of the stream.
            packets: Some of its packets, if they are there. ``None``: the first is read if it tells.
        """
        if self.format == "image2" or self.format.endswith("_pipe"):  # each packet is a file
            if packets is None:
                self.rewind()
                with self.reading():
                    packets = list(islice(self.packets([index]), 1))
            first = next(iter(packets), None)
            return 1 if first is None else exif_orientation(memoryview(first))
        if index not in self._orientations:
            is_stated = any(name in self.format for name in ("mp4", "matroska"))
            matrix = muxed_matrix(self.av.streams[index]) if is_stated else None
            # Of AVIF and HEIC it turns before it mirrors, as MIAF wants it (ISO/IEC 23000-22, 7.3.6.7).
            self._orientations[index] = matrix_orientation(matrix) if matrix else 1
        return self._orientations[index]
