"""What a JPEG says before its coded data, in one walk: how it stands, its size, which decoders suit it."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from spdl_media._stills.parts import Bytes, byte_view
from spdl_media.orientation import exif_block_orientation

__all__ = ()

_SOF0, _SOF1, _SOF2, _DHT, _SOS, _DQT, _DRI = 0xC0, 0xC1, 0xC2, 0xC4, 0xDA, 0xDB, 0xDD
_APP0, _APP1, _APP14, _APP15, _COM = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
_FRAMES = frozenset((_SOF0, _SOF1, _SOF2))
_TABLES = frozenset((_DHT, _DQT))

# Segments of applications in which FFmpeg's decoder finds nothing that it heeds or remembers. Others can
# change how it reads this picture and the next (AVI1, LJIF, colr, xfrm, mjpg, _JPS).
_KNOWN = {
    0xE0: (b"JFIF\0", b"JFXX\0"),
    0xE1: (b"Exif\0", b"http:/"),
    0xE2: (b"ICC_PROFILE\0", b"MPF\0"),
    0xEC: (b"Ducky",),
    0xED: (b"Photoshop ",),
    0xEE: (b"Adobe",),
}
# Comments by which FFmpeg takes the picture for upside down, of limited range, or one of several.
_TELLING = (b"AVID", b"CS=", b"Intel(R) JPEG", b"Metasoft", b"MULTISCOPE")

_YCC = 1  # Adobe's number for YCbCr
_YCC_IDS = frozenset(((1, 2, 3), (0, 1, 2)))
# Samples across and down of luma and of chroma: 4:4:4, 4:2:2, 4:4:0, 4:2:0 and 4:1:1, and as FFmpeg's encoder
# writes the first two.
_SAMPLINGS = frozenset(
    (
        (0x11, 0x11),
        (0x21, 0x11),
        (0x12, 0x11),
        (0x22, 0x11),
        (0x41, 0x11),
        (0x12, 0x12),
        (0x22, 0x12),
    )
)


class JpegHead(NamedTuple):
    """What the segments before the coded data say.

    Attributes:
        orientation: The number of Exif, 1 to 8.
        width: Of the coded picture.
        height: Of the coded picture.
        is_ycc: It is an 8-bit YCbCr picture, baseline or progressive, with no segment that one decoder
            heeds and another does not: all give the same picture.
        stands_alone: Besides, it is one baseline scan and brings every table that it names: a decoder that
            has read others before gives what a fresh one gives, and is left as it was.
    """

    orientation: int
    width: int
    height: int
    is_ycc: bool
    stands_alone: bool


def read_jpeg_head(data: Bytes) -> JpegHead | None:
    """Read the segments of a JPEG up to its first scan. Nothing is copied but tables.

    Returns:
        ``None`` where the data is no JPEG whose segments follow each other without a gap, up to a scan.
    """
    try:
        return _read(byte_view(data))
    except (IndexError, struct.error):
        return None


def _read(view: memoryview) -> JpegHead | None:
    if view[0] != 0xFF or view[1] != 0xD8:
        return None
    position, tables, ordinary = 2, 0, True
    frame, frame_marker, exif = b"", 0, None
    while True:
        marker, start = view[position + 1], position + 4
        end = position + 2 + (view[position + 2] << 8 | view[position + 3])
        if view[position] != 0xFF or marker < _SOF0 or end < start or end > len(view):
            return None
        if marker == _SOS:
            break
        if marker in _TABLES:
            tables |= _defined(marker, bytes(view[start:end]))
        elif marker in _FRAMES:
            frame, frame_marker = bytes(view[start:end]), marker
        elif marker == _APP1 and exif is None and bytes(view[start : start + 6]) == b"Exif\0\0":
            exif = view[start:end]
        elif marker >= _APP0:
            ordinary = ordinary and _is_ordinary(marker, view[start:end])
        elif marker != _DRI:
            return None
        position = end
    if len(frame) < 6:
        return None
    is_ycc = ordinary and _is_ycc(frame)
    return JpegHead(
        1 if exif is None else exif_block_orientation(exif),
        frame[3] << 8 | frame[4],
        frame[1] << 8 | frame[2],
        is_ycc,
        is_ycc and frame_marker == _SOF0 and _brings(tables, frame, bytes(view[start:end])),
    )


def _is_ordinary(marker: int, body: memoryview) -> bool:
    begin = bytes(body[:16])
    if marker == _COM:
        return not begin.startswith(_TELLING)
    if marker > _APP15 or not begin.startswith(_KNOWN.get(marker, ())):
        return False
    return marker != _APP14 or (len(body) >= 12 and body[11] == _YCC)


def _is_ycc(frame: bytes) -> bool:
    """Whether the body of a frame header is that of an 8-bit YCbCr picture in one of the usual samplings."""
    return (
        len(frame) == 15
        and frame[0] == 8
        and frame[5] == 3
        and any(frame[1:3])
        and any(frame[3:5])
        and (frame[6], frame[9], frame[12]) in _YCC_IDS
        and (frame[7], frame[10]) in _SAMPLINGS
        and frame[10] == frame[13]
    )


# Tables as bits of a number: those of Huffman codes by their class and number, 0x00 to 0x1F, and above them
# those of quantisation.
_QUANTISATION = 32


@lru_cache(maxsize=256)  # most cameras and programs write the same ones again and again
def _defined(marker: int, body: bytes) -> int:
    """The tables that a segment defines; none if they do not fill it."""
    position = tables = 0
    while position < len(body):
        kind = body[position]
        if marker == _DQT:
            tables |= 1 << _QUANTISATION + (kind & 15)
            position += 129 if kind >> 4 else 65
        else:
            tables |= 1 << (kind & 31)
            position += 17 + sum(body[position + 1 : position + 17])
    return tables if position == len(body) else 0


def _brings(tables: int, frame: bytes, scan: bytes) -> bool:
    """Whether the scan has all three components, in one go, and their tables were defined."""
    if len(scan) != 10 or scan[0] != 3 or scan[7:] != b"\0\x3f\0":
        return False
    named = 0
    for index in (8, 11, 14):
        named |= 1 << _QUANTISATION + (frame[index] & 15)
    for index in (2, 4, 6):
        named |= 1 << (scan[index] >> 4) | 1 << (16 | scan[index] & 15)
    return named & ~tables == 0 and scan[1:6:2] == frame[6:15:3]
