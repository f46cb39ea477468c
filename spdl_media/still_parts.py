"""Walk the parts of still images, and detect truncated and damaged ones that FFmpeg decodes without an error.

The parts are segments, chunks, blocks and directories. Nothing is copied.

FFmpeg leaves gray or stale pixels where the data of an image ended. The sizes stated in the file tell what is
missing. For formats that are not in the table, FFmpeg reports even a single missing byte (JPEG 2000, binary
PNM), or nothing in the file can tell.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import add, lt
from typing import TypeVar

from spdl_media import parts
from spdl_media.parts import Bytes, missing_after, short_of

Default = TypeVar("Default")

JPEG_START, JPEG_END, JPEG_SCAN, JPEG_APP1 = 0xD8, 0xD9, 0xDA, 0xE1
JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_PROGRESSIVE = 0xC2

# Markers that begin a segment or end the image. Inside coded data, 0xFF is followed by 0x00 or a restart
# marker (0xD0-0xD7), in JPEG-LS by anything below 0x80.
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")


def jpeg_segments(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the markers of a JPEG with their payloads, skipping coded data and stray bytes.

    Raises:
        struct.error: The data ends inside the length of a segment.
    """
    position = 0
    for _ in range(parts.MAX_PARTS):
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
        for kind, _, _ in parts.PNG.of(view):
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
    for _ in range(parts.MAX_PARTS):
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
_TIFF_TYPES = {1: "B", 3: "H", 4: "I", 6: "b", 7: "B", 8: "h", 9: "i"}


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
        if tag == wanted and kind in _TIFF_TYPES and length:
            size = struct.calcsize(_TIFF_TYPES[kind]) * length
            # Values of more than four bytes are stored at an offset.
            place = position + 2 + 12 * number + 8
            if size > 4:
                (place,) = struct.unpack_from(f"{order}I", view, place)
            return order, kind, view[place : place + size]
    return None


def tiff_value(view: memoryview, wanted: int, default: Default) -> int | Default:
    """Return the first number of a tag, or the default if the tag is missing.

    Raises:
        struct.error: The data ends before the directory or the value does.
    """
    if (entry := tiff_entry(view, wanted)) is None:
        return default
    order, kind, values = entry
    return int(struct.unpack_from(order + _TIFF_TYPES[kind], values)[0])


# Truncated and damaged images.


def check_complete(codec: str, data: Bytes, size: int | None = None) -> str | None:
    """Describe what is missing at the end of an image file.

    Faults that FFmpeg reports itself are not checked. Missing data without pixels is ignored: after the
    end-of-image marker of a JPEG (further images of an MPO included), after the trailer of a GIF, and the
    footer of a TGA. Missing digits of the last number of a plain-text PNM cannot be detected.

    Args:
        codec: FFmpeg's name of the decoder, or ``"avif"`` for AVIF and HEIF files.
        data: The whole file. Not copied.
        size: Size of the file, if ``data`` is only its head: allowed for WebP, and for BMP without run
            lengths.

    Returns:
        A clause as from :func:`missing_end`, or one that names the wrong or missing part, or what FFmpeg
        does not support; ``None`` if the file is complete or needs no check.

    Raises:
        TypeError: ``data`` is not a contiguous buffer.
    """
    view = memoryview(data).cast("B")
    try:
        return _IMAGE_CHECKS[codec](view, size or len(view)) if codec in _IMAGE_CHECKS else None
    except struct.error:
        return missing_after(len(view), "before its headers do")


def _jpeg(view: memoryview, size: int) -> str | None:
    # The end-of-image marker. It never occurs in coded data.
    has_end = bytes(view[-2:]) == b"\xff\xd9"
    components: set[int] = set()  # those without a scan so far; FFmpeg would make the image green
    is_progressive = False
    for marker, start, end in jpeg_segments(view):
        if end > size:
            what = f"a segment with marker 0xFF{marker:02X}"
            return None if has_end else short_of(size, end, what)
        if marker in JPEG_FRAMES:
            components, is_progressive = set(view[start + 6 : end : 3]), marker == _JPEG_PROGRESSIVE
        elif marker == JPEG_SCAN:
            # In a progressive JPEG, the first scan of a component is of frequency 0, and refines no other.
            if not (is_progressive and (view[end - 3] or view[end - 1] >> 4)):
                components -= set(view[start + 1 : end - 3 : 2])
            if has_end and not components:  # most files need no further check
                return None
        elif marker == JPEG_END:
            return f"{len(components)} of its components have no first scan" if components else None
    return missing_after(size, "before the end-of-image marker")


def _png(view: memoryview, size: int) -> str | None:
    """Check the chunks up to the pixels, and further ones if the file does not end with the last chunk.

    FFmpeg compares only the checksum of the inflated pixels, or else refuses files for the checksum of a text
    chunk, too.
    """
    has_end = bytes(view[-12:-4]) == b"\0\0\0\0IEND"
    for kind, start, end in parts.PNG.of(view):
        if end + parts.PNG.trailer > size:
            what = f"the chunk {kind.decode('latin-1')}"
            return None if has_end else short_of(size, end + parts.PNG.trailer, what)
        if kind in (b"IHDR", b"PLTE", b"tRNS"):
            (checksum,) = struct.unpack_from(">I", view, end)
            if zlib.crc32(view[start - 4 : end]) != checksum:
                return f"the checksum of the chunk {kind.decode()} is wrong"
        if kind == b"IEND" or (has_end and kind == b"IDAT"):
            return None
    return missing_after(size, "before the chunk IEND")


def _webp(view: memoryview, size: int) -> str | None:
    (length,) = struct.unpack_from("<I", view, 4)
    return short_of(size, length + 8, "the RIFF form")


# Compressions of rows of one size: none, and two with masks.
_BMP_ROWS = (0, 3, 6)


def _bmp(view: memoryview, size: int) -> str | None:
    pixels, width, height, depth, compression, length = bmp_header(view)
    if compression in (1, 2):
        # The end-of-bitmap code takes precedence over the size field, which is often wrong.
        if bytes(view[-2:]) == b"\0\1" or (length and size >= pixels + length):
            return None
        return missing_after(size, "before the end-of-bitmap code")
    if compression not in _BMP_ROWS:
        return None
    tight, padded = (width * depth + 7) // 8, (width * depth + 31) // 32 * 4
    # Some writers don't pad rows. FFmpeg assumes that whenever bytes are missing, and shears an image that
    # lost fewer bytes than its padding. The size field in the header tells the cases apart.
    (file_size,) = struct.unpack_from("<I", view, 2)
    if file_size <= size == pixels + tight * abs(height):
        return None
    return short_of(size, pixels + padded * abs(height), "the last row")


def _qoi(view: memoryview, size: int) -> str | None:
    # Seven consecutive zero bytes cannot occur between the chunks of a QOI file.
    end = b"\0\0\0\0\0\0\0\1"
    if bytes(view[-8:]) == end or re.search(end, view[14:]):
        return None
    return missing_after(size, "before the end marker")


def _targa(view: memoryview, size: int) -> str | None:
    if bytes(view[-18:]) == b"TRUEVISION-XFILE.\0" or size < 18 or view[2] not in (9, 10, 11):
        return None  # FFmpeg reports missing uncompressed pixels
    colors, color_depth = struct.unpack_from("<HB", view, 5)
    width, height, depth = struct.unpack_from("<HHB", view, 12)
    unit = (depth + 7) // 8
    position = 18 + view[0] + (colors * ((color_depth + 7) // 8) if view[1] else 0)
    missing = width * height
    while missing > 0 and position < size:
        # If the highest bit is set, one pixel is repeated for the whole run.
        code = view[position]
        pixels = (code & 127) + 1
        missing -= pixels
        position += 1 + (unit if code & 128 else pixels * unit)
    if missing > 0:
        return missing_after(size, f"before the runs of {missing} of {width * height} pixels")
    return short_of(size, position, "the last run")


def _gif(view: memoryview, size: int) -> str | None:
    is_whole = GIF_TRAILER in gif_blocks(view)
    return None if is_whole else missing_after(size, "before the trailer of a GIF")


def _heif(view: memoryview, size: int) -> str | None:
    described = found = False
    for kind, start, end in parts.boxes(view):
        # Only boxes that pixels depend on: after them, some cameras append data that is not a box.
        if kind not in (b"ftyp", b"meta", b"moov", b"mdat"):
            continue
        if end > size:
            return short_of(size, end, f"the box {kind.decode()}")
        described |= kind in (b"meta", b"moov")
        # Small images may be stored in the meta box, whose boxes follow four bytes of version and flags.
        inside = parts.boxes(view, start + 4, end) if kind == b"meta" else ()
        found |= kind == b"mdat" or any(part == b"idat" for part, _, _ in inside)
    is_whole = described and found
    return None if is_whole else missing_after(size, "before the boxes that hold the image")


def _dpx(view: memoryview, size: int) -> str | None:
    order = ">" if bytes(view[:4]) == b"SDPX" else "<"
    length, height = struct.unpack_from(f"{order}I756xI", view, 16)
    # If no more than the padding of all rows is missing, FFmpeg assumes unpadded rows. It reports larger
    # gaps itself, so an undefined size field (all ones) does no harm.
    return None if length - size > 4 * height else short_of(size, length, "the last row")


_EXR_ATTRIBUTE = re.compile(rb"([^\0]{1,255})\0([^\0]{1,255})\0")
_EXR_ROWS = {3: 16, 4: 32, 5: 16, 6: 32, 7: 32, 8: 32, 9: 256}


_DWA = (8, 9)
# FFmpeg takes the first channels for these, whatever they are: alpha of 16 bits, blue, green and red.
_DWA_CHANNELS = re.compile(rb"(A\0\x01\0{3}.{12})?B\0.{16}G\0.{16}R\0.{17}", re.DOTALL)


def _exr(view: memoryview, size: int) -> str | None:
    (flags,) = struct.unpack_from("<I", view, 4)
    attributes: dict[bytes, memoryview] = {}
    position = 8
    for _ in range(parts.MAX_PARTS):
        match = _EXR_ATTRIBUTE.match(view, position)
        if match is None:
            break
        (length,) = struct.unpack_from("<I", view, match.end())
        position = match.end() + 4 + length
        attributes[bytes(match[1])] = view[match.end() + 4 : position]
    (compression,) = struct.unpack_from("B", attributes.get(b"compression", b""))
    if compression > max(_EXR_ROWS):
        return f"FFmpeg does not know its compression {compression}"
    if compression in _DWA and not _DWA_CHANNELS.fullmatch(attributes.get(b"channels", b"")):
        return "FFmpeg mixes up channels of DWA, unless they are R, G, B and perhaps A of 16 bits"
    if flags & (0x200 | 0x800 | 0x1000):
        return None  # tiled, deep or multi-part files, whose block tables have other layouts
    _, top, _, bottom = struct.unpack_from("<4i", attributes.get(b"dataWindow", b""))
    chunks = (bottom - top) // _EXR_ROWS.get(compression, 1) + 1
    table = struct.unpack_from(f"<{min(max(chunks, 0), parts.MAX_PARTS)}Q", view, position + 1)
    # Writers reserve the table first, and fill in entries as blocks are written.
    if not all(table):
        return f"the data has no pixels for {table.count(0)} of {chunks} blocks of rows"
    last = max(table, default=0)
    if last + 8 > size:
        return short_of(size, last + 8, f"the header of the last of {chunks} blocks of rows")
    (length,) = struct.unpack_from("<I", view, last + 4)
    return short_of(size, last + 8 + length, f"the last of {chunks} blocks of rows")


def _pam(view: memoryview, _: int) -> str | None:
    head = bytes(view[:512]).partition(b"ENDHDR")[0]
    maximum = re.search(rb"\nMAXVAL\s+(\d+)", head)
    if not maximum or int(maximum[1]) >= 255 or not re.search(rb"\nDEPTH\s+[24]\s", head):
        return None
    return f"FFmpeg does not scale images with alpha whose maximum is {int(maximum[1])}, not 255"


def _sgi(view: memoryview, size: int) -> str | None:
    if size > 2 and view[2] == 0:
        return None  # FFmpeg reports missing uncompressed rows
    dimensions, _, height, channels = struct.unpack_from(">4H", view, 4)
    rows = height * (channels if dimensions > 2 else 1)
    table = struct.unpack_from(f">{2 * min(rows, parts.MAX_PARTS * 4)}I", view, 512)
    half = len(table) // 2  # first the offsets of all rows, then their lengths
    end = max(map(add, table[:half], table[half:]), default=0)
    return short_of(size, end, f"the last of {rows} rows")


_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_BITS, _TIFF_COMPRESSION = 256, 257, 258, 259
_TIFF_SAMPLES, _TIFF_ROWS, _TIFF_SIZES = 277, 278, 279


def _tiff(view: memoryview, _size: int) -> str | None:
    entry = tiff_entry(view, _TIFF_SIZES)
    if entry is None:
        return None  # tiles
    order, kind, values = entry
    sizes = [each for (each,) in struct.iter_unpack(order + _TIFF_TYPES[kind], values)]
    if len(sizes) < 2:
        return None  # FFmpeg takes all of the file

    def tag(number: int) -> int:
        return tiff_value(view, number, 1) or 1

    needed = [1] * len(sizes)
    if tag(_TIFF_COMPRESSION) == 1:
        row = (tag(_TIFF_WIDTH) * tag(_TIFF_BITS) * tag(_TIFF_SAMPLES) + 7) // 8
        rows, height = tag(_TIFF_ROWS), tag(_TIFF_HEIGHT)
        needed = [row * min(rows, height - first) for first in range(0, height, rows)]
    # FFmpeg leaves out these and all after them.
    short = sum(map(lt, sizes, needed))
    return f"{short} of {len(sizes)} strips of rows are too short" if short else None


_IMAGE_CHECKS: Mapping[str, Callable[[memoryview, int], str | None]] = (
    dict.fromkeys(("jpegls", "mjpeg"), _jpeg)
    | dict.fromkeys(("apng", "png"), _png)
    | dict.fromkeys(("webp", "webp_anim"), _webp)
    | {"avif": _heif, "bmp": _bmp, "dpx": _dpx, "exr": _exr, "gif": _gif, "qoi": _qoi}
    | {"pam": _pam, "sgi": _sgi, "targa": _targa, "tiff": _tiff}
)
