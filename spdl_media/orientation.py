"""How a stored picture is turned upright, read from its metadata and written as data.

An orientation is one of the eight numbers of the Exif tag: 1 is upright, 2 to 4 are mirrored or
upside down, 5 to 8 lie on their side.

FFmpeg's own report is not enough: PyAV's ``frame.rotation`` knows no mirroring, and FFmpeg 8 gives
some mirrored PNG, WebP and AVIF pictures another orientation than their metadata has (5 as 6).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

__all__ = (
    "UPRIGHT_FILTERS",
    "exif_orientation",
    "is_mirrored",
    "matrix_orientation",
    "rotation",
    "swaps_sides",
)

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


def _riff_chunks(view: memoryview) -> Iterator[Part]:
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


class _TiffTag(NamedTuple):
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
        self.tags: dict[int, _TiffTag] = {}
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
            self.tags.setdefault(tag, _TiffTag(kind, length, start, start + size))

    def values(self, tag: int, limit: int = _MAX_TIFF_VALUES) -> tuple[int, ...]:
        """The first unsigned integers of a tag, none if it is absent or of another type."""
        entry = self.tags.get(tag)
        if entry is None or entry.type not in _TIFF_VALUES:
            return ()
        layout = f"{self._order}{min(entry.length, limit)}{_TIFF_VALUES[entry.type]}"
        return struct.unpack_from(layout, self._view, entry.start)


Box: TypeAlias = tuple[int, int, int, int]
"""x, y, width, height."""

_Matrix: TypeAlias = tuple[int, int, int, int]

# Where a pixel of the stored picture goes: (a, b, c, d) for x' = ax + by, y' = cx + dy, with x to
# the right and y down.
_MATRICES: Mapping[int, _Matrix] = MappingProxyType(
    {
        1: (1, 0, 0, 1),
        2: (-1, 0, 0, 1),
        3: (-1, 0, 0, -1),
        4: (1, 0, 0, -1),
        5: (0, 1, 1, 0),
        6: (0, -1, 1, 0),
        7: (0, -1, -1, 0),
        8: (0, 1, -1, 0),
    }
)
_ORIENTATIONS = {matrix: orientation for orientation, matrix in _MATRICES.items()}

_ROTATIONS = {1: 0, 2: 0, 3: 180, 4: 180, 5: 270, 6: 90, 7: 90, 8: 270}

UPRIGHT_FILTERS: Mapping[int, str] = MappingProxyType(
    {
        1: "",
        2: "hflip",
        3: "hflip,vflip",
        4: "vflip",
        5: "transpose=cclock_flip",
        6: "transpose=clock",
        7: "transpose=clock_flip",
        8: "transpose=cclock",
    }
)
"""The FFmpeg filter chain that turns a picture of each orientation upright; empty for 1."""

_ORIENTATION_TAG = 274

# Rotations from a sensor are sometimes a hair off the quarter turn they mean.
_TOLERANCE = math.tan(math.radians(1))


def rotation(orientation: int) -> int:
    """Say by how much the picture is turned to stand upright.

    The picture is first mirrored left to right, if :func:`is_mirrored` says so, and then turned.

    Returns:
        Clockwise degrees: 0, 90, 180 or 270.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    _check(orientation)
    return _ROTATIONS[orientation]


def is_mirrored(orientation: int) -> bool:
    """Say whether the stored picture is a mirror image (2, 4, 5 and 7).

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    _check(orientation)
    a, b, c, d = _MATRICES[orientation]
    return a * d - b * c < 0


def swaps_sides(orientation: int) -> bool:
    """Say whether width and height change places on the way upright (5 to 8).

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    _check(orientation)
    return orientation >= 5


def stored_flips(orientation: int) -> tuple[bool, bool]:
    """Which axes of the stored picture run backwards in the upright one; for modules of this package.

    To turn it upright, exchange left and right if the first says so, top and bottom if the second does,
    and then rows and columns if :func:`swaps_sides` says so.
    """
    _check(orientation)
    a, b, c, d = _MATRICES[orientation]
    return a + c < 0, b + d < 0


def stored_box(box: Box, orientation: int, width: int, height: int) -> Box:
    """Where a box of the upright picture lies in the stored one of this size; for modules of this package."""
    x, y, w, h = box
    if swaps_sides(orientation):
        x, y, w, h = y, x, h, w
    backwards, upwards = stored_flips(orientation)
    return width - x - w if backwards else x, height - y - h if upwards else y, w, h


def _check(orientation: int) -> None:
    if orientation not in _MATRICES:
        raise ValueError(f"orientation must be one of 1 to 8, as in Exif, not {orientation!r}")


def matrix_orientation(matrix: Sequence[int]) -> int:
    """Read the orientation out of a display matrix, mirrored ones included.

    Args:
        matrix: The nine numbers of FFmpeg's display matrix, row by row. Scale and offset don't
            matter.

    Returns:
        1 to 8; 1 for a rotation more than a degree off every quarter turn, which no flip can undo.

    Raises:
        ValueError: There are not nine numbers.

    See:
        FFmpeg's ``libavutil/display.h``: a pixel (p, q) goes to (ap + cq + x, bp + dq + y) for the
        rows (a, b, u), (c, d, v), (x, y, w).
    """
    if len(matrix) != 9:
        raise ValueError(f"a display matrix has 9 numbers, not {len(matrix)}: {matrix!r}")
    right, down = _axis(matrix[0], matrix[1]), _axis(matrix[3], matrix[4])
    return _ORIENTATIONS.get((right[0], down[0], right[1], down[1]), 1)


def _axis(x: int, y: int) -> tuple[int, int]:
    """The axis that a direction lies on within a degree, (0, 0) if none."""
    if x and abs(y) <= abs(x) * _TOLERANCE:
        return (1 if x > 0 else -1), 0
    if y and abs(x) <= abs(y) * _TOLERANCE:
        return 0, (1 if y > 0 else -1)
    return 0, 0


def exif_orientation(data: Bytes) -> int:
    """Read how a picture lies from the metadata in its file.

    JPEG (Exif in APP1), PNG (eXIf, also behind the pixels), WebP (EXIF chunk), TIFF (tag 274) and
    AVIF/HEIF (irot and imir of the primary item, in the order of their association).

    Args:
        data: The file, or as much of its start as holds the metadata. Not copied.

    Returns:
        1 to 8; 1 for other formats, and where metadata are absent or broken.

    See:
        Exif 2.32 (CIPA DC-008), section 4.6.4; ISO/IEC 23008-12, 6.5.10 and 6.5.12.
    """
    view = byte_view(data)
    for position, signature, read in _READERS:
        if view[position : position + len(signature)] == signature:
            try:
                return read(view)
            except struct.error:
                return 1  # The metadata end before they should: not worth the picture.
    return 1


def _tiff(view: memoryview) -> int:
    values = TiffDirectory(view).values(_ORIENTATION_TAG, limit=1)
    return values[0] if values and values[0] in _MATRICES else 1


def _exif_block(view: memoryview) -> int:
    # JPEG puts six bytes before the TIFF header; so do some writers of PNG and WebP.
    return _tiff(view[6:] if bytes(view[:6]) == b"Exif\0\0" else view)


def exif_block_orientation(view: memoryview) -> int:
    """Read how a picture lies from a block of Exif; 1 where it is broken. For modules of this package."""
    try:
        return _exif_block(view)
    except struct.error:
        return 1


def _jpeg(view: memoryview) -> int:
    for marker, start, end in jpeg_segments(view):
        if marker in (JPEG_SCAN, JPEG_END):
            break
        # XMP is in an APP1 of its own.
        if marker == JPEG_APP1 and bytes(view[start : start + 6]) == b"Exif\0\0":
            return _exif_block(view[start:end])
    return 1


def _png(view: memoryview) -> int:
    for kind, start, end in png_chunks(view):
        if kind == b"eXIf":
            return _exif_block(view[start:end])
    return 1


def _webp(view: memoryview) -> int:
    if bytes(view[8:12]) == b"WEBP":
        for kind, start, end in _riff_chunks(view):
            if kind == b"EXIF":
                return _exif_block(view[start:end])
    return 1


def _heif(view: memoryview) -> int:
    meta = _find(view, b"meta", 0, len(view))
    if meta is None:
        return 1
    start, end = meta[0] + 4, meta[1]  # Version and flags come first.
    item, properties = _find(view, b"pitm", start, end), _find(view, b"iprp", start, end)
    if item is None or properties is None:
        return 1
    (version,) = struct.unpack_from("B", view, item[0])
    (primary,) = struct.unpack_from(">I" if version else ">H", view, item[0] + 4)
    container = _find(view, b"ipco", *properties)
    known = list(boxes(view, *container)) if container else []
    matrix = _MATRICES[1]
    for index in _associated(view, primary, *properties):
        if 0 < index <= len(known):
            kind, start, end = known[index - 1]
            matrix = _compose(_transform(kind, bytes(view[start : min(end, start + 1)])), matrix)
    return _ORIENTATIONS[matrix]


def _find(view: memoryview, kind: bytes, start: int, stop: int) -> tuple[int, int] | None:
    for found, first, end in boxes(view, start, stop):
        if found == kind:
            return first, end
    return None


def _associated(view: memoryview, item: int, start: int, stop: int) -> list[int]:
    """Positions, from 1, of the properties of an item, in the order in which they apply."""
    for kind, first, _ in boxes(view, start, stop):
        if kind == b"ipma":
            indices = _read_ipma(view, item, first)
            if indices:
                return indices
    return []


def _read_ipma(view: memoryview, item: int, position: int) -> list[int]:
    version_flags, count = struct.unpack_from(">II", view, position)
    layout, size = (">IB", 5) if version_flags >> 24 else (">HB", 3)
    # The highest bit of an association says that a reader must understand the property.
    unit, mask = ("H", 0x7FFF) if version_flags & 1 else ("B", 0x7F)
    position += 8
    for _ in range(min(count, MAX_PARTS)):
        found, length = struct.unpack_from(layout, view, position)
        indices = struct.unpack_from(f">{length}{unit}", view, position + size)
        if found == item:
            return [index & mask for index in indices]
        position += size + length * struct.calcsize(unit)
    return []


def _transform(kind: bytes, payload: bytes) -> _Matrix:
    if kind == b"irot" and payload:
        return _MATRICES[(1, 8, 3, 6)[payload[0] & 3]]  # Quarter turns anticlockwise.
    if kind == b"imir" and payload:
        return _MATRICES[2 if payload[0] & 1 else 4]
    return _MATRICES[1]


def _compose(then: _Matrix, first: _Matrix) -> _Matrix:
    a, b, c, d = then
    e, f, g, h = first
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


_READERS: tuple[tuple[int, bytes, Callable[[memoryview], int]], ...] = (
    (0, b"\xff\xd8\xff", _jpeg),
    (0, b"\x89PNG\r\n\x1a\n", _png),
    (0, b"RIFF", _webp),
    (0, b"II*\0", _tiff),
    (0, b"MM\0*", _tiff),
    (4, b"ftyp", _heif),
)
