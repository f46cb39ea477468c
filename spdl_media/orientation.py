"""How a stored image is turned upright: the eight orientations, and where files state them.

An orientation is one of the eight numbers of the Exif tag: 1 is upright, 2 to 4 are mirrored or upside
down, 5 to 8 lie on their side.

The readers of the parts of image files (segments, chunks, boxes, directories) stand here, too. They yield
where the payload of a part starts and ends, as the file declares it; an end may lie past the data. A header
that is itself cut off raises ``struct.error``. Nothing is copied.
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

# x, y, width, height.
Box: TypeAlias = tuple[int, int, int, int]

# What the functions for stills read: anything one byte wide and contiguous is accepted.
Bytes: TypeAlias = bytes | bytearray | memoryview

# Kind, first byte of the payload, first byte after it.
Part: TypeAlias = tuple[bytes, int, int]

# Gives up to so many bytes from a position of the file: ``read(position, size)``.
Read: TypeAlias = Callable[[int, int], Bytes]

_Matrix: TypeAlias = tuple[int, int, int, int]


class _Turn(NamedTuple):
    """How an image of one orientation is turned upright.

    Attributes:
        matrix: Where a pixel of the stored image goes: (a, b, c, d) for x' = ax + by, y' = cx + dy, with x
            to the right and y down.
        rotation: Clockwise degrees, after the image was mirrored left to right if the matrix mirrors.
        filters: The same as a filter chain of FFmpeg's.
    """

    matrix: _Matrix
    rotation: int
    filters: str


# PyAV's frame.rotation knows no mirroring, and FFmpeg 8 gives some mirrored PNG, WebP and AVIF images
# another orientation than their metadata has (5 as 6). Hence a table and readers of our own.
_TURNS: Mapping[int, _Turn] = {
    1: _Turn((1, 0, 0, 1), 0, ""),
    2: _Turn((-1, 0, 0, 1), 0, "hflip"),
    3: _Turn((-1, 0, 0, -1), 180, "hflip,vflip"),
    4: _Turn((1, 0, 0, -1), 180, "vflip"),
    5: _Turn((0, 1, 1, 0), 270, "transpose=cclock_flip"),
    6: _Turn((0, -1, 1, 0), 90, "transpose=clock"),
    7: _Turn((0, -1, -1, 0), 90, "transpose=clock_flip"),
    8: _Turn((0, 1, -1, 0), 270, "transpose=cclock"),
}
_ORIENTATIONS = {turn.matrix: orientation for orientation, turn in _TURNS.items()}

UPRIGHT_FILTERS: Mapping[int, str] = MappingProxyType(
    {orientation: turn.filters for orientation, turn in _TURNS.items()}
)
"""The FFmpeg filter chain that turns an image of each orientation upright; empty for 1."""


def _turn(orientation: int) -> _Turn:
    if orientation not in _TURNS:
        raise ValueError(f"orientation must be one of 1 to 8, as in Exif, not {orientation!r}")
    return _TURNS[orientation]


def rotation(orientation: int) -> int:
    """Say by how many degrees the image is turned clockwise, 0, 90, 180 or 270, to be upright.

    It is first mirrored left to right, if :func:`is_mirrored` says so.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    return _turn(orientation).rotation


def is_mirrored(orientation: int) -> bool:
    """Say whether the stored image is a mirror image (2, 4, 5 and 7).

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    a, b, c, d = _turn(orientation).matrix
    return a * d - b * c < 0


def swaps_sides(orientation: int) -> bool:
    """Say whether width and height change places when the image is turned upright (5 to 8).

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    return _turn(orientation).matrix[0] == 0


def stored_flips(orientation: int) -> tuple[bool, bool]:
    """Which axes of the stored image run backwards in the upright one.

    To turn it upright, exchange left and right if the first says so, top and bottom if the second does,
    and then rows and columns if :func:`swaps_sides` says so.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    a, b, c, d = _turn(orientation).matrix
    # Each column of the matrix has one number that is not 0, so its sum has that sign.
    return a + c < 0, b + d < 0


def stored_box(box: Box, orientation: int, width: int, height: int) -> Box:
    """Where a box of the upright image lies in the stored one, which is ``width`` by ``height``.

    Raises:
        ValueError: ``orientation`` is not one of 1 to 8.
    """
    x, y, w, h = box
    if swaps_sides(orientation):
        x, y, w, h = y, x, h, w
    backwards, upwards = stored_flips(orientation)
    return width - x - w if backwards else x, height - y - h if upwards else y, w, h


# Rotations from a sensor are sometimes a hair off the quarter turn they mean.
_TOLERANCE = math.tan(math.radians(1))


def matrix_orientation(matrix: Sequence[int]) -> int:
    """Read the orientation out of a display matrix, mirrored ones included.

    Args:
        matrix: The nine numbers of FFmpeg's display matrix, row by row, at any scale and offset.

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
    """Read the orientation from the metadata in an image file.

    JPEG (Exif in APP1), PNG (eXIf, also behind the pixels), WebP (EXIF chunk), TIFF (tag 274) and
    AVIF/HEIF (irot and imir of the primary item, in the order of their association).

    Args:
        data: The file, or as much of its start as holds the metadata. Not copied.

    Returns:
        1 to 8; 1 for other formats, and where metadata are absent or broken.

    See:
        Exif 2.32 (CIPA DC-008), section 4.6.4; ISO/IEC 23008-12, 6.5.10 and 6.5.12.

    Raises:
        TypeError: ``data`` is no contiguous buffer.
    """
    view = byte_view(data)
    for position, signature, read in _READERS:
        if view[position : position + len(signature)] == signature:
            try:
                return read(view)
            except struct.error:
                return 1  # The metadata end before they should: not worth the image.
    return 1


_ORIENTATION_TAG = 274


def exif_block_orientation(block: Bytes) -> int:
    """Read the orientation from a block of Exif, which is a TIFF file; 1 where it is broken.

    Raises:
        TypeError: ``block`` is no contiguous buffer.
    """
    view = byte_view(block)
    # JPEG puts six bytes before the TIFF header; so do some writers of PNG and WebP.
    view = view[6:] if bytes(view[:6]) == b"Exif\0\0" else view
    try:
        found = _tiff_value(view, _ORIENTATION_TAG)
    except struct.error:
        return 1
    # Some writers put 0 for an unknown orientation.
    return found if found is not None and found in _TURNS else 1


def _jpeg(view: memoryview) -> int:
    for marker, start, end in jpeg_segments(view):
        if marker in (JPEG_SCAN, JPEG_END):
            break
        # XMP is in an APP1 of its own.
        if marker == JPEG_APP1 and bytes(view[start : start + 6]) == b"Exif\0\0":
            return exif_block_orientation(view[start:end])
    return 1


def _in_chunk(wanted: bytes, form: _Chunks) -> Callable[[memoryview], int]:
    def read(view: memoryview) -> int:
        for kind, start, end in form.of(view):
            if kind == wanted:
                return exif_block_orientation(view[start:end])
        return 1

    return read


def _heif(view: memoryview) -> int:
    start, end = _find(view, b"meta", 0, len(view))
    start += 4  # Version and flags come first.
    item, properties = _find(view, b"pitm", start, end), _find(view, b"iprp", start, end)
    (version,) = struct.unpack_from("B", view, item[0])
    (primary,) = struct.unpack_from(">I" if version else ">H", view, item[0] + 4)
    known = list(boxes(view, *_find(view, b"ipco", *properties)))
    a, b, c, d = _TURNS[1].matrix
    for index in _associated(view, primary, *properties):
        if 0 < index <= len(known):
            kind, start, end = known[index - 1]
            p, q, r, s = _transform(kind, view[start : min(end, start + 1)])
            # A transform applies to the result of those before it, so its matrix goes to the left.
            a, b, c, d = p * a + q * c, p * b + q * d, r * a + s * c, r * b + s * d
    return _ORIENTATIONS[a, b, c, d]


def _find(view: memoryview, kind: bytes, start: int, stop: int) -> tuple[int, int]:
    for found, first, end in boxes(view, start, stop):
        if found == kind:
            return first, end
    raise struct.error(f"no box {kind!r}")


def _associated(view: memoryview, item: int, start: int, stop: int) -> list[int]:
    """Positions, from 1, of the properties of an item, in the order in which they apply."""
    for kind, position, _ in boxes(view, start, stop):
        if kind == b"ipma" and (indices := _read_ipma(view, item, position)):
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


def _transform(kind: bytes, payload: memoryview) -> _Matrix:
    orientation = 1
    if kind == b"irot" and payload:
        orientation = (1, 8, 3, 6)[payload[0] & 3]  # Quarter turns anticlockwise.
    if kind == b"imir" and payload:
        orientation = 2 if payload[0] & 1 else 4
    return _TURNS[orientation].matrix


# A file made of empty parts must cost milliseconds, not minutes.
MAX_PARTS = 1 << 16

JPEG_START, JPEG_END, JPEG_SCAN, JPEG_APP1 = 0xD8, 0xD9, 0xDA, 0xE1

# Inside coded data 0xFF is followed by 0x00 or a restart marker (0xD0-0xD7); in JPEG-LS by anything
# below 0x80. What is left are the markers that begin a segment or end the image.
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")


def byte_view(data: Bytes) -> memoryview:
    """See any contiguous buffer as bytes, without a copy.

    Raises:
        TypeError: It is no buffer, or not contiguous.
    """
    return memoryview(data).cast("B")


def jpeg_segments(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Markers of a JPEG with their payloads, past coded data and stray bytes between them.

    Raises:
        struct.error: The data ends inside the length of a segment.
    """
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
        # The length counts its own two bytes. A smaller one is broken, but the walk must advance.
        yield marker, position + 2, position + max(2, length)
        position += max(2, length)


class _Chunks(NamedTuple):
    """How the chunks of a family of formats follow each other.

    Attributes:
        start: Where the first one begins.
        header: Layout of its kind and the length of its payload, in the order of the file.
        padding: Payloads fill a multiple of so many bytes.
        trailer: Bytes behind each payload.
    """

    start: int
    header: struct.Struct
    padding: int = 1
    trailer: int = 0

    def of(self, view: memoryview) -> Iterator[Part]:
        """The chunks of a whole file.

        Raises:
            struct.error: The file ends inside the header of a chunk.
        """
        return self.read(lambda start, size: view[start : start + size], len(view))

    def read(self, read: Read, size: int) -> Iterator[Part]:
        """The chunks of a file of this size, of which nothing but their headers is read.

        Raises:
            struct.error: The file ends inside the header of a chunk.
        """
        position = self.start
        for _ in range(MAX_PARTS):
            if position >= size:
                return
            first, second = self.header.unpack(read(position, self.header.size))
            kind, length = (first, second) if isinstance(first, bytes) else (second, first)
            # A negative length means an unknown one in CAF; the walk must still advance.
            position += self.header.size
            end = position + max(0, length)
            yield kind, position, position + length
            position = end + -end % self.padding + self.trailer


PNG = _Chunks(8, struct.Struct(">I4s"), trailer=4)
RIFF = _Chunks(12, struct.Struct("<4sI"), padding=2)
IFF = _Chunks(12, struct.Struct(">4sI"), padding=2)
CAF = _Chunks(8, struct.Struct(">4sq"))


def boxes(view: memoryview, start: int = 0, stop: int | None = None) -> Iterator[Part]:
    """Boxes of an ISO base media file (AVIF, HEIF, JPEG 2000) between two positions.

    Raises:
        struct.error: The data ends inside the header of a box.
    """
    stop = len(view) if stop is None else min(stop, len(view))
    return read_boxes(lambda position, size: view[position : position + size], start, stop)


def read_boxes(read: Read, position: int, stop: int) -> Iterator[Part]:
    """The same of a file of which nothing but the headers of the boxes is read.

    Raises:
        struct.error: The data ends inside the header of a box.
    """
    for _ in range(MAX_PARTS):
        if position + 8 > stop:
            return
        header = read(position, 16)
        length, kind = struct.unpack_from(">I4s", header)
        start = position + 8
        # The length does not fit into 32 bits and follows the kind.
        if length == 1:
            (length,), start = struct.unpack_from(">Q", header, 8), position + 16
        end = stop if length == 0 else position + length  # 0: up to the end
        if end < start:
            return
        yield kind, start, end
        position = end


_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_TIFF_VALUES = {1: "B", 3: "H", 4: "I"}


def _tiff_value(view: memoryview, wanted: int) -> int | None:
    """The first number of a tag in a TIFF file or a block of Exif, if it is there and an unsigned integer.

    Raises:
        struct.error: The data ends before the directory does.
    """
    # Only the first directory counts: others describe thumbnails and further pages.
    order = _TIFF_ORDERS.get(bytes(view[:4]))
    if order is None:
        return None
    (position,) = struct.unpack_from(f"{order}I", view, 4)
    (count,) = struct.unpack_from(f"{order}H", view, position)
    entries = view[position + 2 : position + 2 + 12 * count]
    if len(entries) < 12 * count:
        raise struct.error("the directory is cut short")
    for tag, kind, length, value in struct.iter_unpack(f"{order}HHI4s", entries):
        if tag == wanted and kind in _TIFF_VALUES and length:
            layout = struct.Struct(order + _TIFF_VALUES[kind])
            # Values of more than four bytes are elsewhere in the file.
            if layout.size * length <= 4:
                return int(layout.unpack_from(value)[0])
            return int(layout.unpack_from(view, struct.unpack(f"{order}I", value)[0])[0])
    return None


_READERS: tuple[tuple[int, bytes, Callable[[memoryview], int]], ...] = (
    (0, b"\xff\xd8\xff", _jpeg),
    (0, b"\x89PNG\r\n\x1a\n", _in_chunk(b"eXIf", PNG)),
    (8, b"WEBP", _in_chunk(b"EXIF", RIFF)),
    (0, b"II*\0", exif_block_orientation),
    (0, b"MM\0*", exif_block_orientation),
    (4, b"ftyp", _heif),
)
