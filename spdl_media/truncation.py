"""Find what is missing from an image that was cut short, by the sizes that it states itself.

FFmpeg decodes many such images without a word, with gray or stale pixels where the data ended. Formats that
are not in the table report a single missing byte by themselves (TIFF, PNM in binary form, JPEG 2000, DDS), or
cannot tell.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Mapping
from operator import add

from spdl_media.boxes import MAX_PARTS, PNG, Bytes, boxes, missing_after, short_of
from spdl_media.exif import GIF_TRAILER, JPEG_END, bmp_header, gif_blocks, jpeg_segments

__all__ = ("check_complete", "wrong_checksum")


def check_complete(codec: str, data: Bytes, size: int | None = None) -> str | None:
    """Say what is missing from the end of an image's file.

    What FFmpeg notices itself is not looked for. Ends without pixels may be missing: what follows the
    end-of-image marker of a JPEG (the further images of an MPO included), the trailer of a GIF and the footer
    of a TGA. The last number of a PNM in plain text may have lost digits: nothing tells.

    Args:
        codec: FFmpeg's name of the decoder, or ``"avif"`` for AVIF and HEIF files.
        data: The whole file. Not copied.
        size: Bytes of the file, of which the head will do for a WebP, and for a BMP without runs.

    Returns:
        A clause as of :func:`missing_end`, or one that says which part of a header is wrong, or ``None`` for
        a file that is whole or needs no check.

    Raises:
        TypeError: ``data`` is no contiguous buffer.
    """
    view = memoryview(data).cast("B")
    try:
        return _IMAGE_CHECKS[codec](view, size or len(view)) if codec in _IMAGE_CHECKS else None
    except struct.error:
        return missing_after(len(view), "before its headers do")


def _jpeg(view: memoryview, size: int) -> str | None:
    # Coded data never hold this pair, so most files are settled by their last two bytes.
    if bytes(view[-2:]) == b"\xff\xd9":
        return None
    for marker, _, end in jpeg_segments(view):
        if marker == JPEG_END:
            return None
        if end > size:
            return short_of(size, end, f"a segment with marker 0xFF{marker:02X}")
    return missing_after(size, "before the end-of-image marker")


def _png(view: memoryview, size: int) -> str | None:
    if wrong := wrong_checksum(view):
        return wrong
    if bytes(view[-12:-4]) == b"\0\0\0\0IEND":
        return None
    for kind, _, end in PNG.of(view):
        if end + PNG.trailer > size:
            return short_of(size, end + PNG.trailer, f"the chunk {kind.decode('latin-1')}")
        if kind == b"IEND":
            return None
    return missing_after(size, "before the chunk IEND")


def wrong_checksum(png: memoryview) -> str | None:
    """Say which part of a PNG before its pixels, of those that they depend on, fails its checksum.

    FFmpeg compares that of the inflated pixels alone, or refuses files for the checksum of a text, too.
    """
    for kind, start, end in PNG.of(png):
        if kind in (b"IHDR", b"PLTE", b"tRNS") and end + PNG.trailer <= len(png):
            (checksum,) = struct.unpack_from(">I", png, end)
            if zlib.crc32(png[start - 4 : end]) != checksum:
                return f"the checksum of the chunk {kind.decode()} is wrong"
        elif kind == b"IDAT":
            break
    return None


def _webp(view: memoryview, size: int) -> str | None:
    (length,) = struct.unpack_from("<I", view, 4)
    return short_of(size, length + 8, "the RIFF form")


def _bmp(view: memoryview, size: int) -> str | None:
    pixels, width, height, depth, compression, length = bmp_header(view)
    if compression in (1, 2):
        # The end-of-bitmap code outweighs a size field that is wrong, as it often is.
        if bytes(view[-2:]) == b"\0\1" or (length and size >= pixels + length):
            return None
        return missing_after(size, "before the end-of-bitmap code")
    tight, padded = (width * depth + 7) // 8, (width * depth + 31) // 32 * 4
    # Some writers don't pad rows. FFmpeg guesses that whenever bytes are missing, and so shears the
    # image of a file that lost less than its padding. The file's size says which it is.
    (file_size,) = struct.unpack_from("<I", view, 2)
    if file_size <= size == pixels + tight * abs(height):
        return None
    return short_of(size, pixels + padded * abs(height), "the last row")


def _qoi(view: memoryview, size: int) -> str | None:
    # Seven zero bytes in a row cannot occur between the chunks of a QOI file.
    end = b"\0\0\0\0\0\0\0\1"
    if bytes(view[-8:]) == end or re.search(end, view[14:]):
        return None
    return missing_after(size, "before the end marker")


def _targa(view: memoryview, size: int) -> str | None:
    if bytes(view[-18:]) == b"TRUEVISION-XFILE.\0" or size < 18 or view[2] not in (9, 10, 11):
        return None  # FFmpeg notices when uncompressed pixels are missing.
    colors, color_depth = struct.unpack_from("<HB", view, 5)
    width, height, depth = struct.unpack_from("<HHB", view, 12)
    unit = (depth + 7) // 8
    position = 18 + view[0] + (colors * ((color_depth + 7) // 8) if view[1] else 0)
    missing = width * height
    while missing > 0 and position < size:
        # With the highest bit set, one pixel stands for the whole run.
        code = view[position]
        pixels = (code & 127) + 1
        missing -= pixels
        position += 1 + (unit if code & 128 else pixels * unit)
    if missing > 0:
        return missing_after(size, f"before the runs of {missing} of {width * height} pixels")
    return short_of(size, position, "the last run")


def _gif(view: memoryview, size: int) -> str | None:
    if GIF_TRAILER in gif_blocks(view):
        return None
    return missing_after(size, "before the trailer of a GIF")


def _heif(view: memoryview, size: int) -> str | None:
    described = found = False
    for kind, start, end in boxes(view):
        # Behind the last box that pixels depend on, some cameras append data that are no boxes.
        if kind not in (b"ftyp", b"meta", b"moov", b"mdat"):
            continue
        if end > size:
            return short_of(size, end, f"the box {kind.decode()}")
        described |= kind in (b"meta", b"moov")
        # Small images may stand among the metadata, which are behind a version of four bytes.
        inside = boxes(view, start + 4, end) if kind == b"meta" else ()
        found |= kind == b"mdat" or any(part == b"idat" for part, _, _ in inside)
    return (
        None if described and found else missing_after(size, "before the boxes that hold the image")
    )


def _dpx(view: memoryview, size: int) -> str | None:
    order = ">" if bytes(view[:4]) == b"SDPX" else "<"
    length, height = struct.unpack_from(f"{order}I756xI", view, 16)
    # When no more than the padding of all rows is missing, FFmpeg takes the rows for unpadded. It
    # notices larger gaps; so a field that was left undefined (all ones) does no harm.
    return None if length - size > 4 * height else short_of(size, length, "the last row")


_EXR_ATTRIBUTE = re.compile(rb"([^\0]{1,255})\0([^\0]{1,255})\0")
_EXR_ROWS = {3: 16, 4: 32, 5: 16, 6: 32, 7: 32, 8: 32, 9: 256}


def _exr(view: memoryview, size: int) -> str | None:
    (flags,) = struct.unpack_from("<I", view, 4)
    if flags & (0x200 | 0x800 | 0x1000):
        return None  # Tiled, deep, several parts: their tables of blocks have other forms.
    attributes: dict[bytes, memoryview] = {}
    position = 8
    for _ in range(MAX_PARTS):
        match = _EXR_ATTRIBUTE.match(view, position)
        if match is None:
            break
        (length,) = struct.unpack_from("<I", view, match.end())
        position = match.end() + 4 + length
        attributes[bytes(match[1])] = view[match.end() + 4 : position]
    (compression,) = struct.unpack_from("B", attributes.get(b"compression", b""))
    _, top, _, bottom = struct.unpack_from("<4i", attributes.get(b"dataWindow", b""))
    chunks = (bottom - top) // _EXR_ROWS.get(compression, 1) + 1
    table = struct.unpack_from(f"<{min(max(chunks, 0), MAX_PARTS)}Q", view, position + 1)
    # Writers reserve the table first, and fill it in as blocks are done.
    if not all(table):
        return f"the data has no pixels for {table.count(0)} of {chunks} blocks of rows"
    last = max(table, default=0)
    if last + 8 > size:
        return short_of(size, last + 8, f"the header of the last of {chunks} blocks of rows")
    (length,) = struct.unpack_from("<I", view, last + 4)
    return short_of(size, last + 8 + length, f"the last of {chunks} blocks of rows")


def _sgi(view: memoryview, size: int) -> str | None:
    if size > 2 and view[2] == 0:
        return None  # FFmpeg notices when uncompressed rows are missing.
    dimensions, _, height, channels = struct.unpack_from(">4H", view, 4)
    rows = (height if dimensions > 1 else 1) * (channels if dimensions > 2 else 1)
    table = struct.unpack_from(f">{2 * min(rows, MAX_PARTS * 4)}I", view, 512)
    half = len(table) // 2  # first the starts of all rows, then their lengths
    end = max(map(add, table[:half], table[half:]), default=0)
    return short_of(size, end, f"the last of {rows} rows")


def _sunrast(view: memoryview, size: int) -> str | None:
    width, height, depth, length, kind, _, colors = struct.unpack_from(">7I", view, 4)
    # Kind 2 has runs, of which the header states the length.
    rows = length if kind == 2 else (width * depth + 15) // 16 * 2 * height
    return short_of(size, 32 + colors + rows, "the last row")


_IMAGE_CHECKS: Mapping[str, Callable[[memoryview, int], str | None]] = (
    dict.fromkeys(("jpegls", "mjpeg"), _jpeg)
    | dict.fromkeys(("apng", "png"), _png)
    | dict.fromkeys(("webp", "webp_anim"), _webp)
    | {"avif": _heif, "bmp": _bmp, "dpx": _dpx, "exr": _exr, "gif": _gif, "qoi": _qoi}
    | {"sgi": _sgi, "sunrast": _sunrast, "targa": _targa}
)
