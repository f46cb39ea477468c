"""Read from headers what PyAV does not expose, or FFmpeg finds only by decoding frames.

These are the display matrix, and the parameters of H.264 in MP4 and of VP9 in WebM.

See:
    ITU-T H.264, 7.3.2.1.1 (sequence parameter set), 9.1 (numbers of variable length), annex E (usability).
    ISO/IEC 14496-15, 5.3.3.1 (box avcC). VP9 bitstream specification, 6.2 (uncompressed header).
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from av.container import InputContainer

from spdl_media._ffmpeg import LogState
from spdl_media.codec import VideoCodec, muxed_header
from spdl_media.coded_units import length_units
from spdl_media.config import format_config
from spdl_media.formats import COLOR_TABLES
from spdl_media.inputs import Input
from spdl_media.packet_table import boxes_at
from spdl_media.parts import MATROSKA, boxes, ebml_size, read_moov
from spdl_media.stills import HEAD_SIZE

__all__ = ()


def open_known(input: Input, *, audio: bool) -> InputContainer | None:
    """Open an MP4 of one H.264 video, or a WebM of one of VP9, so that FFmpeg does not decode it.

    Args:
        input: The source.
        audio: Whether the parameters of audio streams are needed.

    Returns:
        PyAV's container; ``None``: the header states less than FFmpeg finds by decoding, or reading it may
        take long.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: FFmpeg cannot open it.
    """
    # FFmpeg logs an error for each decoder that it may not open, which the user must not see.
    if LogState.forwarded:
        return None
    header: _H264 | _VP9 | None = None
    if input.is_local and input.head(8)[4:] == b"ftyp":
        moov = read_moov(input.read_at, input.size(), _LONGEST_INDEX, 8)
        moov = moov if len(moov) < _LONG else _without_tables(moov)
        if _COVER not in moov and _ENCRYPTION not in moov:
            header = _H264.of_mp4(moov)
    elif input.head(4) == MATROSKA:
        # Not H.264: FFmpeg has to decode it to state the start and the decode timestamps of B-frames.
        header = _VP9.of_webm(input)
    if header is None or (audio and header.audio is None):
        return None
    tries = (audio and header.audio) or _NO_DECODERS
    container = input.open(format_config(header.format, tries))
    codecs = [stream.codec_context for stream in container.streams.audio]
    is_heard = tries == _NO_DECODERS or all(getattr(codec, "format", None) for codec in codecs)
    video = container.streams.video
    is_one = len(video) == 1 and video[0].codec_context is not None
    return container if is_heard and is_one and header.complete(video[0], input) else None


_NO_DECODERS = "none"  # FFmpeg has no decoder of this name, so it opens none

# Reading a longer index takes more time than is saved. A damaged header may state any size.
_LONGEST_INDEX = 1 << 20
# From here on, all searches together take longer than to walk the boxes of some tracks.
_LONG = 1 << 15


def _without_tables(moov: bytes) -> bytes:
    """Return the parts of the index of an MP4 that are searched; of tables of samples, only their names."""
    view, kept = memoryview(moov), list[bytes | memoryview]()
    with suppress(struct.error):  # the file may be truncated
        kept += [view[start:end] for kind, start, end in boxes(view) if kind != b"trak"]
        for media in boxes_at(view, "trak/mdia"):
            kept += [b"hdlr", *boxes_at(media, "hdlr")]
            for tables in boxes_at(media, "minf/stbl"):
                for kind, start, end in boxes(tables):
                    kept.append(tables[start:end] if kind == b"stsd" else kind)
        return b"".join(kept)
    return moov


_HANDLERS = re.compile(rb"hdlr.{8}(vide|soun)", re.DOTALL)
# Boxes of a cover image and of encryption.
_COVER, _ENCRYPTION = b"covr", b"sinf"


class _H264(NamedTuple):
    """An MP4 of one H.264 video. Its sequence parameter set states what a decoder finds.

    Attributes:
        unit: The whole set.
        size: Width and height in pixels.
        pix_fmt: Pixel format, of limited range.
        reorder_depth: Number of frames that a decoder delays; ``None``: only the index tells.
        context: Attributes of PyAV's codec context.
        audio: Decoders of the audio; ``None``: there are several streams, or the codec is unusual.
        format: FFmpeg's name of the format.
    """

    unit: bytes
    size: tuple[int, int]
    pix_fmt: str
    reorder_depth: int | None
    context: dict[str, Any]
    audio: str | None
    format: str = "mov"

    @classmethod
    def of_mp4(cls, moov: bytes) -> _H264 | None:
        found = _CONFIG.search(moov)
        if found is None:
            return None
        start = found.end()
        end = start + int.from_bytes(found[1], "big")
        kinds, unit = _HANDLERS.findall(moov), moov[start:end]
        if moov.count(b"avcC") + kinds.count(b"vide") != 2 or not _PICTURE_SET.match(moov, end):
            return None
        with suppress(ValueError):
            bits = _Bits(unit[1:])
            frames, (context, depth) = _read_frames(bits), _read_usability(bits)
            depth = 0 if depth is None and frames.in_order else depth
            if frames.pix_fmt and (depth is not None or b"ctts" in moov):
                audio = {0: "", 1: "aac" if b"mp4a" in moov else None}.get(kinds.count(b"soun"))
                return cls(unit, frames.size, frames.pix_fmt, depth, context, audio)
        return None

    def complete(self, stream: Any, input: Input) -> bool:
        """Set what the header states in an open video stream, of which FFmpeg has decoded nothing.

        Returns:
            Whether all is set. Otherwise the file contradicts the header, or lacks its first frame.

        Raises:
            SourceError: The first frame cannot be read.
        """
        video = stream.codec_context
        if (video.name, video.width, video.height) != ("h264", *self.size):
            return False
        depth = max(video.reorder_depth, self.reorder_depth or 0)
        if (self.reorder_depth is None and not depth) or not self._is_begun(stream, input):
            return False
        if not _set_stated(video, self.context):
            return False
        video.reorder_depth = depth
        is_full = video.color_range == _FULL_RANGE and self.pix_fmt == "yuv420p"
        video.pix_fmt = "yuvj420p" if is_full else self.pix_fmt
        return True

    def _is_begun(self, stream: Any, input: Input) -> bool:
        """Whether the first packet is a whole key frame, and states nothing that differs from this header."""
        first = next(iter(stream.index_entries), None)
        data = b"" if first is None else input.read_at(first.pos, first.size)
        units = list(map(bytes, length_units(memoryview(data))))
        if first is None or not all(units) or sum(4 + len(unit) for unit in units) != first.size:
            return False
        kinds = [unit[0] & 31 for unit in units]
        # The message 147 states another transfer of the colours.
        says_else = any(
            (kind == _SET and unit != self.unit) or (kind == _MESSAGE and 147 in unit)
            for kind, unit in zip(kinds, units, strict=True)
        )
        return not says_else and _KEY in kinds and _starts_picture(units[kinds.index(_KEY)])


def _starts_picture(unit: bytes) -> bool:
    """Whether a slice is the first one, of type I, and refers to picture parameter set 0."""
    bits = _Bits(unit[1:9])
    with suppress(ValueError):
        return bits.number() == 0 and bits.number() in (2, 7) and bits.number() == 0
    return False


# Types of NAL units: part of a picture that needs no other, messages, sequence parameter set.
_KEY, _MESSAGE, _SET = 5, 6, 7
# Lengths of 4 bytes, one sequence parameter set, and one picture parameter set: number 0, for set 0.
_CONFIG = re.compile(rb"avcC\x01.{3}\xff\xe1(..)(?=[\x27\x47\x67])", re.DOTALL)
_PICTURE_SET = re.compile(rb"\x01..[\x28\x48\x68][\xc0-\xff]", re.DOTALL)
_FULL_RANGE = 2


class _VP9(NamedTuple):
    """A WebM of one VP9 video. Its first frame states what a decoder finds.

    Attributes:
        start: Start of the first key frame.
        audio: As for :class:`_H264`.
        format: FFmpeg's name of the format.
    """

    start: bytes
    audio: str = "aac,opus,vorbis"
    format: str = "matroska"

    @classmethod
    def of_webm(cls, input: Input) -> _VP9 | None:
        head = bytes(input.head(HEAD_SIZE))
        tracks, _, cluster = head.partition(_CLUSTER)
        # Without a stated duration, FFmpeg finds the frame rate in many packets.
        is_one = tracks.count(b"V_") == tracks.count(b"V_VP9") == 1 and _FRAME_DURATION in tracks
        found = _BLOCK.search(cluster) if is_one else None
        if found is None:
            return None
        start, size = ebml_size(head, len(head) - len(cluster) + found.start() + 1)
        return cls(found[1]) if start + (size or 0) <= input.size() else None

    def complete(self, stream: Any, _: Input) -> bool:
        """Do what :meth:`_H264.complete` does."""
        video, start = stream.codec_context, self.start
        bits, depth = f"{int.from_bytes(start[4:10], 'big'):048b}", ""
        if start[0] & 16:  # profile 2
            depth, bits = "12le" if bits[0] == "1" else "10le", bits[1:]
        space, width, height = (int(bits[a:b], 2) for a, b in ((0, 3), (4, 20), (20, 36)))
        stated = video.name, video.width, video.height
        if space > 5 or stated != ("vp9", width + 1, height + 1):
            return False
        video.pix_fmt = f"yuv420p{depth}"
        return _set_stated(video, {"color_range": 1 + int(bits[3]), "colorspace": _SPACES[space]})


_CLUSTER, _FRAME_DURATION = b"\x1f\x43\xb6\x75", b"\x23\xe3\x83"  # IDs of elements of Matroska
# The start of a key frame of profile 0 or 2, which are 4:2:0, and a block of Matroska with one.
_VP9_KEY = re.compile(rb"[\x80-\x83\x90-\x93]I\x83B.{8}", re.DOTALL)
_SPACES = (2, 5, 1, 6, 7, 9)  # as FFmpeg numbers them
_BLOCK = re.compile(
    rb"[\xa1\xa3][\x10-\xff].{0,3}[\x81-\xfe].{3}(" + _VP9_KEY.pattern + b")", re.DOTALL
)


def _set_stated(video: Any, context: dict[str, Any]) -> bool:
    """Set attributes of a codec context. Return False if the container states other colours."""
    for name, value in context.items():
        if name in _UNSPECIFIED and getattr(video, name) not in (_UNSPECIFIED[name], value):
            return False
        setattr(video, name, value)
    return True


# Numbers of colours that the container does not state.
_UNSPECIFIED = {"color_range": 0, "color_primaries": 2, "color_trc": 2, "colorspace": 2}

# A sequence parameter set after a start code, or as the first of MP4's decoder configuration.
_FIRST_SET = re.compile(rb"(?:\x00\x00\x01|\A\x01.{7})[\x07\x27\x47\x67](.{8,})", re.DOTALL)


@lru_cache(maxsize=16)
def may_have_fields(codec: VideoCodec) -> bool:
    """Whether a stream is H.264 that may be coded as fields; True if the extradata of H.264 does not tell."""
    if codec.name != "h264":
        return False
    found = _FIRST_SET.search(codec.extradata or b"")
    with suppress(ValueError):
        return found is None or _read_frames(_Bits(found[1])).may_be_fields
    return True


class _Bits:
    """Numbers in the bytes of a NAL unit. Reading past the end raises a ValueError."""

    def __init__(self, unit: bytes) -> None:
        data = unit.replace(b"\0\0\3", b"\0\0")  # remove the emulation prevention bytes
        self._bits, self._place = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}", 0

    def take(self, count: int = 1) -> int:
        start, self._place = self._place, self._place + count
        if self._place > len(self._bits):
            raise ValueError("the unit ends")
        return int(self._bits[start : self._place], 2)

    def number(self, count: int = 1) -> int:
        """Read Exp-Golomb numbers, and return the last."""
        for _ in range(count):
            zeros = self._bits.index("1", self._place) - self._place
            last = self.take(2 * zeros + 1) - 1
        return last


class _Frames(NamedTuple):
    pix_fmt: str | None  # None: an unusual one
    in_order: bool  # shown in the order in which they are coded
    may_be_fields: bool
    size: tuple[int, int]


# Profiles whose sequence parameter set has chroma format, bit depth and scaling lists.
_HIGH_PROFILES = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})
# By chroma format, and bits of luma and chroma above 8.
_PIX_FMTS = {(1, 0, 0): "yuv420p", (1, 2, 2): "yuv420p10le"}


def _read_frames(bits: _Bits) -> _Frames:
    profile, pix_fmt = bits.take(24) >> 16, _PIX_FMTS.get((1, 0, 0))
    bits.number()  # of the set
    if profile in _HIGH_PROFILES:
        chroma = bits.number()
        if chroma == 3:
            bits.take()
        pix_fmt = _PIX_FMTS.get((chroma, bits.number(), bits.number()))
        if bits.take(2) & 1:
            raise ValueError("scaling lists, whose length varies")
    order = bits.number(2)
    if order == 1:
        raise ValueError("a list of offsets, which encoders do not write in practice")
    bits.number(2 if order == 0 else 1)
    in_order = not bits.take() and order == 2  # without gaps
    width, height = 16 * (bits.number() + 1), 16 * (bits.number() + 1)
    fields = 1 - bits.take()
    bits.take(1 + fields)
    if bits.take():
        width -= 2 * (bits.number() + bits.number())
        height -= 2 * (bits.number() + bits.number())
    return _Frames(pix_fmt, in_order, bool(fields), (width, height * (1 + fields)))


def _read_usability(bits: _Bits) -> tuple[dict[str, Any], int | None]:
    """Return attributes of PyAV's codec context, and how many frames are reordered; ``None``: not stated."""
    context: dict[str, Any] = {}
    if not bits.take():
        return context, None
    if bits.take():
        kind = bits.take(8)
        width, height = (kind, 1) if kind < 255 else (bits.take(16), bits.take(16))
        if 1 < kind < 255 or (kind and not 0 < height <= 8 * width <= 64 * height):
            raise ValueError("a pixel shape of the table, or an extreme one")
        if kind:
            context["sample_aspect_ratio"] = Fraction(width, height)
    if bits.take():
        bits.take()  # overscan
    if bits.take():
        context |= _read_color(bits)
    if bits.take():
        bits.number(2)  # places of chroma
    if bits.take():
        bits.take(65)  # frame rate
    if bits.take(2):
        raise ValueError("models of buffers, which few encoders write")
    bits.take()
    if not bits.take():
        return context, None
    bits.take()
    bits.number(4)
    depth, kept = bits.number(), bits.number()
    if depth > min(kept, 16):
        raise ValueError("more frames are reordered than kept")
    return context, depth


def _read_color(bits: _Bits) -> dict[str, Any]:
    context = {"color_range": 1 + bits.take(4) % 2}
    if bits.take():
        context |= {name: bits.take(8) for name in ("color_primaries", "color_trc", "colorspace")}
    for name, number in context.items():
        if number not in {*COLOR_TABLES[name], 2} - {0}:
            raise ValueError("a reserved number")
    return context


# Codecs that MP4 supports and QuickTime does not. For ProRes, DV and others, the opposite is true.
_ONLY_IN_MP4 = frozenset({"av1", "ffv1", "vp9"})
# The display matrix of a track that is not rotated.
_STRAIGHT = (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


def display_matrix(stream: Any, format: str) -> tuple[int, ...] | None:
    """Return the display matrix of a video stream, read from an MP4 or QuickTime header written for it.

    Args:
        stream: A stream of the open file.
        format: FFmpeg's name of the container's format.

    Returns:
        Its nine numbers; ``None``: the container states none, or the matrix changes nothing.
    """
    if not ("mp4" in format or "matroska" in format):
        return None
    # PyAV exposes a stream's side data only on decoded frames. A muxer writes it into the track header
    # (tkhd), which takes about 0.1 ms, while decoding a frame takes up to 10 ms.
    is_in_mov = stream.codec_context.codec.canonical_name not in _ONLY_IN_MP4
    options = {"movflags": "empty_moov", "strict": "-2"}
    written = is_in_mov and muxed_header(stream, "mov", options)
    written = written or muxed_header(stream, "mp4", options)
    start = written.find(b"tkhd") + 4
    if start < 4:
        return None
    fixed = 20 if written[start] == 0 else 32  # times and duration, of 32 or 64 bits by version
    matrix = struct.unpack_from(">9i", written, start + 4 + fixed + 16)
    return None if matrix == _STRAIGHT else matrix
