"""Find what is missing from a file that was cut short, by the sizes that it states itself.

FFmpeg decodes many such images without a word, with gray or stale pixels where the data ended, and reads
containers up to their end and says nothing. Formats that are not in the tables report a single missing byte
by themselves (TIFF, PNM in binary form, JPEG 2000, DDS), or cannot tell.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from operator import add
from typing import Any, TypeAlias

from spdl_media.exif import (
    CAF,
    GIF_TRAILER,
    IFF,
    JPEG_END,
    MAX_PARTS,
    PNG,
    RIFF,
    Bytes,
    Part,
    Read,
    bmp_header,
    boxes,
    gif_blocks,
    jpeg_segments,
    read_boxes,
)

__all__ = ("check_complete", "index_is_last", "missing_end", "missing_packets", "wrong_checksum")

_Check: TypeAlias = Callable[[Read, int], str | None]


def _missing(size: int, before: str) -> str:
    return f"the data ends after {size} bytes, {before}"


def _short(size: int, needed: int, what: str) -> str | None:
    """None if the data has the bytes needed."""
    if size >= needed:
        return None
    return _missing(size, f"but {what} should end at byte {needed}")


# A walk through a fragmented MP4 of many hours takes some thousand steps, one small read each.
_MAX_STEPS = 1 << 14

# What writers that cannot go back put for a size they do not know: FFmpeg 2**32 - 1, SoX numbers from
# 0x7ffff000 up, others 0.
_UNKNOWN_SIZE = 0x7FFFF000

_TS_PACKET = 188


def missing_end(read: Read, size: int) -> str | None:
    """Say what is missing from the end of a container file of ``size`` bytes.

    WAV, AVI, AIFF, AU, CAF, MP4, MOV, Matroska and WebM tell wherever the cut is; Ogg, MPEG-TS and MP3 where
    it goes through a page, packet or frame.

    Returns:
        A clause such as ``"the data ends after 512 bytes, but the chunk data should end at byte 1024"``, or
        ``None`` for a file that is whole, or whose format does not tell.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    head = read(0, 2 * _TS_PACKET + 1)
    try:
        for position, signature, check in _CONTAINER_CHECKS:
            if head[position : position + len(signature)] == signature:
                return check(read, size)
    except struct.error:
        return _missing(size, "inside a header")
    rest = size % _TS_PACKET
    if rest and head[::_TS_PACKET] == b"GGG":  # an MPEG transport stream
        return _short(size, size - rest + _TS_PACKET, "the last packet")
    return None


def missing_packets(streams: Iterable[Any], size: int) -> str | None:
    """Say the same of an MP4 whose boxes are whole, by the packets that it lists."""
    last = [stream.index_entries[-1] for stream in streams if stream.index_entries]
    end = max((entry.pos + entry.size for entry in last), default=0)
    return _short(size, end, "the last packet")


def _chunk(
    form: Callable[[Read, int], Iterable[Part]], wanted: bytes, unknown: int = _UNKNOWN_SIZE
) -> _Check:
    """Check the chunk that holds the samples."""

    def check(read: Read, size: int) -> str | None:
        end = size
        for kind, start, end in islice(form(read, size), _MAX_STEPS):
            if kind == wanted:
                is_known = 0 < end - start < unknown
                return _short(size, end, f"the chunk {wanted.decode()}") if is_known else None
        return _short(size, end + end % 2, "the last chunk")

    return check


def _avi(read: Read, size: int) -> str | None:
    """Long files are several RIFF forms, each with one list ``movi``; an index may follow it."""
    steps = iter(range(_MAX_STEPS))  # one budget for all forms together
    for form, position, end in RIFF._replace(start=0).read(read, size - 11):
        if form != b"RIFF":
            return None  # padding, an index, or whatever a writer put behind the last form
        if not 0 < end - position < _UNKNOWN_SIZE:
            return None
        start = position + 4
        for _ in steps:
            if start + 12 > size:
                return _short(size, start + 12, "the header of the list movi")
            kind, length, name = struct.unpack("<4sI4s", read(start, 12))
            if kind == b"LIST" and name == b"movi":
                if 0 < length < _UNKNOWN_SIZE and start + 8 + length > size:
                    return _short(size, start + 8 + length, "the list movi")
                break
            start += 8 + length + length % 2
    return None


def _mp4(read: Read, size: int) -> str | None:
    found, end = False, 0
    for kind, _, end in islice(read_boxes(read, 0, size), _MAX_STEPS):
        if not kind.isascii():
            return None  # What follows is no box.
        found |= kind == b"mdat"
        # Some writers count the header of this box twice. Whether packets are missing, their list says.
        slack = 8 if kind == b"mdat" else 0
        if kind in (b"moov", b"mdat", b"moof") and end > size + slack:
            return _short(size, end, f"the box {kind.decode()}")
    is_cut = end + 8 > size  # else no box follows
    return _missing(size, "before the box mdat") if is_cut and not found else None


_BEFORE_INDEX = frozenset({b"ftyp", b"free", b"skip", b"wide", b"uuid", b"pnot"})


def index_is_last(head: Bytes) -> bool:
    """Whether an MP4 or QuickTime file has its samples before its index."""
    kinds = (kind for kind, _, _ in boxes(memoryview(head)))
    return next((kind for kind in kinds if kind not in _BEFORE_INDEX), None) == b"mdat"


def _au(read: Read, size: int) -> str | None:
    start, length = struct.unpack_from(">II", read(0, 12), 4)
    return _short(size, start + length, "the audio data") if 0 < length < _UNKNOWN_SIZE else None


def _matroska(read: Read, size: int) -> str | None:
    head = read(0, 4096)
    position, length = _ebml_size(head, 4)
    position += length or 0
    if head[position : position + 4] != b"\x18\x53\x80\x67":
        return None  # The segment, which holds everything else, does not follow the header.
    start, length = _ebml_size(head, position + 4)
    return None if length is None else _short(size, start + length, "the segment")


def _ebml_size(data: Bytes, position: int) -> tuple[int, int | None]:
    """Where the payload of an element begins, and its size; None: it is not known, as in live streams."""
    (first,) = struct.unpack_from("B", data, position)
    # The zeros in front of the first 1 say how many bytes follow; all ones behind it mean
    # "unknown".
    width = 9 - first.bit_length()
    (value,) = struct.unpack_from(f"{width}s", data, position)
    number = int.from_bytes(value, "big") - (1 << 7 * width)
    return position + width, None if number == (1 << 7 * width) - 1 else number


# The largest page: header, table of segments, 255 segments of 255 bytes.
_OGG_PAGE = 27 + 255 + 255 * 255


def _ogg(read: Read, size: int) -> str | None:
    """Only a page that the cut goes through can be noticed: recordings of live streams have no last page."""
    start = max(0, size - _OGG_PAGE)
    tail = bytes(read(start, _OGG_PAGE))
    # The version, 0, belongs to the signature: four letters alone may stand in coded data.
    position = tail.rfind(b"OggS\0")
    if position < 0:
        return None
    (segments,) = struct.unpack_from("B", tail, position + 26)
    lengths = struct.unpack_from(f"{segments}B", tail, position + 27)
    return _short(size, start + position + 27 + segments + sum(lengths), "the last page")


_CONTAINER_CHECKS: tuple[tuple[int, bytes, _Check], ...] = (
    # The size of the whole form is wrong in many files whose data are all there, so it is not looked at.
    (8, b"WAVE", _chunk(RIFF.read, b"data")),
    (8, b"AVI ", _avi),
    (0, b"FORM", _chunk(IFF.read, b"SSND")),
    (0, b".snd", _au),
    (0, b"caff", _chunk(CAF.read, b"data", unknown=1 << 62)),
    (4, b"ftyp", _mp4),
    (4, b"moov", _mp4),
    (0, b"\x1a\x45\xdf\xa3", _matroska),
    (0, b"OggS", _ogg),
)


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
        return _missing(len(view), "before its headers do")


def _jpeg(view: memoryview, size: int) -> str | None:
    # Coded data never hold this pair, so most files are settled by their last two bytes.
    if bytes(view[-2:]) == b"\xff\xd9":
        return None
    for marker, _, end in jpeg_segments(view):
        if marker == JPEG_END:
            return None
        if end > size:
            return _short(size, end, f"a segment with marker 0xFF{marker:02X}")
    return _missing(size, "before the end-of-image marker")


def _png(view: memoryview, size: int) -> str | None:
    if wrong := wrong_checksum(view):
        return wrong
    if bytes(view[-12:-4]) == b"\0\0\0\0IEND":
        return None
    for kind, _, end in PNG.of(view):
        if end + PNG.trailer > size:
            return _short(size, end + PNG.trailer, f"the chunk {kind.decode('latin-1')}")
        if kind == b"IEND":
            return None
    return _missing(size, "before the chunk IEND")


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
    return _short(size, length + 8, "the RIFF form")


def _bmp(view: memoryview, size: int) -> str | None:
    pixels, width, height, depth, compression, length = bmp_header(view)
    if compression in (1, 2):
        # The end-of-bitmap code outweighs a size field that is wrong, as it often is.
        if bytes(view[-2:]) == b"\0\1" or (length and size >= pixels + length):
            return None
        return _missing(size, "before the end-of-bitmap code")
    tight, padded = (width * depth + 7) // 8, (width * depth + 31) // 32 * 4
    # Some writers don't pad rows. FFmpeg guesses that whenever bytes are missing, and so shears the
    # image of a file that lost less than its padding. The file's size says which it is.
    (file_size,) = struct.unpack_from("<I", view, 2)
    if file_size <= size == pixels + tight * abs(height):
        return None
    return _short(size, pixels + padded * abs(height), "the last row")


def _qoi(view: memoryview, size: int) -> str | None:
    # Seven zero bytes in a row cannot occur between the chunks of a QOI file.
    end = b"\0\0\0\0\0\0\0\1"
    if bytes(view[-8:]) == end or re.search(end, view[14:]):
        return None
    return _missing(size, "before the end marker")


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
        return _missing(size, f"before the runs of {missing} of {width * height} pixels")
    return _short(size, position, "the last run")


def _gif(view: memoryview, size: int) -> str | None:
    if GIF_TRAILER in gif_blocks(view):
        return None
    return _missing(size, "before the trailer of a GIF")


def _heif(view: memoryview, size: int) -> str | None:
    described = found = False
    for kind, start, end in boxes(view):
        # Behind the last box that pixels depend on, some cameras append data that are no boxes.
        if kind not in (b"ftyp", b"meta", b"moov", b"mdat"):
            continue
        if end > size:
            return _short(size, end, f"the box {kind.decode()}")
        described |= kind in (b"meta", b"moov")
        # Small images may stand among the metadata, which are behind a version of four bytes.
        inside = boxes(view, start + 4, end) if kind == b"meta" else ()
        found |= kind == b"mdat" or any(part == b"idat" for part, _, _ in inside)
    return None if described and found else _missing(size, "before the boxes that hold the image")


def _dpx(view: memoryview, size: int) -> str | None:
    order = ">" if bytes(view[:4]) == b"SDPX" else "<"
    length, height = struct.unpack_from(f"{order}I756xI", view, 16)
    # When no more than the padding of all rows is missing, FFmpeg takes the rows for unpadded. It
    # notices larger gaps; so a field that was left undefined (all ones) does no harm.
    return None if length - size > 4 * height else _short(size, length, "the last row")


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
        return _short(size, last + 8, f"the header of the last of {chunks} blocks of rows")
    (length,) = struct.unpack_from("<I", view, last + 4)
    return _short(size, last + 8 + length, f"the last of {chunks} blocks of rows")


def _sgi(view: memoryview, size: int) -> str | None:
    if size > 2 and view[2] == 0:
        return None  # FFmpeg notices when uncompressed rows are missing.
    dimensions, _, height, channels = struct.unpack_from(">4H", view, 4)
    rows = (height if dimensions > 1 else 1) * (channels if dimensions > 2 else 1)
    table = struct.unpack_from(f">{2 * min(rows, MAX_PARTS * 4)}I", view, 512)
    half = len(table) // 2  # first the starts of all rows, then their lengths
    end = max(map(add, table[:half], table[half:]), default=0)
    return _short(size, end, f"the last of {rows} rows")


def _sunrast(view: memoryview, size: int) -> str | None:
    width, height, depth, length, kind, _, colors = struct.unpack_from(">7I", view, 4)
    # Kind 2 has runs, of which the header states the length.
    rows = length if kind == 2 else (width * depth + 15) // 16 * 2 * height
    return _short(size, 32 + colors + rows, "the last row")


_IMAGE_CHECKS: Mapping[str, Callable[[memoryview, int], str | None]] = (
    dict.fromkeys(("jpegls", "mjpeg"), _jpeg)
    | dict.fromkeys(("apng", "png"), _png)
    | dict.fromkeys(("webp", "webp_anim"), _webp)
    | {"avif": _heif, "bmp": _bmp, "dpx": _dpx, "exr": _exr, "gif": _gif, "qoi": _qoi}
    | {"sgi": _sgi, "sunrast": _sunrast, "targa": _targa}
)
