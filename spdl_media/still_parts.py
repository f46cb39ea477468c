"""Walk the parts of still images: segments, chunks, blocks, directories. Nothing is copied."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import suppress

from spdl_media.parts import MAX_PARTS, PNG

JPEG_START, JPEG_END, JPEG_SCAN, JPEG_APP1 = 0xD8, 0xD9, 0xDA, 0xE1
JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}

# Markers that begin a segment or end the image. Inside coded data, 0xFF is followed by 0x00 or a restart
# marker (0xD0-0xD7), in JPEG-LS by anything below 0x80.
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")


def jpeg_segments(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the markers of a JPEG with their payloads, skipping coded data and stray bytes.

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
        # The length includes its own two bytes. A smaller one is invalid, but the walk must advance.
        yield marker, position + 2, position + max(2, length)
        position += max(2, length)


def png_head(view: memoryview) -> set[bytes]:
    """Return the kinds of a PNG's chunks up to the first IDAT, or up to the end of the data."""
    kinds: set[bytes] = set()
    with suppress(struct.error):  # the data may end inside a header
        for kind, _, _ in PNG.of(view):
            kinds.add(kind)
            if kind == b"IDAT":
                break
    return kinds


_WEBP_ANIMATION = 0x02


def is_animated_webp(view: memoryview) -> bool:
    """Whether the extended header of a WebP has the animation flag."""
    is_extended = bytes(view[8:16]) == b"WEBPVP8X" and len(view) > 20
    return is_extended and view[20] & _WEBP_ANIMATION != 0


def bmp_header(view: memoryview) -> tuple[int, int, int, int, int, int]:
    """Return a BMP's pixel offset, width, height, bits per pixel, compression and size of the pixel data.

    Raises:
        struct.error: The data ends inside the header.
    """
    pixels, size = struct.unpack_from("<II", view, 10)
    # The OS/2 header has 16-bit sizes and no compression.
    if size == 12:
        return pixels, *struct.unpack_from("<HH2xH", view, 18), 0, 0
    return pixels, *struct.unpack_from("<ii2xHII", view, 18)


GIF_EXTENSION, GIF_IMAGE, GIF_TRAILER = 0x21, 0x2C, 0x3B
GIF_CONTROL = 0xF9
"""The extension that states the delay of the next image."""


def gif_blocks(view: memoryview) -> Iterator[int]:
    """Yield the kinds of a GIF's complete blocks, skipping stray bytes as FFmpeg does.

    Yields:
        :data:`GIF_CONTROL` for that extension, else the first byte of the block.
    """
    position, size = 13 + _gif_colors(view, 10), len(view)
    for _ in range(MAX_PARTS):
        if position >= size:
            return
        kind = view[position]
        position += 1
        if kind in (GIF_EXTENSION, GIF_IMAGE):
            is_control = kind == GIF_EXTENSION and bytes(view[position : position + 1]) == b"\xf9"
            # An image has nine bytes of position and size, a colour table, and the code size.
            position += 1 if kind == GIF_EXTENSION else 10 + _gif_colors(view, position + 8)
            while position < size and view[position]:  # data sub-blocks; the last one is empty
                position += view[position] + 1
            position += 1
            if position > size:
                return
            kind = GIF_CONTROL if is_control else kind
        yield kind
        if kind == GIF_TRAILER:
            return


def _gif_colors(view: memoryview, flags: int) -> int:
    """Return the size in bytes of the colour table, from the flag byte at this position; 0 past the end."""
    bits = view[flags] if flags < len(view) else 0
    return 3 << ((bits & 7) + 1) if bits & 0x80 else 0


_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
# struct codes by type: BYTE, SHORT, LONG, SBYTE, UNDEFINED, SSHORT and SLONG.
TIFF_TYPES = {1: "B", 3: "H", 4: "I", 6: "b", 7: "B", 8: "h", 9: "i"}


def tiff_entry(view: memoryview, wanted: int) -> tuple[str, int, memoryview] | None:
    """Return byte order, type and values of a tag in a TIFF file or an Exif block, if it is present.

    Raises:
        struct.error: The data ends before the directory does.
    """
    # Only the first directory: others describe thumbnails and further pages.
    order = _TIFF_ORDERS.get(bytes(view[:4]))
    if order is None:
        return None
    (position,) = struct.unpack_from(f"{order}I", view, 4)
    (count,) = struct.unpack_from(f"{order}H", view, position)
    entries = view[position + 2 : position + 2 + 12 * count]
    if len(entries) < 12 * count:
        raise struct.error("the directory is cut short")
    for number, (tag, kind, length) in enumerate(struct.iter_unpack(f"{order}HHI4x", entries)):
        if tag == wanted and kind in TIFF_TYPES and length:
            size = struct.calcsize(TIFF_TYPES[kind]) * length
            # Values of more than four bytes are stored at an offset.
            place = position + 2 + 12 * number + 8
            if size > 4:
                (place,) = struct.unpack_from(f"{order}I", view, place)
            return order, kind, view[place : place + size]
    return None


def tiff_value(view: memoryview, wanted: int) -> int | None:
    """Return the first number of a tag; ``None`` if the tag is missing.

    Raises:
        struct.error: The data ends before the directory or the value does.
    """
    if (entry := tiff_entry(view, wanted)) is None:
        return None
    order, kind, values = entry
    return int(struct.unpack_from(order + TIFF_TYPES[kind], values)[0])
