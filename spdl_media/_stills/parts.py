"""Walk the parts of picture files: segments, chunks, boxes, directories. Private to the package.

Each walker yields where the payload of a part starts and ends, as the file declares it; an end may
lie past the data, and it is the caller who decides what that means. A header that is itself cut off
raises ``struct.error``. Nothing is copied, and no walk takes more than ``MAX_PARTS`` steps, so that
a file made of empty parts costs milliseconds.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

__all__ = ()

Bytes: TypeAlias = bytes | bytearray | memoryview
"""What the functions for stills read: anything one byte wide and contiguous is accepted."""

Part: TypeAlias = tuple[bytes, int, int]
"""Kind, first byte of the payload, first byte after it."""

MAX_PARTS = 1 << 16

JPEG_START, JPEG_END, JPEG_SCAN, JPEG_APP1 = 0xD8, 0xD9, 0xDA, 0xE1

# Inside coded data 0xFF is followed by 0x00 or a restart marker (0xD0-0xD7); in JPEG-LS by anything
# below 0x80. What is left are the markers that begin a segment or end the picture.
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")

_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_TIFF_VALUES = {1: "B", 3: "H", 4: "I"}
# Strips of one row in a picture of 65536 rows are plausible; a count that fills memory is not.
_MAX_TIFF_VALUES = 1 << 20
_TIFF_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}


def byte_view(data: Bytes) -> memoryview:
    """See any contiguous buffer as bytes, without a copy."""
    return memoryview(data).cast("B")


def jpeg_segments(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Markers of a JPEG with their payloads, past coded data and stray bytes between them."""
    position = 0
    for _ in range(MAX_PARTS):
        match = _JPEG_MARKER.search(view, position)
        if match is None:
            return
        marker, position = view[match.end() - 1], match.end()
        if marker in (JPEG_START, JPEG_END):
            yield marker, position, position
            continue
        (length,) = struct.unpack_from(">H", view, position)
        yield marker, position + 2, position + max(2, length)
        position += max(2, length)


def png_chunks(view: memoryview) -> Iterator[Part]:
    """Chunks of a PNG after its signature. Four bytes of checksum follow each payload."""
    position = 8
    for _ in range(MAX_PARTS):
        if position >= len(view):
            return
        length, kind = struct.unpack_from(">I4s", view, position)
        yield kind, position + 8, position + 8 + length
        position += length + 12


def riff_chunks(view: memoryview) -> Iterator[Part]:
    """Chunks of a RIFF file after its form type. Payloads of odd length have a byte of padding."""
    position = 12
    for _ in range(MAX_PARTS):
        if position + 8 > len(view):
            return
        kind, length = struct.unpack_from("<4sI", view, position)
        yield kind, position + 8, position + 8 + length
        position += 8 + length + length % 2


def boxes(view: memoryview, start: int = 0, stop: int | None = None) -> Iterator[Part]:
    """Boxes of an ISO base media file (AVIF, HEIF, JPEG 2000) between two positions."""
    stop = len(view) if stop is None else min(stop, len(view))
    for _ in range(MAX_PARTS):
        if start + 8 > stop:
            return
        length, kind = struct.unpack_from(">I4s", view, start)
        header = 8
        if length == 1:
            (length,), header = struct.unpack_from(">Q", view, start + 8), 16
        end = stop if length == 0 else start + length
        if end < start + header:
            return
        yield kind, start + header, end
        start = end


class TiffTag(NamedTuple):
    """One entry of a TIFF directory: where its values are, not yet read."""

    type: int
    length: int
    start: int
    end: int


class TiffDirectory:
    """The first directory of a TIFF file or of an Exif block, which has the same form.

    Raises:
        struct.error: The data ends before the directory does.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        # An unknown byte order gives an empty directory: the data is no TIFF.
        self._order = _TIFF_ORDERS.get(bytes(view[:4]), "")
        self.tags: dict[int, TiffTag] = {}
        if self._order:
            (position,) = struct.unpack_from(f"{self._order}I", view, 4)
            self._read(position)

    def _read(self, position: int) -> None:
        (count,) = struct.unpack_from(f"{self._order}H", self._view, position)
        for entry in range(position + 2, position + 2 + 12 * count, 12):
            tag, kind, length = struct.unpack_from(f"{self._order}HHI", self._view, entry)
            start, size = entry + 8, length * _TIFF_SIZES.get(kind, 0)
            if size > 4:  # Longer values are elsewhere in the file.
                (start,) = struct.unpack_from(f"{self._order}I", self._view, start)
            self.tags.setdefault(tag, TiffTag(kind, length, start, start + size))

    def values(self, tag: int, limit: int = _MAX_TIFF_VALUES) -> tuple[int, ...]:
        """The first unsigned integers of a tag, none if it is absent or of another type."""
        entry = self.tags.get(tag)
        if entry is None or entry.type not in _TIFF_VALUES:
            return ()
        layout = f"{self._order}{min(entry.length, limit)}{_TIFF_VALUES[entry.type]}"
        return struct.unpack_from(layout, self._view, entry.start)
