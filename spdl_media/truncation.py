"""What is missing from the end of a file that was cut short, by the sizes that it states itself.

FFmpeg decodes many such images without a word, with gray or stale pixels where the data ended, and reads
containers up to their end and says nothing. The checks here are the ones that it lacks. Formats that are
not in the tables need none, or do not tell: PNM in binary form, JPEG 2000 and DDS report a single missing
byte by themselves.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from spdl_media.orientation import (
    JPEG_END,
    MAX_PARTS,
    Bytes,
    TiffDirectory,
    boxes,
    byte_view,
    jpeg_segments,
    png_chunks,
)

__all__ = ("check_complete", "missing_end", "mp3_frame_size")

Read: TypeAlias = Callable[[int, int], bytes]
"""Gives up to so many bytes from a position of the file: ``read(position, size)``."""

# A walk through a fragmented MP4 of many hours takes some thousand steps, one small read each.
_MAX_PARTS = 1 << 14

# What writers that cannot go back put for a size they do not know: FFmpeg 2**32 - 1, SoX numbers from
# 0x7ffff000 up, others 0.
_UNKNOWN_SIZE = 0x7FFFF000


def missing_end(read: Read, size: int) -> str | None:
    """Say what is missing from the end of a container file.

    Args:
        read: Gives bytes of the file; fewer than asked for only at its end.
        size: Bytes in the file.

    Returns:
        A clause such as ``"the data ends after 512 bytes, but the chunk data should end at byte 1024"``, or
        ``None`` for a file that is whole, or whose format does not tell.
    """
    head = read(0, 2 * _TS_PACKET + 1)
    try:
        for matches, check in _CONTAINER_CHECKS:
            if matches(head):
                return check(read, size)
    except struct.error:
        return f"the data ends after {size} bytes, inside a header"
    return None


def _short(size: int, needed: int, what: str) -> str | None:
    if needed <= size:
        return None
    return f"the data ends after {size} bytes, but {what} should end at byte {needed}"


def _wave(read: Read, size: int) -> str | None:
    # The size of the whole form is wrong in many files whose data are all there, so it is not looked at.
    return _chunks(read, size, "<I", 12, b"data")


def _aiff(read: Read, size: int) -> str | None:
    return _chunks(read, size, ">I", 12, b"SSND")


def _chunks(read: Read, size: int, layout: str, position: int, wanted: bytes) -> str | None:
    """Walk the chunks of a RIFF or IFF form to the one with the data."""
    for _ in range(_MAX_PARTS):
        if position >= size:
            return None if position == size else _short(size, position, "the last chunk")
        header = read(position, 8)
        (length,) = struct.unpack_from(layout, header, 4)
        if header[:4] == wanted:
            known = 0 < length < _UNKNOWN_SIZE
            return (
                _short(size, position + 8 + length, f"the chunk {wanted.decode()}")
                if known
                else None
            )
        position += 8 + length + length % 2
    return None


def _avi(read: Read, size: int) -> str | None:
    """Long files are several RIFF forms, each with one list ``movi``; an index may follow it."""
    position, steps = 0, iter(range(_MAX_PARTS))  # one budget for all forms together
    while position + 12 <= size:
        (length,) = struct.unpack_from("<I", read(position, 8), 4)
        if not 0 < length < _UNKNOWN_SIZE:
            return None
        if short := _movi(read, size, position + 12, steps):
            return short
        position += 8 + length + length % 2
    return None


def _movi(read: Read, size: int, position: int, steps: Iterator[int]) -> str | None:
    for _ in steps:
        if position + 12 > size:
            return _short(size, position + 12, "the header of the list movi")
        header = read(position, 12)
        (length,) = struct.unpack_from("<I", header, 4)
        if header[:4] == b"LIST" and header[8:] == b"movi":
            known = 0 < length < _UNKNOWN_SIZE
            return _short(size, position + 8 + length, "the list movi") if known else None
        position += 8 + length + length % 2
    return None


def _mp4(read: Read, size: int) -> str | None:
    position, found = 0, False
    for _ in range(_MAX_PARTS):
        if position + 8 > size:
            break
        header = read(position, 16)
        (length,) = struct.unpack_from(">I", header)
        kind = header[4:8]
        if length == 1:
            (length,) = struct.unpack_from(">Q", header, 8)
        if length == 0 or not kind.isascii():
            return None  # up to the end of the file, or what follows is no box
        found |= kind == b"mdat"
        if length < 8:
            return None
        if kind in _MP4_BOXES and (
            short := _short(size, position + length, f"the box {kind.decode()}")
        ):
            return short
        position += length
    return None if found else f"the data ends after {size} bytes, before the box mdat"


_MP4_BOXES = (b"moov", b"mdat", b"moof")


def _au(read: Read, size: int) -> str | None:
    start, length = struct.unpack_from(">II", read(0, 12), 4)
    known = 0 < length < _UNKNOWN_SIZE
    return _short(size, start + length, "the sound") if known else None


def _caf(read: Read, size: int) -> str | None:
    position = 8
    for _ in range(_MAX_PARTS):
        if position >= size:
            return None
        header = read(position, 12)
        (length,) = struct.unpack_from(">q", header, 4)
        if header[:4] == b"data":
            return _short(size, position + 12 + length, "the chunk data") if length > 0 else None
        position += 12 + max(0, length)
    return None


_EBML_SEGMENT = b"\x18\x53\x80\x67"


def _matroska(read: Read, size: int) -> str | None:
    head = read(0, 4096)
    position, length = _ebml_size(head, 4)
    position += length or 0
    if head[position : position + 4] != _EBML_SEGMENT:
        return None
    start, length = _ebml_size(head, position + 4)
    return None if length is None else _short(size, start + length, "the segment")


def _ebml_size(data: bytes, position: int) -> tuple[int, int | None]:
    """Where the payload of an element begins, and its size; None: it is not known, as in live streams."""
    (first,) = struct.unpack_from("B", data, position)
    width = 9 - first.bit_length()
    (value,) = struct.unpack_from(f"{width}s", data, position)
    number = int.from_bytes(value, "big") - (1 << 7 * width)
    return position + width, None if number == (1 << 7 * width) - 1 else number


_OGG_PAGE = 27 + 255 + 255 * 255


def _ogg(read: Read, size: int) -> str | None:
    """Only a page that the cut goes through can be noticed: recordings of live streams have no last page."""
    start = max(0, size - _OGG_PAGE)
    tail = read(start, _OGG_PAGE)
    position = tail.rfind(b"OggS\0")
    if position < 0:
        return None
    (segments,) = struct.unpack_from("B", tail, position + 26)
    lengths = struct.unpack_from(f"{segments}B", tail, position + 27)
    return _short(size, start + position + 27 + segments + sum(lengths), "the last page")


_TS_PACKET = 188


def _transport_stream(_: Read, size: int) -> str | None:
    rest = size % _TS_PACKET
    return _short(size, size - rest + _TS_PACKET, "the last packet") if rest else None


def _is_transport_stream(head: bytes) -> bool:
    return len(head) > 2 * _TS_PACKET and head[: 2 * _TS_PACKET + 1 : _TS_PACKET] == b"GGG"


# Kilobits a second by the index in the header, of layer III in MPEG-1 and in MPEG-2 and 2.5.
_MP3_RATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
_MP3_SAMPLE_RATES = (44100, 48000, 32000)


def mp3_frame_size(header: bytes) -> int | None:
    """Bytes in the MP3 frame that begins with these four; ``None``: no such frame, or one of free size."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return None
    version, rate, sample_rate = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    if version == 1 or rate in (0, 15) or sample_rate == 3:
        return None
    is_mpeg1 = version == 3
    bits = _MP3_RATES[0 if is_mpeg1 else 1][rate] * (144_000 if is_mpeg1 else 72_000)
    return bits // (_MP3_SAMPLE_RATES[sample_rate] >> (3 - version + 1) // 2) + (header[2] >> 1 & 1)


def _riff(kind: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[:4] == b"RIFF" and head[8:12] == kind


def _starts_with(signature: bytes, at: int = 0) -> Callable[[bytes], bool]:
    return lambda head: head[at : at + len(signature)] == signature


_CONTAINER_CHECKS: tuple[tuple[Callable[[bytes], bool], Callable[[Read, int], str | None]], ...] = (
    (_riff(b"WAVE"), _wave),
    (_riff(b"AVI "), _avi),
    (_starts_with(b"FORM"), _aiff),
    (_starts_with(b".snd"), _au),
    (_starts_with(b"caff"), _caf),
    (_starts_with(b"ftyp", 4), _mp4),
    (_starts_with(b"moov", 4), _mp4),
    (_starts_with(b"\x1a\x45\xdf\xa3"), _matroska),
    (_starts_with(b"OggS"), _ogg),
    (_is_transport_stream, _transport_stream),
)


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
    check = _STILL_CHECKS.get(codec)
    if check is None:
        return None
    view = byte_view(data)
    try:
        return check(view)
    except struct.error:
        return _missing(view, "before its headers do")


def _missing(view: memoryview, before: str) -> str:
    return f"the data ends after {len(view)} bytes, {before}"


def _jpeg(view: memoryview) -> str | None:
    # Coded data never hold this pair, so most files are settled by their last two bytes.
    if bytes(view[-2:]) == b"\xff\xd9":
        return None
    for marker, _, end in jpeg_segments(view):
        if marker == JPEG_END:
            return None
        if end > len(view):
            return _short(len(view), end, f"a segment with marker 0xFF{marker:02X}")
    return _missing(view, "before the end-of-image marker")


def _png(view: memoryview) -> str | None:
    if bytes(view[-12:-4]) == b"\0\0\0\0IEND":
        return None
    for kind, _, end in png_chunks(view):
        if end + 4 > len(view):
            return _short(len(view), end + 4, f"the chunk {kind.decode('latin-1')}")
        if kind == b"IEND":
            return None
    return _missing(view, "before the chunk IEND")


def _webp(view: memoryview) -> str | None:
    (size,) = struct.unpack_from("<I", view, 4)
    return _short(len(view), size + 8, "the RIFF form")


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
    return _short(len(view), pixels + padded * abs(height), "the last row")


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
            return _short(len(view), directory.tags[tag].end, f"the value of tag {tag}")
    for name, offsets, sizes in _TIFF_OFFSETS_AND_SIZES:
        starts, lengths = directory.values(offsets), directory.values(sizes)
        end = max((s + n for s, n in zip(starts, lengths, strict=False)), default=0)
        if end > len(view):
            return _short(len(view), end, f"the last of {len(starts)} {name}s")
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
    return _short(len(view), position, "the last run")


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
            return _short(len(view), end, f"the box {kind.decode()}")
        described |= kind in (b"meta", b"moov")
        found |= kind == b"mdat"
        if kind == b"meta":
            last = max((_iloc_end(view, *part[1:]) for part in _iloc(view, start, end)), default=0)
            if last > len(view):
                return _short(len(view), last, "the last item")
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
    return None if size - len(view) > 4 * height else _short(len(view), size, "the last row")


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
        return _short(len(view), last + 8, f"the header of the last of {chunks} blocks of rows")
    (size,) = struct.unpack_from("<I", view, last + 4)
    return _short(len(view), last + 8 + size, f"the last of {chunks} blocks of rows")


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
    return _short(len(view), max(ends, default=0), f"the last of {rows} rows")


def _sunrast(view: memoryview) -> str | None:
    width, height, depth, length, kind, _, colors = struct.unpack_from(">7I", view, 4)
    runs = kind == 2
    rows = length if runs else (width * depth + 15) // 16 * 2 * height
    return _short(len(view), 32 + colors + rows, "the last row")


_STILL_CHECKS: Mapping[str, Callable[[memoryview], str | None]] = MappingProxyType(
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
