"""Detect truncated files of containers, by the sizes that they state."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

from spdl_media.parts import CAF, IFF, RIFF, Bytes, Part, Read, read_boxes

_Check: TypeAlias = Callable[[Read, int], str | None]


def missing_after(size: int, before: str) -> str:
    """Return the clause that the data of a file ends too early."""
    return f"the data ends after {size} bytes, {before}"


def short_of(size: int, needed: int, what: str) -> str | None:
    """Return the clause that the data ends before ``what`` does; ``None`` if there are enough bytes."""
    if size >= needed:
        return None
    return missing_after(size, f"but {what} should end at byte {needed}")


# Limit of steps, each a small read. A fragmented MP4 of many hours takes some thousand.
_MAX_STEPS = 1 << 14

# Writers that cannot seek back put placeholders for sizes: FFmpeg 2**32 - 1, SoX numbers from 0x7ffff000 up,
# others 0.
_UNKNOWN_SIZE = 0x7FFFF000
_UNKNOWN_CAF_SIZE = 1 << 62  # FFmpeg writes -1

_TS_PACKET = 188


def missing_end(read: Read, size: int) -> str | None:
    """Describe what is missing at the end of a container file of ``size`` bytes.

    WAV, AVI, AIFF, AU, CAF, MP4, MOV, Matroska and WebM are detected wherever they are truncated; Ogg and
    MPEG-TS only if they end inside a page or packet.

    Returns:
        A clause such as ``"the data ends after 512 bytes, but the chunk data should end at byte 1024"``, or
        ``None`` if the file is complete or its format does not tell.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    head = read(0, 2 * _TS_PACKET + 1)
    try:
        for position, signature, check in _CONTAINER_CHECKS:
            if head[position : position + len(signature)] == signature:
                return check(read, size)
    except struct.error:
        return missing_after(size, "inside a header")
    rest = size % _TS_PACKET
    if rest and head[::_TS_PACKET] == b"GGG":  # an MPEG transport stream
        return short_of(size, size - rest + _TS_PACKET, "the last packet")
    return None


# Formats whose chunk "data" has no size if it was written to a pipe.
_OPEN_ENDED = {b"RIFF": (RIFF, _UNKNOWN_SIZE), b"caff": (CAF, _UNKNOWN_CAF_SIZE)}


def is_open_ended(head: Bytes) -> bool:
    """Whether an audio file does not state the size of its samples, which then reach to its end."""
    form, unknown = _OPEN_ENDED.get(bytes(head[:4]), (None, 0))
    if form is None:
        return False
    with suppress(struct.error):
        for kind, start, end in form.of(memoryview(head)):
            if kind == b"data":
                return not 0 < end - start < unknown
    return False


def missing_packets(streams: Iterable[Any], size: int) -> str | None:
    """Describe what is missing from an MP4 whose boxes are complete, from FFmpeg's index of its packets."""
    last = [stream.index_entries[-1] for stream in streams if stream.index_entries]
    end = max((entry.pos + entry.size for entry in last), default=0)
    return short_of(size, end, "the last packet")


def _chunk(
    form: Callable[[Read, int], Iterable[Part]], wanted: bytes, unknown: int = _UNKNOWN_SIZE
) -> _Check:
    """Make a check that the chunk with the samples is complete."""

    def check(read: Read, size: int) -> str | None:
        end = size
        for kind, start, end in islice(form(read, size), _MAX_STEPS):
            if kind == wanted:
                is_known = 0 < end - start < unknown
                return short_of(size, end, f"the chunk {wanted.decode()}") if is_known else None
        return short_of(size, end + end % 2, "the last chunk")

    return check


def _avi(read: Read, size: int) -> str | None:
    """Check an AVI: one or more RIFF forms, each with one list ``movi``, which an index may follow."""
    steps = iter(range(_MAX_STEPS))  # one limit for all forms together
    for form, position, end in RIFF._replace(start=0).read(read, size - 11):
        if form != b"RIFF":
            return None  # padding, an index or other data after the last form
        if not 0 < end - position < _UNKNOWN_SIZE:
            return None
        start = position + 4
        for _ in steps:
            if start + 12 > size:
                return short_of(size, start + 12, "the header of the list movi")
            kind, length, name = struct.unpack("<4sI4s", read(start, 12))
            if kind == b"LIST" and name == b"movi":
                if 0 < length < _UNKNOWN_SIZE and start + 8 + length > size:
                    return short_of(size, start + 8 + length, "the list movi")
                break
            start += 8 + length + length % 2
    return None


def _mp4(read: Read, size: int) -> str | None:
    found, end = False, 0
    for kind, _, end in islice(read_boxes(read, 0, size), _MAX_STEPS):
        if not kind.isascii():
            return None  # not a box
        found |= kind == b"mdat"
        # Some writers count the header of mdat twice. missing_packets() checks the packets themselves.
        slack = 8 if kind == b"mdat" else 0
        if kind in (b"moov", b"mdat", b"moof") and end > size + slack:
            return short_of(size, end, f"the box {kind.decode()}")
    is_cut = end + 8 > size  # otherwise the walk stopped at something that is not a box
    return missing_after(size, "before the box mdat") if is_cut and not found else None


def _au(read: Read, size: int) -> str | None:
    start, length = struct.unpack_from(">II", read(0, 12), 4)
    return short_of(size, start + length, "the audio data") if 0 < length < _UNKNOWN_SIZE else None


def _matroska(read: Read, size: int) -> str | None:
    head = read(0, 4096)
    position, length = _ebml_size(head, 4)
    position += length or 0
    if head[position : position + 4] != b"\x18\x53\x80\x67":
        return None  # the segment, which holds everything else, does not follow the header
    start, length = _ebml_size(head, position + 4)
    return None if length is None else short_of(size, start + length, "the segment")


def _ebml_size(data: Bytes, position: int) -> tuple[int, int | None]:
    """Return the start of an element's payload, and its size; ``None``: unknown, as in live streams."""
    (first,) = struct.unpack_from("B", data, position)
    # The number of zero bits before the first 1 is the number of bytes that follow; all ones after it mean
    # "unknown".
    width = 9 - first.bit_length()
    (value,) = struct.unpack_from(f"{width}s", data, position)
    number = int.from_bytes(value, "big") - (1 << 7 * width)
    return position + width, None if number == (1 << 7 * width) - 1 else number


# The largest page: header, table of segments, 255 segments of 255 bytes.
_OGG_PAGE = 27 + 255 + 255 * 255


def _ogg(read: Read, size: int) -> str | None:
    """Check that the last page is complete. Missing pages go unnoticed: live recordings have no last page."""
    start = max(0, size - _OGG_PAGE)
    tail = bytes(read(start, _OGG_PAGE))
    # With the version byte 0, because the four letters may occur in coded data.
    position = tail.rfind(b"OggS\0")
    if position < 0:
        return None
    (segments,) = struct.unpack_from("B", tail, position + 26)
    lengths = struct.unpack_from(f"{segments}B", tail, position + 27)
    return short_of(size, start + position + 27 + segments + sum(lengths), "the last page")


_CONTAINER_CHECKS: tuple[tuple[int, bytes, _Check], ...] = (
    # The size of the RIFF form is not checked: it is wrong in many complete files.
    (8, b"WAVE", _chunk(RIFF.read, b"data")),
    (8, b"AVI ", _avi),
    (0, b"FORM", _chunk(IFF.read, b"SSND")),
    (0, b".snd", _au),
    (0, b"caff", _chunk(CAF.read, b"data", unknown=_UNKNOWN_CAF_SIZE)),
    (4, b"ftyp", _mp4),
    (4, b"moov", _mp4),
    (0, b"\x1a\x45\xdf\xa3", _matroska),
    (0, b"OggS", _ogg),
)
