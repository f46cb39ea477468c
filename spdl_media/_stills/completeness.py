"""Whether the file of a picture is whole.

FFmpeg decodes many files that were cut short without a word, with grey or stale pixels where the
data ended. The checks here are the ones it lacks. Formats that are not in the table need none: PNM
in binary form, JPEG 2000 and DDS report a single missing byte by themselves.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType

from spdl_media._stills.parts import (
    JPEG_END,
    MAX_PARTS,
    Bytes,
    TiffDirectory,
    boxes,
    byte_view,
    jpeg_segments,
    png_chunks,
)

__all__ = ("check_complete",)


def check_complete(codec: str, data: Bytes) -> str | None:
    """Say what is missing from the end of a picture's file.

    Meant beside the decoder, not instead of it: what FFmpeg notices itself is not looked for. These
    ends may be missing without a word, because no pixel is in them: whatever follows the
    end-of-image marker of a JPEG (the further pictures of an MPO included), the last chunk of a
    PNG, or the trailer of a GIF; directories of a TIFF after the first and values of tags that
    pixels don't depend on; the footer and extensions of a TGA; the levels after the first of a DDS.
    The last number of a PNM in plain text may have lost digits: nothing tells.

    Args:
        codec: FFmpeg's name of the decoder, or ``"avif"`` for AVIF and HEIF files.
        data: The whole file. Not copied.

    Returns:
        A clause such as ``"the data ends after 512 bytes, before the end-of-image marker"``, or
        ``None`` for a file that is whole, and for codecs that need no check.
    """
    check = _CHECKS.get(codec)
    if check is None:
        return None
    view = byte_view(data)
    try:
        return check(view)
    except struct.error:
        return _missing(view, "before its headers do")


def _missing(view: memoryview, before: str) -> str:
    return f"the data ends after {len(view)} bytes, {before}"


def _short(view: memoryview, needed: int, what: str) -> str | None:
    """None if the data has the bytes needed."""
    if len(view) >= needed:
        return None
    return f"the data ends after {len(view)} bytes, but {what} should end at byte {needed}"


def _jpeg(view: memoryview) -> str | None:
    # Coded data never hold this pair, so most files are settled by their last two bytes.
    if bytes(view[-2:]) == b"\xff\xd9":
        return None
    for marker, _, end in jpeg_segments(view):
        if marker == JPEG_END:
            return None
        if end > len(view):
            return _short(view, end, f"a segment with marker 0xFF{marker:02X}")
    return _missing(view, "before the end-of-image marker")


def _png(view: memoryview) -> str | None:
    if bytes(view[-12:-4]) == b"\0\0\0\0IEND":
        return None
    for kind, _, end in png_chunks(view):
        if end + 4 > len(view):
            return _short(view, end + 4, f"the chunk {kind.decode('latin-1')}")
        if kind == b"IEND":
            return None
    return _missing(view, "before the chunk IEND")


def _webp(view: memoryview) -> str | None:
    (size,) = struct.unpack_from("<I", view, 4)
    return _short(view, size + 8, "the RIFF form")


def _bmp(view: memoryview) -> str | None:
    pixels, header = struct.unpack_from("<II", view, 10)
    if header == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", view, 18)
        compression = size = 0
    else:
        width, height, _, depth, compression, size = struct.unpack_from("<iiHHII", view, 18)
    if compression in (1, 2):
        return _bmp_runs(view, pixels, size)
    tight, padded = (width * depth + 7) // 8, (width * depth + 31) // 32 * 4
    # Some writers don't pad rows. FFmpeg guesses that whenever bytes are missing, and so shears the
    # picture of a file that lost less than its padding. The file's size says which it is.
    (file_size,) = struct.unpack_from("<I", view, 2)
    if file_size <= len(view) == pixels + tight * abs(height):
        return None
    return _short(view, pixels + padded * abs(height), "the last row")


def _bmp_runs(view: memoryview, pixels: int, size: int) -> str | None:
    # The end-of-bitmap code outweighs a size field that is wrong, as it often is.
    if bytes(view[-2:]) == b"\0\1" or (size and len(view) >= pixels + size):
        return None
    return _missing(view, "before the end-of-bitmap code")


# Bits per sample, colour map, extra samples, sample format, JPEG tables, reference black and white:
# without their values FFmpeg assumes others, and the picture changes.
_TIFF_PIXEL_TAGS = (258, 320, 338, 339, 347, 532)
_TIFF_OFFSETS_AND_SIZES = (("strip", 273, 279), ("tile", 324, 325))


def _tiff(view: memoryview) -> str | None:
    directory = TiffDirectory(view)
    for tag in _TIFF_PIXEL_TAGS:
        if tag in directory.tags and directory.tags[tag].end > len(view):
            return _short(view, directory.tags[tag].end, f"the value of tag {tag}")
    for name, offsets, sizes in _TIFF_OFFSETS_AND_SIZES:
        starts, lengths = directory.values(offsets), directory.values(sizes)
        end = max((s + n for s, n in zip(starts, lengths, strict=False)), default=0)
        if end > len(view):
            return _short(view, end, f"the last of {len(starts)} {name}s")
    return None


# Seven zero bytes in a row cannot occur between the chunks of a QOI file.
_QOI_END = re.compile(rb"\0{7}\x01")


def _qoi(view: memoryview) -> str | None:
    if bytes(view[-8:]) == b"\0\0\0\0\0\0\0\1" or _QOI_END.search(view, 14):
        return None
    return _missing(view, "before the end marker")


def _targa(view: memoryview) -> str | None:
    if bytes(view[-18:]) == b"TRUEVISION-XFILE.\0" or len(view) < 18 or view[2] not in (9, 10, 11):
        return None  # FFmpeg notices when uncompressed pixels are missing.
    colors, color_depth = struct.unpack_from("<HB", view, 5)
    width, height, depth = struct.unpack_from("<HHB", view, 12)
    unit = (depth + 7) // 8
    position = 18 + view[0] + (colors * ((color_depth + 7) // 8) if view[1] else 0)
    missing, size = width * height, len(view)
    while missing > 0 and position < size:
        code = view[position]
        pixels = (code & 127) + 1
        missing -= pixels
        position += 1 + (unit if code & 128 else pixels * unit)
    if missing > 0:
        return _missing(view, f"before the runs of {missing} of {width * height} pixels")
    return _short(view, position, "the last run")


_GIF_TRAILER, _GIF_EXTENSION, _GIF_IMAGE = 0x3B, 0x21, 0x2C


def _gif(view: memoryview) -> str | None:
    position = 13 + _gif_colors(view, 10)
    # FFmpeg, as browsers do, skips stray bytes between blocks; hence no error for other kinds.
    for _ in range(MAX_PARTS):
        kind = view[position] if position < len(view) else None
        if kind is None:
            return _missing(view, "before the trailer of a GIF")
        if kind == _GIF_TRAILER:
            return None
        position += 1
        if kind == _GIF_EXTENSION:
            position = _gif_blocks(view, position + 1)
        elif kind == _GIF_IMAGE:
            position = _gif_blocks(view, position + 10 + _gif_colors(view, position + 8))
    return None


def _gif_colors(view: memoryview, flags: int) -> int:
    """Bytes of the colour table that a flag byte announces."""
    (bits,) = struct.unpack_from("B", view, flags)
    return 3 << ((bits & 7) + 1) if bits & 0x80 else 0


def _gif_blocks(view: memoryview, position: int) -> int:
    """Where the data blocks end that begin here, or the end of the data."""
    size = len(view)
    while position < size and view[position]:
        position += view[position] + 1
    return min(position + 1, size)


# Boxes that pixels depend on; behind the last one some cameras append data that are no boxes.
_HEIF_BOXES = (b"ftyp", b"meta", b"moov", b"mdat")


def _heif(view: memoryview) -> str | None:
    described = found = False
    for kind, start, end in boxes(view):
        if kind not in _HEIF_BOXES:
            continue
        if end > len(view):
            return _short(view, end, f"the box {kind.decode()}")
        described |= kind in (b"meta", b"moov")
        found |= kind == b"mdat"
        if kind == b"meta":
            last = max((_iloc_end(view, *part[1:]) for part in _iloc(view, start, end)), default=0)
            if last > len(view):
                return _short(view, last, "the last item")
            found |= last > 0
    return None if described and found else _missing(view, "before the boxes that hold the picture")


def _iloc(view: memoryview, start: int, end: int) -> list[tuple[bytes, int, int]]:
    return [part for part in boxes(view, start + 4, end) if part[0] == b"iloc"]


_WIDTHS = {0: "0s", 4: "I", 8: "Q"}


def _iloc_end(view: memoryview, start: int, stop: int) -> int:
    """The last byte, exclusive, of the items that an item location box places in the file."""
    version, sizes, bases = struct.unpack_from(">B3xBB", view, start)
    id_layout = ">I" if version == 2 else ">H"
    offset, length, base = (_WIDTHS.get(n, "0s") for n in (sizes >> 4, sizes & 15, bases >> 4))
    index = _WIDTHS.get(bases & 15, "0s") if version else "0s"
    (count,) = struct.unpack_from(id_layout, view, start + 6)
    position = start + 6 + struct.calcsize(id_layout)
    item = struct.Struct(f"{id_layout}{'H' if version else '0s'}H{base}H")
    extent = struct.Struct(f">{index}{offset}{length}")
    last = 0
    for _ in range(min(count, MAX_PARTS)):
        _, method, _, base_offset, extents = item.unpack_from(view, position)
        position += item.size
        end = position + extents * extent.size
        # Method 0 places extents in the file; 1 and 2 inside another item.
        if end > position and not _number(method) & 15:
            for _, first, size in extent.iter_unpack(view[position:end]):
                last = max(last, _number(base_offset) + _number(first) + _number(size))
        position = end
        if position > stop:
            break
    return last


def _number(value: int | bytes) -> int:
    # A field of no width reads as empty bytes and counts as 0.
    return value if isinstance(value, int) else 0


def _dpx(view: memoryview) -> str | None:
    order = ">" if bytes(view[:4]) == b"SDPX" else "<"
    (size,) = struct.unpack_from(f"{order}I", view, 16)
    (height,) = struct.unpack_from(f"{order}I", view, 776)
    # When no more than the padding of all rows is missing, FFmpeg takes the rows for unpadded. It
    # notices larger gaps; so a field that was left undefined (all ones) does no harm.
    return None if size - len(view) > 4 * height else _short(view, size, "the last row")


_EXR_ATTRIBUTE = re.compile(rb"([^\0]{1,255})\0([^\0]{1,255})\0")
_EXR_ROWS = {0: 1, 1: 1, 2: 1, 3: 16, 4: 32, 5: 16, 6: 32, 7: 32, 8: 32, 9: 256}
_EXR_TILED, _EXR_DEEP, _EXR_PARTS = 0x200, 0x800, 0x1000


def _exr(view: memoryview) -> str | None:
    (flags,) = struct.unpack_from("<I", view, 4)
    if flags & (_EXR_TILED | _EXR_DEEP | _EXR_PARTS):
        return None  # Their tables of blocks have other forms.
    attributes, position = _exr_attributes(view)
    (compression,) = struct.unpack_from("B", attributes.get(b"compression", b""))
    _, top, _, bottom = struct.unpack_from("<4i", attributes.get(b"dataWindow", b""))
    rows = _EXR_ROWS.get(compression, 1)
    chunks = (bottom - top) // rows + 1
    table = struct.unpack_from(f"<{min(max(chunks, 0), MAX_PARTS)}Q", view, position)
    if not all(table):
        return f"the data has no pixels for {table.count(0)} of {chunks} blocks of rows"
    last = max(table, default=0)
    if last + 8 > len(view):
        return _short(view, last + 8, f"the header of the last of {chunks} blocks of rows")
    (size,) = struct.unpack_from("<I", view, last + 4)
    return _short(view, last + 8 + size, f"the last of {chunks} blocks of rows")


def _exr_attributes(view: memoryview) -> tuple[dict[bytes, memoryview], int]:
    """The header by name, and where the table of blocks begins."""
    attributes: dict[bytes, memoryview] = {}
    position = 8
    for _ in range(MAX_PARTS):
        match = _EXR_ATTRIBUTE.match(view, position)
        if match is None:
            break
        (size,) = struct.unpack_from("<I", view, match.end())
        position = match.end() + 4 + size
        attributes[bytes(match[1])] = view[match.end() + 4 : position]
    return attributes, position + 1


def _sgi(view: memoryview) -> str | None:
    if len(view) > 2 and view[2] == 0:
        return None  # FFmpeg notices when uncompressed rows are missing.
    height, channels = struct.unpack_from(">HH", view, 8)
    dimensions = struct.unpack_from(">H", view, 4)[0]
    rows = (height if dimensions > 1 else 1) * (channels if dimensions > 2 else 1)
    table = struct.unpack_from(f">{2 * min(rows, MAX_PARTS * 4)}I", view, 512)
    ends = (start + size for start, size in zip(table, table[len(table) // 2 :], strict=False))
    return _short(view, max(ends, default=0), f"the last of {rows} rows")


def _sunrast(view: memoryview) -> str | None:
    width, height, depth, length, kind, _, colors = struct.unpack_from(">7I", view, 4)
    runs = kind == 2
    rows = length if runs else (width * depth + 15) // 16 * 2 * height
    return _short(view, 32 + colors + rows, "the last row")


_CHECKS: Mapping[str, Callable[[memoryview], str | None]] = MappingProxyType(
    {
        "apng": _png,
        "avif": _heif,
        "bmp": _bmp,
        "dpx": _dpx,
        "exr": _exr,
        "gif": _gif,
        "jpegls": _jpeg,
        "mjpeg": _jpeg,
        "png": _png,
        "qoi": _qoi,
        "sgi": _sgi,
        "sunrast": _sunrast,
        "targa": _targa,
        "tiff": _tiff,
        "webp": _webp,
        "webp_anim": _webp,
    }
)
