"""Whether a JPEG's header leaves a decoder as it was."""

from __future__ import annotations

import struct

from spdl_media._stills.parts import Bytes, byte_view, jpeg_segments

_SOF0, _DHT, _SOI, _SOS, _DQT, _DRI, _COM = 0xC0, 0xC4, 0xD8, 0xDA, 0xDB, 0xDD, 0xFE

# Segments that say nothing a decoder remembers for the next picture. FFmpeg's also knows AVI1, LJIF, colr,
# xfrm, _JPS and the like, which change how it reads what comes after.
_KNOWN = {
    0xE0: (b"JFIF\0", b"JFXX\0"),
    0xE1: (b"Exif\0", b"http:/"),
    0xE2: (b"ICC_PROFILE\0", b"MPF\0"),
    0xED: (b"Photoshop ",),
    0xEE: (b"Adobe",),
}
# Comments by which FFmpeg takes the picture for upside down, of limited range, or one of several.
_TELLING = (b"AVID", b"CS=", b"Intel(R) JPEG", b"Metasoft", b"MULTISCOPE")


def stands_alone(data: Bytes) -> bool:
    """Whether a decoder that has read other pictures before reads this one as a fresh one does.

    True for a baseline JPEG of three components in one scan, which brings every table that it names and no
    segment that has an effect on the pictures after it. Most are so; ``False`` is always safe.
    """
    try:
        return _stands_alone(byte_view(data))
    except (struct.error, IndexError):
        return False


def _stands_alone(view: memoryview) -> bool:
    tables: set[tuple[int, int]] = set()  # (marker, what follows it), of those that were defined
    frame = b""
    for marker, start, end in jpeg_segments(view):
        if marker in _KNOWN:
            if not bytes(view[start : start + 12]).startswith(_KNOWN[marker]):
                return False
        elif marker == _SOF0:
            frame = bytes(view[start:end])
        elif marker in (_DQT, _DHT):
            _read_tables(marker, bytes(view[start:end]), tables)
        elif marker == _SOS:
            return _is_complete(frame, bytes(view[start:end]), tables)
        elif marker == _COM:
            if bytes(view[start : start + 16]).startswith(_TELLING):
                return False
        elif marker not in (_SOI, _DRI):
            return False
    return False


def _read_tables(marker: int, body: bytes, tables: set[tuple[int, int]]) -> None:
    position = 0
    while position < len(body):
        kind = body[position]
        if marker == _DQT:
            tables.add((marker, kind & 15))
            position += 129 if kind >> 4 else 65
        else:
            tables.add((marker, kind))
            position += 17 + sum(body[position + 1 : position + 17])


def _is_complete(frame: bytes, scan: bytes, tables: set[tuple[int, int]]) -> bool:
    """Whether one scan has all three components, and their tables are there."""
    if len(frame) != 15 or len(scan) != 10 or frame[0] != 8 or frame[5] != 3 or scan[0] != 3:
        return False
    named = {(_DQT, frame[index]) for index in (8, 11, 14)}
    for index in (2, 4, 6):
        named |= {(_DHT, scan[index] >> 4), (_DHT, 0x10 | scan[index] & 15)}
    return named <= tables
