"""An open container: its streams, start time, seeking, and reading of packets that outlive it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from fractions import Fraction
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal, TypeAlias

import av
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer
from av.stream import Discard, Disposition

from spdl_media import _ffmpeg, parts, stills
from spdl_media._checks import check_int
from spdl_media._ffmpeg import AvPacket, as_fraction
from spdl_media.audio_clock import exact_start, with_hidden_samples
from spdl_media.codec import AudioCodec, VideoCodec, read_audio_codec, read_video_codec
from spdl_media.coded_headers import display_matrix, open_known
from spdl_media.coded_units import check_clear
from spdl_media.config import DEFAULT_DEMUX_CONFIG, format_config
from spdl_media.errors import DemuxError
from spdl_media.frame_scan import begins_at_0, is_mp3, mp3_frame_size
from spdl_media.geometry import matrix_orientation
from spdl_media.inputs import Input
from spdl_media.mp4_audio import packet_times
from spdl_media.ogg_audio import page_times
from spdl_media.packet_corrections import ExactTimes, corrected, reindexed, with_times
from spdl_media.still_headers import exif_orientation
from spdl_media.still_parts import check_complete

Kind: TypeAlias = Literal["video", "audio"]

Begins: TypeAlias = Callable[[AvPacket], bool | None]
"""Whether decoding can begin at a packet; ``None``: not at this one, but perhaps at a later one."""


class Container:
    """One open container. Read packets and seek inside a :meth:`reading` block.

    Attributes:
        name: Name of the source in messages.
        av: PyAV's container. Replaced by a new one if a rewind has to open the source again.
        format: FFmpeg's name of the format.
        turn: Number of reads begun, so that a reader notices when another one has moved the position.
    """

    def __init__(self, input: Input, *, audio: bool = True) -> None:
        self.name, self.turn, self._log_start = input.name, 0, 0
        self._input, self._needs_audio = input, audio
        self._orientations: dict[int, int] = {}
        self._times: dict[int, ExactTimes | None] = {}
        self._last: dict[int, AvPacket] = {}  # by stream, the last packet that was read
        self._ended = self._checksum_failed = self._empty = False
        self._log: list[_ffmpeg.LogLine] = []
        self._open()

    def _open(self) -> None:
        self.av, self.format = self._open_file()
        self._audio: dict[int, AudioCodec] = {}
        self._fresh = True
        if self._input.config.format is not None:
            return
        found, head = self.named_still(), self._input.head(stills.HEAD_SIZE)
        has_signature = found not in (None, *stills.WITHOUT_SIGNATURE)
        if has_signature and stills.still_codec(head) != found:
            # FFmpeg detects these images by the file name alone, so a .jpg may hold text.
            text = f"the name says {found}, but the content is not"
        elif self.format == "mjpeg" and head[:2] != b"\xff\xd8":
            # FFmpeg finds JPEGs anywhere in a file.
            text = "it holds JPEGs, but begins with other data, as archives do (iter_samples reads tar)"
        else:
            return
        self.av.close()
        raise self.error(
            f"{text}: FFmpeg does not recognise it as media. If it is raw data, name its format: "
            "demux_config(format=...)"
        )

    def _open_file(self) -> tuple[InputContainer, str]:
        # The signature tells the format, which spares FFmpeg's probing. Only for sources that can seek: if
        # opening fails, they are opened a second time.
        self._may_be_still = self._input.seekable
        head = self._input.head(stills.HEAD_SIZE)
        known = parts.signed_format(head) or (("mp3", "mp3") if is_mp3(head) else None)
        if known and self._input.config == DEFAULT_DEMUX_CONFIG and self._input.seekable:
            name, names = known
            # Only an ISO file may hold a movie or an image, which its box meta describes.
            is_image = bytes(head[8:12]) in stills.AVIF_BRANDS or b"meta" in parts.box_kinds(head)
            self._may_be_still = name == "mov" and is_image
            # A damaged file gets its error from opening it below. Damage of Ogg is told by the log alone.
            log = _ffmpeg.ffmpeg_log() if name == "ogg" else _ffmpeg.unheard_log()
            with suppress(DemuxError), log:
                file = open_known(self._input, audio=self._needs_audio)
                return file or self._input.open(format_config(name)), names
        file = self._input.open(self._input.config)
        return file, file.format.name

    def named_still(self) -> str | None:
        """Return the decoder of an image that FFmpeg detected by the file name; ``None``: by the content."""
        if self.format != "image2" or not self.av.streams.video:
            return None
        context = self.av.streams.video[0].codec_context
        return None if context is None else context.codec.name

    def for_pillow(self) -> tuple[bytes | memoryview, str, str] | None:
        """Return content, name and the reason if Pillow has to read the video; ``None``: FFmpeg reads it."""
        head = self._input.image_head
        reason = stills.pillow_video_reason(head()) if self._may_be_still else None
        return None if reason is None else (self._input.read_all(), self.name, reason)

    def close(self) -> None:
        """Free FFmpeg's structures. The input stays open; its owner closes it."""
        self.av.close()

    def error(self, text: str) -> DemuxError:
        """Return a ``DemuxError`` that names the source."""
        return DemuxError(text, source=self.name)

    # Streams, as values: a rewind may open the source again, which invalidates PyAV's stream objects.

    def video(self, index: int | None = None) -> tuple[int, VideoCodec]:
        """Return index and codec of the video stream with this index, or of the best one.

        Raises:
            DemuxError: There is no such stream, it is of another kind, or FFmpeg has no decoder for it.
        """
        stream = self._stream("video", index)
        return stream.index, read_video_codec(stream)

    def audio(self, index: int | None = None) -> tuple[int, AudioCodec]:
        """Return index and codec of the audio stream with this index, or of the best one.

        Raises:
            DemuxError: There is no such stream, it is of another kind, or FFmpeg has no decoder for it.
        """
        stream = self._stream("audio", index)
        if stream.index not in self._audio:
            self._audio[stream.index] = with_hidden_samples(read_audio_codec(stream), stream)
        return stream.index, self._audio[stream.index]

    def best_index(self, kind: Kind) -> int | None:
        """Return the index of the best stream of a kind, or ``None`` without one."""
        best = self.av.streams.best(kind)
        if kind == "audio" and best is not None and best.codec_context is None:
            # FFmpeg does not ask for a decoder, and has none for APAC, which phones write beside AAC.
            best = next((each for each in self.av.streams.audio if each.codec_context), best)
        return None if best is None else best.index

    def codec(self, index: int) -> AudioCodec | VideoCodec:
        """Return the codec of the stream with this index.

        Raises:
            DemuxError: There is none, it is neither audio nor video, or FFmpeg has no decoder for it.
        """
        kinds = {stream.index: stream.type for stream in self.av.streams}
        return self.audio(index)[1] if kinds.get(index) == "audio" else self.video(index)[1]

    def _stream(self, kind: Kind, index: int | None) -> Any:  # a stream of that kind
        streams: list[Any] = list(self.av.streams)
        index = None if index is None else check_int("stream_index", index, at_least=None)
        found = self.best_index(kind) if index is None else index
        stream: Any = next((each for each in streams if each.index == found), None)
        if stream is None or stream.type != kind:
            what = f"{kind} stream" if index is None else f"stream {index}"
            problem = f"{what} is {stream.type}, not {kind}" if stream else f"there is no {what}"
            kinds = ", ".join(f"{each.index}: {each.type}" for each in streams)
            listed = f"the streams are {kinds}" if kinds else "it has no streams"
            raise self.error(f"{problem}; {listed}")
        if index is None and kind == "video":
            self._check_untiled()
        if stream.codec_context is None:
            raise self.error(f"this FFmpeg has no decoder for {kind} stream {stream.index}")
        if kind == "audio" and not stream.codec_context.sample_rate:
            raise self.error(f"audio stream {stream.index} is damaged: it has no sample rate")
        return stream

    def _check_untiled(self) -> None:
        """Raise for a tiled HEIF image, whose tiles FFmpeg shows as separate streams."""
        # In a movie, which has a duration, a dependent stream is an optional layer of the main stream.
        streams = () if self.av.duration is not None else self.av.streams.video
        if tiles := [s for s in streams if s.disposition & Disposition.dependent]:
            raise self.error(
                f"the image is split into {len(tiles)} tiles, and joining them is not supported. Write it "
                f"again without tiles, or take one: demux_video(src, stream_index={tiles[0].index})"
            )

    @cached_property
    def zero(self) -> Fraction:
        """Start time of the container on FFmpeg's clock, in seconds; it is second 0 of our timestamps."""
        start = self.av.start_time
        is_zero = start == 0 and any(s.start_time == 0 for s in self.av.streams)
        # If the third or fourth frame of a FLAC file is damaged, FFmpeg states the time of that one.
        if start is None or is_zero or (self.format == "flac" and begins_at_0(self._input)):
            return Fraction(0)
        return exact_start(self.av, start)

    @property
    def duration(self) -> float | None:
        """Duration in seconds that the header states (FFmpeg has microseconds), or ``None``."""
        return None if self.av.duration is None else self.av.duration / 1_000_000

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Translate FFmpeg's errors while packets are read, and note failed checksums.

        Enter it once for many packets. Do not ``yield`` inside the block; the log belongs to one thread.

        Raises:
            DemuxError: FFmpeg cannot read the container.
        """
        with _ffmpeg.ffmpeg_log() as self._log:
            self._log_start = len(self._log)
            try:
                yield
            except av.FFmpegError as error:
                said = _ffmpeg.describe(error, self._log[self._log_start :])
                raise self.error(f"the container is damaged: {said}") from error
            self._checksum_failed |= _ffmpeg.says_damaged(self._log[self._log_start :])

    def packets(
        self, indices: Sequence[int], *, keep: bool = True, mend: bool = True
    ) -> Iterator[AvPacket]:
        """Return the packets of some streams from the current position on.

        Args:
            indices: Indices of the streams.
            keep: Whether the packets must outlive the container, which makes reading half as slow again.
            mend: Whether to correct what FFmpeg states wrongly of packets.
        """
        self._select(indices)
        from_start, self._fresh = self._fresh, False
        self._ended, self._empty, self._last = False, from_start, {}
        self._checksum_failed = from_start and self._input.checksum_failed
        # Log lines of the seek, and of earlier positions, do not concern these packets.
        self._log_start = len(self._log)
        self.turn += 1
        streams = [self.av.streams[index] for index in indices]
        found = self._read(streams, keep=keep)
        if self.format == "avi" and not from_start:
            found = reindexed(found, self.av.streams)
        if not mend:
            return found
        found = corrected(found, self.format, streams)
        is_mov = self.format.startswith("mov")
        exact = {index: self.exact_times(index) for index in indices if is_mov}
        times = {index: one.packets for index, one in exact.items() if one and one.packets}
        return with_times(found, times) if times else found

    def exact_times(self, index: int) -> ExactTimes | None:
        """Return the exact times of packets of audio in MP4 or Ogg; ``None``: they are not known."""
        if index not in self._times:
            stream = self.av.streams[index]
            # In a fragmented MP4 the header states no packets, and the index grows while it is read.
            has_index = self.format.startswith("mov") and stream.frames
            if stream.type == "audio" and (has_index or self.format == "ogg"):
                find = packet_times if has_index else page_times
                self._times[index] = find(stream, self.audio(index)[1], self._input)
        return self._times.setdefault(index, None)

    def _select(self, indices: Collection[int]) -> None:
        """Let FFmpeg skip all other streams. It cannot seek in a stream that it skips."""
        for stream in list(self.av.streams):
            stream.discard = Discard.default if stream.index in indices else Discard.all

    def _read(self, streams: list[av.stream.Stream], *, keep: bool) -> Iterator[AvPacket]:
        # A packet of PyAV's keeps its container, and so the whole source, alive. The "null" bitstream filter
        # moves its data into a packet that does not.
        detach = BitStreamFilterContext("null").filter if keep else None
        # FFmpeg gives the first chapter image of an M4A once more, in front of all packets.
        copied = [s.index for s in streams if s.disposition & Disposition.timed_thumbnails]
        demuxed: Any = self.av.demux(streams)
        is_first = True
        # Closed, because PyAV leaks memory if this iterator is dropped half-way. The IndexError is raised at
        # the end if a stream came up meanwhile.
        with closing(demuxed), suppress(IndexError):
            for packet in demuxed:
                if not packet.size:  # PyAV ends each stream with an empty packet
                    continue
                if packet.stream_index in copied:
                    copied.remove(packet.stream_index)
                    continue
                if is_first:
                    check_clear(packet, self.error)
                    self._empty = is_first = False
                for found in (packet,) if detach is None else detach(packet):
                    self._last[found.stream_index] = found
                    yield found
        self._input.check()
        self._ended = True

    def missing_end(self, index: int, last: AvPacket | None = None) -> str | None:
        """Return what is missing at the end of a truncated source, as text; ``None``: nothing is known to be.

        The end is examined only if reading reached it, and then also one packet of this stream: ``last``, or
        the last one that was read.

        Raises:
            DemuxError: The source is an image in which FFmpeg finds no packet.
        """
        if self._checksum_failed:
            return "a page fails its checksum, and FFmpeg leaves it out"
        if not self._ended or self._input.config.format is not None:
            return None
        # No still has audio.
        can_be_still = self._may_be_still and not self.av.streams.audio
        head = self._input.head(stills.HEAD_SIZE) if can_be_still else b""
        if head and (kind := stills.container_still(head) or stills.still_codec(head)):
            if self._empty:  # FFmpeg's parser has rejected the header
                raise self.error(f"FFmpeg finds no image in this {kind} data")
            return check_complete(kind, self._input.read_all())
        missing = self._input.missing_end()
        if missing is None and self.format.startswith("mov") and self._input.seekable:
            missing = parts.missing_packets(self.av.streams, self._input.size())
        if missing is None and self._empty and self.format == "flac" and self.av.duration:
            return "FFmpeg finds none of its frames"
        last = last or self._last.get(index)
        return missing or (self._short_packet(last) if last else None)

    def _short_packet(self, last: AvPacket) -> str | None:
        # FFmpeg marks a packet that has fewer bytes than its header states, or than were read at once; in ADX
        # the last packets of all files, and in MPEG-TS and -PS transmission errors.
        marked = last.is_corrupt and not self.format.startswith(("adx", "mpeg"))
        if marked and parts.is_open_ended(self._input.head(stills.HEAD_SIZE)):
            marked = last.size % (self.audio(last.stream_index)[1].block_align or 1) > 0
        frame_size = mp3_frame_size(bytes(memoryview(last)[:4])) if self.format == "mp3" else None
        if marked or (frame_size or 0) > last.size:  # an MP3 frame states its size
            return "the data ends inside a packet"
        # These headers state the number of samples, or 0. Where the source can seek, their size was checked.
        counted = ("flac",) if self._input.seekable else ("flac", "aiff", "au")
        if self.format not in counted or not last.duration or last.pts is None:
            return None
        stated, found = self.av.streams[0].duration or 0, last.pts + last.duration
        return f"the data ends after {found} of {stated} samples" if found < stated else None

    def rewind(self) -> None:
        """Go to the first packet of the file, by opening it again.

        Raises:
            SourceError: The source cannot be opened again.
            DemuxError: The source cannot seek, or is no longer a media file.
        """
        if self._fresh:
            return
        if not self._input.seekable:
            raise self.error(
                "the source cannot seek, so it can be read once; open it again, or read it into bytes first"
            )
        # A seek would not do: in some formats it ends after the start, or gives other timestamps. In Matroska
        # and Ogg, FFmpeg states the samples to skip only after opening.
        self.av.close()
        self._open()

    def seek(self, pts: int, index: int) -> bool:
        """Seek to near a timestamp of a stream. Return whether the format and the source can seek there."""
        source, stream = self._input, self.av.streams[index]
        if stream.disposition & Disposition.attached_pic:
            return False  # in an Ogg file, FFmpeg would end the process
        if not source.seekable or parts.seeks_astray(self.format, source.read_at, source.size):
            return False
        if stream.type == "audio" and self.format.startswith("matroska"):
            # Most files index only the video. In audio, FFmpeg would read all up to the timestamp.
            video = self.av.streams.best("video")
            if video is not None and not video.disposition & Disposition.attached_pic:
                seconds = pts * as_fraction(stream.time_base)
                stream, pts = video, int(seconds // as_fraction(video.time_base))
        self._select((stream.index,))
        self._fresh = False  # a seek that fails moves the position as well
        with suppress(av.FFmpegError, OverflowError):  # the latter: the timestamp exceeds 64 bits
            self.av.seek(pts, stream=stream)
            return True
        return False

    def packets_from(
        self, pts: int | None, tests: Mapping[int, Begins], **options: bool
    ) -> tuple[Iterator[AvPacket], bool]:
        """Return packets from near a timestamp on, or earlier, where decoding of all streams can begin.

        One seek may not suffice: in MPEG-TS it lands too late and between key frames, and the key frame of an
        open GOP can be shown after the requested frames.

        Args:
            pts: Timestamp to seek to; ``None``: the start of the file.
            tests: By the index of each stream, whether decoding can begin at a packet. Seeks are made in the
                first stream.
            **options: Those of :meth:`packets`.

        Returns:
            The packets, and whether they come from a seek, not from the start of the file.
        """
        indices = [*tests]
        back, base = 0, as_fraction(self.av.streams[indices[0]].time_base)
        while pts is not None and self.seek(pts - back, indices[0]):
            packets = self.packets(indices, **options)
            if head := self._head(packets, tests):
                return chain(head, packets), True
            if (pts - back) * base < self.zero:
                break
            back = back * 2 or max(1, round(1 / base))
        self.rewind()
        return self.packets(indices, **options), False

    def _head(
        self, packets: Iterator[AvPacket], tests: Mapping[int, Begins]
    ) -> list[AvPacket] | None:
        """Read up to where the last stream begins; return ``None`` if decoding cannot begin there."""
        head, waiting = [], set(tests)
        for packet in packets:
            begins = packet.stream_index not in waiting or tests[packet.stream_index](packet)
            # After a seek to the last page of a stream of Ogg, FFmpeg states wrong times and lengths of its
            # packets. The page has a flag: RFC 3533, section 6.
            page = self._input.read_at(packet.pos or 0, 6) if self.format == "ogg" else b""
            if begins is False or bytes(page[5:]) >= b"\4":
                return None
            if begins:
                head.append(packet)
                waiting.discard(packet.stream_index)
                if not waiting:
                    return head
        return None

    def orientation(self, index: int, packets: Iterable[AvPacket] | None = None) -> int:
        """Return the EXIF orientation of a video stream: from a still's EXIF, or a video's display matrix.

        Args:
            index: Index of the stream.
            packets: The first packets of the stream. ``None``: the first one is read where EXIF may tell.
        """
        if self.format == "image2" or self.format.endswith("_pipe"):  # each packet is a file
            if packets is None:
                self.rewind()
                with self.reading():
                    packets = list(islice(self.packets([index]), 1))
            return next((exif_orientation(memoryview(first)) for first in packets), 1)
        if index not in self._orientations:
            matrix = display_matrix(self.av.streams[index], self.format)
            # In AVIF and HEIC it rotates before it mirrors, as MIAF demands (ISO/IEC 23000-22, 7.3.6.7).
            self._orientations[index] = matrix_orientation(matrix) if matrix else 1
        return self._orientations[index]
