"""The parts of image files (segments, chunks, blocks, directories), and the orientation that stands there."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

from spdl_media.boxes import MAX_PARTS, PNG, RIFF, Bytes

__all__ = ("exif_orientation",)


def exif_orientation(data: Bytes) -> int:
    """Read the orientation from the metadata in an image file.

    JPEG (Exif in APP1), PNG (eXIf, also behind the pixels, and ImageMagick's text), WebP (EXIF chunk), TIFF
    (tag 274), or the XMP of these where Exif has none.

    Args:
        data: The file, or as much of its start as holds the metadata. Not copied.

    Returns:
        1 to 8; 1 for other formats, and where metadata are absent or broken.

    See:
        Exif 2.32 (CIPA DC-008), section 4.6.4.

    Raises:
        TypeError: ``data`` is no contiguous buffer.
    """
    view = memoryview(data).cast("B")
    for position, signature, read in _READERS:
        if view[position : position + len(signature)] == signature:
            try:
                return _first_stated(read(view))
            except struct.error:
                return 1  # The metadata end before they should: not worth the image.
    return 1


_ORIENTATION_TAG, _XMP_TAG = 274, 700
_XMP_SIGNATURE = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb"""tiff:Orientation\s*(?:=\s*["']|>)\s*([1-8])""")
# Compressed text ends here; metadata are some kilobytes.
_MAX_TEXT = 1 << 20


def exif_value(block: Bytes) -> int | None:
    """The orientation that a block of Exif states, which is a TIFF file; ``None`` if it does not speak of it.

    Returns:
        1 to 8; 1 where the block is broken.

    Raises:
        TypeError: ``block`` is no contiguous buffer.
    """
    view = memoryview(block).cast("B")
    # JPEG puts six bytes before the TIFF header; so do some writers of PNG and WebP.
    view = view[6:] if bytes(view[:6]) == b"Exif\0\0" else view
    try:
        found = tiff_value(view, _ORIENTATION_TAG)
    except struct.error:
        return 1
    # Some writers put 0 for an unknown orientation.
    return found if found is None or 1 <= found <= 8 else 1


def xmp_value(xmp: Bytes) -> int:
    """The orientation that XMP states, whatever stands before the XML; 1 if it does not speak of it.

    It counts where Exif does not speak of it.
    """
    match = _XMP_ORIENTATION.search(xmp)
    return 1 if match is None else int(match[1])


# What may state the orientation of a file: whether it is XMP, and a block of Exif or the XMP.
_Found: TypeAlias = "Iterator[tuple[bool, Bytes]]"


def _first_stated(found: _Found) -> int:
    xmp: Bytes = b""
    for is_xmp_block, block in found:
        if is_xmp_block:
            xmp = block
        elif (value := exif_value(block)) is not None:
            return value
    return xmp_value(xmp)


def _tiff(view: memoryview) -> _Found:
    yield False, view
    if (entry := _tiff_entry(view, _XMP_TAG)) is not None:
        yield True, entry[2]


def _jpeg(view: memoryview) -> _Found:
    for marker, start, end in jpeg_segments(view):
        if marker in (JPEG_SCAN, JPEG_END):
            return
        segment = view[start:end]
        if marker == JPEG_APP1 and bytes(segment[:6]) == b"Exif\0\0":
            yield False, segment
        elif marker == JPEG_APP1 and is_xmp(segment):
            yield True, segment


def is_xmp(segment: Bytes) -> bool:
    """Whether an APP1 segment of a JPEG holds XMP."""
    return bytes(segment[: len(_XMP_SIGNATURE)]) == _XMP_SIGNATURE


def _png(view: memoryview) -> _Found:
    for kind, start, end in PNG.of(view):
        payload = view[start:end]
        if kind == b"eXIf":
            yield False, payload
        elif kind in (b"tEXt", b"zTXt") and bytes(payload[: len(_RAW_EXIF)]) == _RAW_EXIF:
            yield False, _raw_profile(payload[len(_RAW_EXIF) :], is_compressed=kind == b"zTXt")
        elif kind == b"iTXt" and bytes(payload[: len(_PNG_XMP)]) == _PNG_XMP:
            yield True, _png_text(payload[len(_PNG_XMP) :])


# ImageMagick's, from before PNG had a chunk for Exif.
_RAW_EXIF = b"Raw profile type exif\0"


def _raw_profile(text: memoryview, *, is_compressed: bool) -> bytes:
    """What the text spells in hexadecimal digits, behind a line of the name and one of the length."""
    try:
        # Before compressed text stands the number of its method.
        whole = _inflate(text[1:]) if is_compressed else bytes(text)
        return bytes.fromhex(whole.split(b"\n", 3)[-1].decode("ascii"))
    except (ValueError, zlib.error):
        return b""


_PNG_XMP = b"XML:com.adobe.xmp\0"


def _png_text(text: memoryview) -> Bytes:
    """The text of a chunk, which may be compressed, behind two flags, the language and the translated key."""
    if not text or not text[0]:
        return text
    try:
        return _inflate(bytes(text).split(b"\0", 3)[-1])
    except zlib.error:
        return b""


def _inflate(data: Bytes) -> bytes:
    return zlib.decompressobj().decompress(data, _MAX_TEXT)


def _webp(view: memoryview) -> _Found:
    for kind, start, end in RIFF.of(view):
        if kind in (b"EXIF", b"XMP "):
            yield kind == b"XMP ", view[start:end]


JPEG_START, JPEG_END, JPEG_SCAN, JPEG_APP1 = 0xD8, 0xD9, 0xDA, 0xE1

# Inside coded data 0xFF is followed by 0x00 or a restart marker (0xD0-0xD7); in JPEG-LS by anything
# below 0x80. What is left are the markers that begin a segment or end the image.
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")


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


def png_head(view: memoryview) -> set[bytes]:
    """Kinds of the chunks of a PNG up to the first one of its pixels, if the data goes so far."""
    kinds: set[bytes] = set()
    with suppress(struct.error):  # it may end inside the header of a chunk
        for kind, _, _ in PNG.of(view):
            kinds.add(kind)
            if kind == b"IDAT":
                break
    return kinds


def bmp_header(view: memoryview) -> tuple[int, int, int, int, int, int]:
    """Place of the pixels of a BMP, width, height, bits of a pixel, compression and bytes of the pixels.

    Raises:
        struct.error: The data ends inside the header.
    """
    pixels, size = struct.unpack_from("<II", view, 10)
    # The header of OS/2 has no compression, and sizes of 16 bits.
    if size == 12:
        return pixels, *struct.unpack_from("<HH2xH", view, 18), 0, 0
    return pixels, *struct.unpack_from("<ii2xHII", view, 18)


GIF_EXTENSION, GIF_IMAGE, GIF_TRAILER = 0x21, 0x2C, 0x3B


def gif_blocks(view: memoryview) -> Iterator[int]:
    """Kinds of the blocks of a GIF that end within the data, past stray bytes, as FFmpeg reads them.

    Raises:
        struct.error: The data ends inside the header of the file or of an image.
    """
    position, size = 13 + _gif_colors(view, 10), len(view)
    for _ in range(MAX_PARTS):
        if position >= size:
            return
        kind = view[position]
        position += 1
        if kind in (GIF_EXTENSION, GIF_IMAGE):
            # An image has nine bytes of place and size, its colours, and the size of its codes.
            position += 1 if kind == GIF_EXTENSION else 10 + _gif_colors(view, position + 8)
            while position < size and view[position]:  # blocks of data, the last one empty
                position += view[position] + 1
            position += 1
            if position > size:
                return
        yield kind
        if kind == GIF_TRAILER:
            return


def _gif_colors(view: memoryview, flags: int) -> int:
    """Bytes of the colour table that a flag byte announces."""
    (bits,) = struct.unpack_from("B", view, flags)
    return 3 << ((bits & 7) + 1) if bits & 0x80 else 0


_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
# The letter of a value by its type: bytes, shorts, longs, and bytes of any meaning.
_TIFF_TYPES = {1: "B", 3: "H", 4: "I", 7: "B"}


def _tiff_entry(view: memoryview, wanted: int) -> tuple[str, int, memoryview] | None:
    """Order of bytes, type and values of a tag in a TIFF file or a block of Exif, if it is there.

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
    for number, (tag, kind, length) in enumerate(struct.iter_unpack(f"{order}HHI4x", entries)):
        if tag == wanted and kind in _TIFF_TYPES and length:
            size = struct.calcsize(_TIFF_TYPES[kind]) * length
            # Values of more than four bytes are elsewhere in the file.
            place = position + 2 + 12 * number + 8
            if size > 4:
                (place,) = struct.unpack_from(f"{order}I", view, place)
            return order, kind, view[place : place + size]
    return None


def tiff_value(view: memoryview, wanted: int) -> int | None:
    """The first number of such a tag; ``None``: it is not there.

    Raises:
        struct.error: The data ends before the directory or the value does.
    """
    if (entry := _tiff_entry(view, wanted)) is None:
        return None
    order, kind, values = entry
    return int(struct.unpack_from(order + _TIFF_TYPES[kind], values)[0])


_READERS: tuple[tuple[int, bytes, Callable[[memoryview], _Found]], ...] = (
    (0, b"\xff\xd8\xff", _jpeg),
    (0, b"\x89PNG\r\n\x1a\n", _png),
    (8, b"WEBP", _webp),
    (0, b"II*\0", _tiff),
    (0, b"MM\0*", _tiff),
)
