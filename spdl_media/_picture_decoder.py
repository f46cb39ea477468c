"""Packets of a video or a still to frames: damage told from lead-in, cut to the window, filtered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

import av

from spdl_media._container import frame_matrix
from spdl_media._decoding.path import PictureFilter
from spdl_media._ffmpeg import AvPacket, describe, ffmpeg_log, says_checksum_failed
from spdl_media.codec import VideoCodec, close_decoder, make_decoder
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.frames import FrameMetadata
from spdl_media.orientation import matrix_orientation
from spdl_media.packets import PacketMetadata
from spdl_media.timing import Window, ticks_to_seconds


class PictureDecoder:
    """Decodes packets in order and gives the frames that lie in the window.

    Three things are kept apart. Lead-in cannot be decoded yet, because the stream was cut in mid-group: it is
    skipped and counted. Frames before the window are there for those in it: they are left out. Damage is
    what the decoder reports: it is raised, kept or dropped as ``config.on_corrupt`` says.
    """

    def __init__(self, codec: VideoCodec, facts: PacketMetadata, config: DecodeConfig) -> None:
        self._codec = codec
        self._config = config
        self.facts = facts
        self.discarded: frozenset[int] = frozenset()
        self.needs_key = True
        self.orientation = facts.orientation
        self.num_skipped = 0
        self.num_dropped = 0
        self.corrupt_pts: frozenset[int | None] = frozenset()
        self._context = make_decoder(codec, config, facts.source)
        self._packet_index = -1
        self._first_key_pts: int | None = None
        self._leading: set[int | None] = set()
        self._next_pts: int | None = None
        self._step = self._frame_step()
        self._started = False
        self._states_orientation = False

    def close(self) -> None:
        """Stop the decoder; needed only where it has threads of its own."""
        close_decoder(self._context, self._config)

    def __del__(self) -> None:
        if hasattr(self, "_context"):  # else it could not be opened
            self.close()

    def decode(self, packet: AvPacket | None) -> Iterator[av.VideoFrame]:
        """Frames that are ready after this packet; ``None`` gives those that are still held back."""
        if packet is not None:
            self._packet_index += 1
            self._step = packet.duration or self._step
            if not self._started and self.orientation == 1:
                # PyAV's frame and its side data hold each other, until the garbage collector comes: look at
                # it only if there is something to see.
                self._states_orientation |= states_orientation(packet, self._codec)
            if self.needs_key and not packet.is_keyframe:
                self._skip(packet.pts)
                return
            if self.needs_key:
                self.needs_key, self._first_key_pts = False, packet.pts
            if self._is_lead_in(packet.pts):
                self._leading.add(packet.pts)
        for frame in self._send(packet):
            if self._wanted(frame):
                yield frame
        if packet is None:
            self._skip_leading()

    def _skip_leading(self) -> None:
        """Most decoders leave pictures out that refer to what is not there, without a word."""
        for pts in self._leading - self.discarded:
            self._skip(pts)
        self._leading.clear()

    def drain(self) -> Iterator[av.VideoFrame]:
        """Frames that are held back, before packets that do not continue these; then it is as new."""
        if self._packet_index < 0:
            return
        yield from self.decode(None)
        self._context.flush_buffers()
        self.needs_key, self._first_key_pts, self._next_pts = True, None, None
        self.discarded = frozenset()
        self._packet_index = -1

    def _send(self, packet: AvPacket | None) -> list[av.VideoFrame]:
        with ffmpeg_log() as lines:
            try:
                frames: list[av.VideoFrame] = self._context.decode(packet)  # type: ignore[attr-defined]  # video
                if packet is not None and says_checksum_failed(lines):
                    # FFV1 and HEVC may carry checksums; FFmpeg logs that one is wrong, and goes on.
                    self.corrupt_pts |= {packet.pts}
                return frames
            except av.FFmpegError as error:
                cause, text = error, describe(error, lines)
        pts = None if packet is None else packet.pts
        if self._is_lead_in(pts):
            return []  # counted at the end, as those are that fail without an error
        if packet is not None and _needs_newer_pyav(packet, self._codec):
            raise DecodeError(
                f"animated WebP is decoded from PyAV 19 on, and this is {av.__version__}, the last for "
                "CPython 3.11. Use CPython 3.12 or newer with PyAV 19",
                source=self.facts.source,
            ) from cause
        if self._config.on_corrupt == "raise":
            raise self._error(text, pts) from cause
        self.num_dropped += 1
        return []

    def _wanted(self, frame: av.VideoFrame) -> bool:
        frame.time_base = self._codec.time_base  # PyAV leaves it out of the frames held back
        self._complete_pts(frame)
        if not (frame.is_corrupt and self._is_lead_in(frame.pts)):
            self._leading.discard(frame.pts)
        if self._states_orientation:
            self._states_orientation = False
            matrix = frame_matrix(frame)
            self.orientation = matrix_orientation(matrix) if matrix else 1
        self._started = True
        if frame.pts in self.discarded:
            return False
        is_corrupt = frame.is_corrupt or frame.pts in self.corrupt_pts
        if is_corrupt and not self._keeps_corrupt(frame):
            return False
        return frame.pts is None or self._seconds(frame.pts) in self.facts.window

    def _keeps_corrupt(self, frame: av.VideoFrame) -> bool:
        if self._is_lead_in(frame.pts):
            return False
        before_end = Window(None, self.facts.window.end)
        if frame.pts is not None and self._seconds(frame.pts) not in before_end:
            return False
        if self._config.on_corrupt == "raise":
            raise self._error("the decoder reports that the frame is damaged", frame.pts)
        if self._config.on_corrupt == "drop":
            if frame.pts is None or self._seconds(frame.pts) in self.facts.window:
                self.num_dropped += 1
            return False
        return True

    def _is_lead_in(self, pts: int | None) -> bool:
        """Pictures shown before the first key frame refer to a group that is not there."""
        return pts is not None and self._first_key_pts is not None and pts < self._first_key_pts

    def _skip(self, pts: int | None) -> None:
        if pts is None or self._seconds(pts) in self.facts.window:
            self.num_skipped += 1

    def _complete_pts(self, frame: av.VideoFrame) -> None:
        """Raw streams have no timestamps: count frames at the stated rate, as players do."""
        if frame.pts is None and self._step and self._codec.name not in _STILL_CODECS:
            frame.pts = self._first_pts() if self._next_pts is None else self._next_pts
        if frame.pts is not None:
            self._next_pts = frame.pts + self._step

    def _first_pts(self) -> int:
        return round(self.facts.zero / self._codec.time_base)

    def _frame_step(self) -> int:
        """Ticks from frame to frame where packets do not tell; 0: unknown."""
        if not self._codec.frame_rate:
            return 0
        return max(1, round(1 / (self._codec.frame_rate * self._codec.time_base)))

    def _seconds(self, pts: int) -> Fraction:
        return ticks_to_seconds(pts, self._codec.time_base, self.facts.zero)

    def _remedy(self) -> str:
        if self._codec.frame_rate is not None:
            return ". decode_config(on_corrupt='keep') keeps such frames, 'drop' leaves them out"
        if self._codec.name in _PARTLY_DECODED:
            return ". decode_config(on_corrupt='keep') decodes what can be decoded"
        return ""

    def _error(self, text: str, pts: int | None) -> DecodeError:
        seconds = None if pts is None else float(self._seconds(pts))
        at = "" if seconds is None else f" at {seconds:.3f} s"
        return DecodeError(
            f"damaged {self._codec.name} data{at} (packet {self._packet_index}): {text}{self._remedy()}",
            source=self.facts.source,
            pts_seconds=seconds,
            packet_index=self._packet_index,
        )


# Stills of which FFmpeg gives a part; of the others it gives the whole or nothing.
_PARTLY_DECODED = frozenset({"mjpeg", "gif", "qoi"})
_STILL_CODECS = frozenset({"png", "webp", "bmp", "tiff", "jpeg2000", "gif", "targa"})


def _needs_newer_pyav(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether it is an animated WebP (the flag 2 of its VP8X chunk), which FFmpeg 8.0 does not decode."""
    if codec.name != "webp" or int(av.__version__.partition(".")[0]) >= 19:
        return False
    head = bytes(memoryview(packet)[:21])
    return head[12:16] == b"VP8X" and bool(head[20] & 2)


class PicturePath:
    """Packets to decoded pictures, cut to the window, turned upright, and filtered, in this order."""

    def __init__(
        self,
        codec: VideoCodec,
        facts: PacketMetadata,
        filter_desc: str | None,
        config: DecodeConfig,
    ) -> None:
        self.decoder = PictureDecoder(codec, facts, config)
        self._filter = PictureFilter(codec, filter_desc, config)

    def push(self, packets: Iterable[AvPacket | None]) -> Iterator[av.VideoFrame]:
        """Frames that come out for these packets; a final ``None`` gives those held back."""
        for packet in packets:
            for frame in self.decoder.decode(packet):
                yield from self._filter.push(frame, self.decoder.orientation)
            if packet is None:
                yield from self._filter.flush()

    def drain(self) -> Iterator[av.VideoFrame]:
        """Frames that the decoder holds back, through the same filters, before it starts anew."""
        for frame in self.decoder.drain():
            yield from self._filter.push(frame, self.decoder.orientation)

    def facts(self) -> FrameMetadata:
        """What is to be said of the frames that came out since the last call."""
        decoder = self.decoder
        facts = FrameMetadata(
            decoder.facts.source,
            decoder.facts.zero,
            decoder.facts.window,
            orientation=1 if self._filter.upright else decoder.orientation,
            num_skipped=decoder.num_skipped,
            num_dropped=decoder.num_dropped,
            corrupt_pts=decoder.corrupt_pts | self._filter.copied_corrupt,
        )
        decoder.num_skipped = decoder.num_dropped = 0
        return facts

    def close(self) -> None:
        """Let the decoder's threads come to rest."""
        self.decoder.close()


_DISPLAY_ORIENTATION = 47
_START_CODE = re.compile(rb"\x00\x00\x01")

# Of each codec: bytes of a unit's header, how its first byte tells the type, the type of messages.
_UNITS = {"h264": (1, 0, 31, 6), "hevc": (2, 1, 63, 39)}


def states_orientation(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether a packet carries a message of display orientation.

    See:
        ITU-T H.264 and H.265, 7.3.2.3 (messages), annex D (display orientation), annex B (start codes).
    """
    if codec.name not in _UNITS:
        return False
    header, shift, mask, message = _UNITS[codec.name]
    return any(
        len(unit) > header
        and unit[0] >> shift & mask == message
        and _DISPLAY_ORIENTATION in _message_types(bytes(unit[header:]))
        for unit in _units(memoryview(packet), codec.extradata or b"")
    )


def _units(data: memoryview, extradata: bytes) -> Iterator[memoryview]:
    """The units of a packet, behind start codes as in MPEG-TS or behind their lengths as in MP4."""
    if extradata[:1] != b"\1":  # the version of MP4's decoder configuration
        starts = [match.end() for match in _START_CODE.finditer(data)]
        for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
            yield data[start:end]
        return
    position = 0
    while position + 4 <= len(data):  # lengths of fewer bytes are allowed, and not in use
        size = int.from_bytes(data[position : position + 4], "big")
        yield data[position + 4 : position + 4 + size]
        position += 4 + size


def _message_types(content: bytes) -> Iterator[int]:
    content = content.replace(b"\0\0\3", b"\0\0")  # bytes put in so that no start code appears
    position = 0
    while position + 2 <= len(content):
        kind, position = _number(content, position)
        size, position = _number(content, position)
        yield kind
        position += size


def _number(content: bytes, position: int) -> tuple[int, int]:
    """A number and what follows it; each byte 255 adds to the next."""
    value = 0
    while position < len(content):
        byte = content[position]
        value, position = value + byte, position + 1
        if byte != 255:
            break
    return value, position
