"""Whether a container file is whole, by the sizes that it states itself.

FFmpeg reads a file that was cut short up to its end and says nothing. Formats that state the size of
their data let that be noticed in a few reads, wherever the cut is: WAV, AVI, AIFF, AU, CAF, MP4 and MOV,
Matroska and WebM. Where the cut goes through a page, packet or frame, Ogg, MPEG-TS and MP3 tell as well.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

__all__ = ("missing_end", "mp3_frame_size")

Read: TypeAlias = Callable[[int, int], bytes]
"""Gives up to so many bytes from a position of the file: ``read(position, size)``."""

# A walk through a fragmented MP4 of many hours takes some thousand steps, one small read each.
_MAX_PARTS = 1 << 14

# What writers that cannot go back put for a size they do not know: FFmpeg 2**32 - 1, SoX numbers from
# 0x7ffff000 up, others 0.
_UNKNOWN_SIZE = 0x7FFFF000


def missing_end(read: Read, size: int) -> str | None:
    """Say what is missing from the end of a container file.

    Args:
        read: Gives bytes of the file; fewer than asked for only at its end.
        size: Bytes in the file.

    Returns:
        A clause such as ``"the data ends after 512 bytes, but the chunk data should end at byte 1024"``, or
        ``None`` for a file that is whole, or whose format does not tell.
    """
    head = read(0, 2 * _TS_PACKET + 1)
    try:
        for matches, check in _CHECKS:
            if matches(head):
                return check(read, size)
    except struct.error:
        return f"the data ends after {size} bytes, inside a header"
    return None


def _short(size: int, needed: int, what: str) -> str | None:
    if needed <= size:
        return None
    return f"the data ends after {size} bytes, but {what} should end at byte {needed}"


def _wave(read: Read, size: int) -> str | None:
    # The size of the whole form is wrong in many files whose data are all there, so it is not looked at.
    return _chunks(read, size, "<I", 12, b"data")


def _aiff(read: Read, size: int) -> str | None:
    return _chunks(read, size, ">I", 12, b"SSND")


def _chunks(read: Read, size: int, layout: str, position: int, wanted: bytes) -> str | None:
    """Walk the chunks of a RIFF or IFF form to the one with the data."""
    for _ in range(_MAX_PARTS):
        if position >= size:
            return None if position == size else _short(size, position, "the last chunk")
        header = read(position, 8)
        (length,) = struct.unpack_from(layout, header, 4)
        if header[:4] == wanted:
            known = 0 < length < _UNKNOWN_SIZE
            return (
                _short(size, position + 8 + length, f"the chunk {wanted.decode()}")
                if known
                else None
            )
        position += 8 + length + length % 2
    return None


def _avi(read: Read, size: int) -> str | None:
    """Long files are several RIFF forms, each with one list ``movi``; an index may follow it."""
    position, steps = 0, iter(range(_MAX_PARTS))  # one budget for all forms together
    while position + 12 <= size:
        (length,) = struct.unpack_from("<I", read(position, 8), 4)
        if not 0 < length < _UNKNOWN_SIZE:
            return None
        if short := _movi(read, size, position + 12, steps):
            return short
        position += 8 + length + length % 2
    return None


def _movi(read: Read, size: int, position: int, steps: Iterator[int]) -> str | None:
    for _ in steps:
        if position + 12 > size:
            return _short(size, position + 12, "the header of the list movi")
        header = read(position, 12)
        (length,) = struct.unpack_from("<I", header, 4)
        if header[:4] == b"LIST" and header[8:] == b"movi":
            known = 0 < length < _UNKNOWN_SIZE
            return _short(size, position + 8 + length, "the list movi") if known else None
        position += 8 + length + length % 2
    return None


def _mp4(read: Read, size: int) -> str | None:
    position, found = 0, False
    for _ in range(_MAX_PARTS):
        if position + 8 > size:
            break
        header = read(position, 16)
        (length,) = struct.unpack_from(">I", header)
        kind = header[4:8]
        if length == 1:
            (length,) = struct.unpack_from(">Q", header, 8)
        if length == 0 or not kind.isascii():
            return None  # up to the end of the file, or what follows is no box
        found |= kind == b"mdat"
        if length < 8:
            return None
        if kind in _MP4_BOXES and (
            short := _short(size, position + length, f"the box {kind.decode()}")
        ):
            return short
        position += length
    return None if found else f"the data ends after {size} bytes, before the box mdat"


_MP4_BOXES = (b"moov", b"mdat", b"moof")


def _au(read: Read, size: int) -> str | None:
    start, length = struct.unpack_from(">II", read(0, 12), 4)
    known = 0 < length < _UNKNOWN_SIZE
    return _short(size, start + length, "the sound") if known else None


def _caf(read: Read, size: int) -> str | None:
    position = 8
    for _ in range(_MAX_PARTS):
        if position >= size:
            return None
        header = read(position, 12)
        (length,) = struct.unpack_from(">q", header, 4)
        if header[:4] == b"data":
            return _short(size, position + 12 + length, "the chunk data") if length > 0 else None
        position += 12 + max(0, length)
    return None


_EBML_SEGMENT = b"\x18\x53\x80\x67"


def _matroska(read: Read, size: int) -> str | None:
    head = read(0, 4096)
    position, length = _ebml_size(head, 4)
    position += length or 0
    if head[position : position + 4] != _EBML_SEGMENT:
        return None
    start, length = _ebml_size(head, position + 4)
    return None if length is None else _short(size, start + length, "the segment")


def _ebml_size(data: bytes, position: int) -> tuple[int, int | None]:
    """Where the payload of an element begins, and its size; None: it is not known, as in live streams."""
    (first,) = struct.unpack_from("B", data, position)
    width = 9 - first.bit_length()
    (value,) = struct.unpack_from(f"{width}s", data, position)
    number = int.from_bytes(value, "big") - (1 << 7 * width)
    return position + width, None if number == (1 << 7 * width) - 1 else number


_OGG_PAGE = 27 + 255 + 255 * 255


def _ogg(read: Read, size: int) -> str | None:
    """Only a page that the cut goes through can be noticed: recordings of live streams have no last page."""
    start = max(0, size - _OGG_PAGE)
    tail = read(start, _OGG_PAGE)
    position = tail.rfind(b"OggS\0")
    if position < 0:
        return None
    (segments,) = struct.unpack_from("B", tail, position + 26)
    lengths = struct.unpack_from(f"{segments}B", tail, position + 27)
    return _short(size, start + position + 27 + segments + sum(lengths), "the last page")


_TS_PACKET = 188


def _transport_stream(_: Read, size: int) -> str | None:
    rest = size % _TS_PACKET
    return _short(size, size - rest + _TS_PACKET, "the last packet") if rest else None


def _is_transport_stream(head: bytes) -> bool:
    return len(head) > 2 * _TS_PACKET and head[: 2 * _TS_PACKET + 1 : _TS_PACKET] == b"GGG"


# Kilobits a second by the index in the header, of layer III in MPEG-1 and in MPEG-2 and 2.5.
_MP3_RATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
_MP3_SAMPLE_RATES = (44100, 48000, 32000)


def mp3_frame_size(header: bytes) -> int | None:
    """Bytes in the MP3 frame that begins with these four; ``None``: no such frame, or one of free size."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return None
    version, rate, sample_rate = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    if version == 1 or rate in (0, 15) or sample_rate == 3:
        return None
    is_mpeg1 = version == 3
    bits = _MP3_RATES[0 if is_mpeg1 else 1][rate] * (144_000 if is_mpeg1 else 72_000)
    return bits // (_MP3_SAMPLE_RATES[sample_rate] >> (3 - version + 1) // 2) + (header[2] >> 1 & 1)


def _riff(kind: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[:4] == b"RIFF" and head[8:12] == kind


def _starts_with(signature: bytes, at: int = 0) -> Callable[[bytes], bool]:
    return lambda head: head[at : at + len(signature)] == signature


_CHECKS: tuple[tuple[Callable[[bytes], bool], Callable[[Read, int], str | None]], ...] = (
    (_riff(b"WAVE"), _wave),
    (_riff(b"AVI "), _avi),
    (_starts_with(b"FORM"), _aiff),
    (_starts_with(b".snd"), _au),
    (_starts_with(b"caff"), _caf),
    (_starts_with(b"ftyp", 4), _mp4),
    (_starts_with(b"moov", 4), _mp4),
    (_starts_with(b"\x1a\x45\xdf\xa3"), _matroska),
    (_starts_with(b"OggS"), _ogg),
    (_is_transport_stream, _transport_stream),
)
