"""Detect images that FFmpeg decodes wrongly without an error: truncated files, and unsupported variants.

FFmpeg leaves gray or stale pixels where the data of an image ended. The sizes stated in the file tell what is
missing. For formats that are not in the table, FFmpeg reports even a single missing byte (TIFF, JPEG 2000,
DDS, binary PNM), or nothing in the file can tell.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Mapping
from operator import add

from spdl_media import parts, still_parts
from spdl_media.parts import Bytes, missing_after, short_of

__all__ = ()


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
        A clause as from :func:`missing_end`, or one that names the wrong part of a header, or ``None`` if
        the file is complete or needs no check.

    Raises:
        TypeError: ``data`` is not a contiguous buffer.
    """
    view = memoryview(data).cast("B")
    try:
        return _IMAGE_CHECKS[codec](view, size or len(view)) if codec in _IMAGE_CHECKS else None
    except struct.error:
        return missing_after(len(view), "before its headers do")


def _jpeg(view: memoryview, size: int) -> str | None:
    # The end-of-image marker. It never occurs in coded data, so most files need no further check.
    if bytes(view[-2:]) == b"\xff\xd9":
        return None
    for marker, _, end in still_parts.jpeg_segments(view):
        if marker == still_parts.JPEG_END:
            return None
        if end > size:
            return short_of(size, end, f"a segment with marker 0xFF{marker:02X}")
    return missing_after(size, "before the end-of-image marker")


def _png(view: memoryview, size: int) -> str | None:
    if wrong := _wrong_checksum(view):
        return wrong
    if bytes(view[-12:-4]) == b"\0\0\0\0IEND":
        return None
    for kind, _, end in parts.PNG.of(view):
        if end + parts.PNG.trailer > size:
            return short_of(size, end + parts.PNG.trailer, f"the chunk {kind.decode('latin-1')}")
        if kind == b"IEND":
            return None
    return missing_after(size, "before the chunk IEND")


def _wrong_checksum(png: memoryview) -> str | None:
    """Describe a wrong checksum of a PNG chunk that the pixels depend on.

    FFmpeg compares only the checksum of the inflated pixels, or else refuses files for the checksum of a text
    chunk, too.
    """
    for kind, start, end in parts.PNG.of(png):
        if kind in (b"IHDR", b"PLTE", b"tRNS") and end + parts.PNG.trailer <= len(png):
            (checksum,) = struct.unpack_from(">I", png, end)
            if zlib.crc32(png[start - 4 : end]) != checksum:
                return f"the checksum of the chunk {kind.decode()} is wrong"
        elif kind == b"IDAT":
            break
    return None


def _webp(view: memoryview, size: int) -> str | None:
    (length,) = struct.unpack_from("<I", view, 4)
    return short_of(size, length + 8, "the RIFF form")


# Compressions of rows of one size: none, and two with masks.
_BMP_ROWS = (0, 3, 6)


def _bmp(view: memoryview, size: int) -> str | None:
    pixels, width, height, depth, compression, length = still_parts.bmp_header(view)
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


def gif_reason(view: memoryview) -> str | None:
    """FFmpeg takes images without a control block between them for one frame, and decodes the first."""
    has_control = True
    for kind in still_parts.gif_blocks(view):
        if kind == still_parts.GIF_IMAGE and not has_control:
            return "a GIF of images without delays"
        has_control = kind == still_parts.GIF_CONTROL or (
            has_control and kind != still_parts.GIF_IMAGE
        )
    return None


def _gif(view: memoryview, size: int) -> str | None:
    if still_parts.GIF_TRAILER in still_parts.gif_blocks(view):
        return None
    return missing_after(size, "before the trailer of a GIF")


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
    return (
        None if described and found else missing_after(size, "before the boxes that hold the image")
    )


def _dpx(view: memoryview, size: int) -> str | None:
    order = ">" if bytes(view[:4]) == b"SDPX" else "<"
    length, height = struct.unpack_from(f"{order}I756xI", view, 16)
    # If no more than the padding of all rows is missing, FFmpeg assumes unpadded rows. It reports larger
    # gaps itself, so an undefined size field (all ones) does no harm.
    return None if length - size > 4 * height else short_of(size, length, "the last row")


_EXR_ATTRIBUTE = re.compile(rb"([^\0]{1,255})\0([^\0]{1,255})\0")
_EXR_ROWS = {3: 16, 4: 32, 5: 16, 6: 32, 7: 32, 8: 32, 9: 256}


def _exr(view: memoryview, size: int) -> str | None:
    (flags,) = struct.unpack_from("<I", view, 4)
    if flags & (0x200 | 0x800 | 0x1000):
        return None  # tiled, deep or multi-part files, whose block tables have other layouts
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


def _sgi(view: memoryview, size: int) -> str | None:
    if size > 2 and view[2] == 0:
        return None  # FFmpeg reports missing uncompressed rows
    dimensions, _, height, channels = struct.unpack_from(">4H", view, 4)
    rows = height * (channels if dimensions > 2 else 1)
    table = struct.unpack_from(f">{2 * min(rows, parts.MAX_PARTS * 4)}I", view, 512)
    half = len(table) // 2  # first the offsets of all rows, then their lengths
    end = max(map(add, table[:half], table[half:]), default=0)
    return short_of(size, end, f"the last of {rows} rows")


def _sunrast(view: memoryview, size: int) -> str | None:
    width, height, depth, length, kind, _, colors = struct.unpack_from(">7I", view, 4)
    whole = (width * depth + 15) // 16 * 2 * height
    # Kind 2 is run-length coded. Its length is that of the runs, or in files of some writers of the pixels.
    if kind != 2 or length != whole:
        return short_of(size, 32 + colors + (length if kind == 2 else whole), "the last row")
    data = view[32 + colors :]
    missing = whole - len(data)
    for run in _SUN_RUN.findall(data):
        missing += len(run) - (run[1] + 1 if len(run) == 3 else run == b"\x80\0")
    return missing_after(size, f"before {missing} of {whole} bytes") if missing > 0 else None


# How often less one a byte is repeated, and the byte; or 0x80 itself; or an incomplete run at the end.
_SUN_RUN = re.compile(rb"\x80(?:[\1-\xff].|\0|.?\Z)", re.DOTALL)


_IMAGE_CHECKS: Mapping[str, Callable[[memoryview, int], str | None]] = (
    dict.fromkeys(("jpegls", "mjpeg"), _jpeg)
    | dict.fromkeys(("apng", "png"), _png)
    | dict.fromkeys(("webp", "webp_anim"), _webp)
    | {"avif": _heif, "bmp": _bmp, "dpx": _dpx, "exr": _exr, "gif": _gif, "qoi": _qoi}
    | {"sgi": _sgi, "sunrast": _sunrast, "targa": _targa}
)


BESIDE = "with a sequence beside its image"
"""End of the reason for such a file, whose video FFmpeg reads correctly."""


# Variants that FFmpeg reads wrongly or not at all.
# Each function returns the reason, or None if FFmpeg reads the file correctly.

_BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _ROWS_PER_STRIP = 258, 259, 262, 266, 278
_PLANAR, _PREDICTOR, _TILE_WIDTH, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 284, 317, 322, 338, 339
_STRIPS, _LZW, _ASSOCIATED_ALPHA, _FLOATING = 273, 5, 1, 3
_UNSIGNED = (1, 4)  # the last is "undefined"
_PREDICTING = frozenset((5, 8, 32946))  # LZW, Deflate
# No compression, the three of CCITT, LZW, Deflate and PackBits.
_TIFF_COMPRESSIONS = frozenset((1, 2, 3, 4, 5, 8, 32773, 32946))
_TIFF_PHOTOMETRICS = {0: "gray", 1: "gray", 2: "RGB", 3: "a palette", 5: "CMYK"}


def tiff_reason(view: memoryview) -> str | None:
    """FFmpeg decodes tiles, JPEG, planes and some types of numbers to garbled images without an error.

    Raises:
        struct.error: The data ends before the directory or a value does.
    """

    def tag(number: int, default: int) -> int:
        value = still_parts.tiff_value(view, number)
        return default if value is None else value

    photometric, bits, extra = tag(_PHOTOMETRIC, 1), tag(_BITS, 1), tag(_EXTRA_SAMPLES, -1)
    compression, kind, strip = tag(_COMPRESSION, 1), tag(_SAMPLE_FORMAT, 1), tag(_STRIPS, 0)
    # Old writers began codes of 9 bits with the least significant one. The first code is 256, to clear.
    first = int.from_bytes(view[strip : strip + 2], "little") & 0x1FF
    predictor = tag(_PREDICTOR, 1)
    # Predictor 3 is for 32-bit floating numbers.
    predicts = compression in _PREDICTING and (bits in (8, 16) or predictor == 3)
    found = (
        ("of tiles", tag(_TILE_WIDTH, -1) >= 0),
        ("of signed or floating 16-bit numbers", bits == 16 and kind not in _UNSIGNED),
        ("of 32-bit integers", bits == 32 and kind != _FLOATING),
        ("with planes", tag(_PLANAR, 1) != 1),
        # Other readers ignore it there, but FFmpeg adds up bytes.
        ("with a predictor for other data", predictor != 1 and not predicts),
        ("without RowsPerStrip", tag(_ROWS_PER_STRIP, 0) < 1),
        ("with old-style LZW", compression == _LZW and first == 256),
        (f"with compression {compression}", compression not in _TIFF_COMPRESSIONS),
        (f"with colours of kind {photometric}", photometric not in _TIFF_PHOTOMETRICS),
        ("with a palette and alpha", photometric == 3 and extra >= 0),
        ("with colours multiplied by alpha", extra == _ASSOCIATED_ALPHA),
        (f"with {bits}-bit CMYK", photometric == 5 and bits != 8),
        ("with reversed bits", tag(_FILL_ORDER, 1) != 1 and 1 < bits < 8),
    )
    return next((f"a TIFF {what}" for what, is_so in found if is_so), None)


def png_reason(view: memoryview) -> str | None:
    kinds = still_parts.png_head(view)
    if b"acTL" in kinds:
        return "an animated PNG"
    is_strange = (view[24], view[25]) == (1, 0) and b"tRNS" in kinds
    return "a PNG of one bit with a transparent colour" if is_strange else None


def webp_reason(view: memoryview) -> str | None:
    return "an animated WebP" if still_parts.is_animated_webp(view) else None


def bmp_reason(view: memoryview) -> str | None:
    pixels, header, bits, compression = struct.unpack_from("<II10xHI", view, 10)
    if bits == 16:
        return "a BMP of 16 bits a pixel"
    if bits <= 8 and pixels <= 14 + header:
        return "a BMP that does not say where its palette ends"
    # Colour masks follow the first 40 bytes of the header; the fourth mask is alpha.
    has_alpha = header >= 56 and compression == 3 and any(view[66:70])
    return "a BMP with alpha" if has_alpha else None


_TARGA_GRAY = 3
_TARGA_UNREADABLE = 7  # mask of the image type, without the bit for run lengths


def targa_reason(view: memoryview) -> str | None:
    if len(view) < 18 or view[16] not in (15, 16):
        return None
    is_gray = view[2] & _TARGA_UNREADABLE == _TARGA_GRAY
    return "a TGA of gray and alpha" if is_gray else "a TGA of 16 bits a pixel"


_DDS_RGB = 0x40
_DDS_RGBA = range(27, 32)  # DXGI formats with 8 bits each of red, green, blue and alpha


def dds_reason(view: memoryview) -> str | None:
    flags, kind, bits = struct.unpack_from("<I4sI", view, 80)
    if flags & _DDS_RGB and bits == 16:
        return "a DDS of 16 bits a pixel"
    (dxgi,) = struct.unpack_from("<I", view, 128)
    return "a DDS that begins with red" if kind == b"DX10" and dxgi in _DDS_RGBA else None


def cursor_reason(view: memoryview) -> str | None:
    """A TGA can begin alike, but has zeros in the fields of the number of images and the first offset.

    Raises:
        struct.error: The data ends inside the header of the first image.
    """
    count, size, offset = struct.unpack_from("<H8xII", view, 4)
    return "a cursor" if count and not view[9] and size and offset >= 6 + 16 * count else None


_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_APP14, _NO_TRANSFORM, _YCCK = 0xEE, 0, 2


def jpeg_reason(view: memoryview) -> str | None:
    """FFmpeg takes RGB and CMYK for YUV if colours are subsampled, and CMYK that is not named.

    Raises:
        struct.error: The data ends inside the length of a segment.
        IndexError: The data ends inside Adobe's marker.
    """
    frame, transform = b"", None
    for marker, start, end in still_parts.jpeg_segments(view):
        if marker in _SOF:
            frame = bytes(view[start + 6 : end])
        elif marker == _APP14 and bytes(view[start : start + 5]) == b"Adobe":
            transform = view[start + 11]
        elif marker == still_parts.JPEG_SCAN:
            break
    names, is_subsampled = frame[::3], len(set(frame[1::3])) > 1
    if len(names) == 4:
        is_named = transform in (_NO_TRANSFORM, _YCCK) or names == b"CMYK"
        is_odd = is_subsampled or not is_named
        return "a CMYK JPEG with subsampled or unnamed colours" if is_odd else None
    is_rgb = transform == _NO_TRANSFORM or (transform is None and names == b"RGB")
    return "an RGB JPEG with subsampled colours" if is_rgb and is_subsampled else None


# Precision and accuracy, before the colour space, are for the reader to judge.
_JP2_CMYK = re.compile(rb"colr\x01..\0\0\0\x0c", re.DOTALL)
_JP2_CHANNELS = re.compile(rb"cdef\0(.)", re.DOTALL)


def jp2_reason(view: memoryview) -> str | None:
    head = bytes(view[:1024])
    if _JP2_CMYK.search(head):
        return "a JPEG 2000 of CMYK"
    found = _JP2_CHANNELS.search(head)
    rows = b"" if found is None else head[found.end() :][: 6 * found[1][0]]
    channels = struct.iter_unpack(">3H", rows[: len(rows) // 6 * 6])
    # A colour that the file associates with the whole image, or with another number than its own.
    is_other = any(kind == 0 and color != channel + 1 for channel, kind, color in channels)
    return "a JPEG 2000 whose channels name no colour, or another one" if is_other else None


# Matrices YCgCo and those beyond BT.2020; the matrix follows primaries and transfer function.
_STRANGE_MATRIX = re.compile(rb"colrnclx.{4}\0[\x08\x0a-\x11]", re.DOTALL)
# Full range without a matrix. An early encoder states it in this box alone, and FFmpeg reads the coded data.
_FULL_RANGE = re.compile(rb"colrnclx.{4}\0\x02\x80", re.DOTALL)


def iso_reason(view: memoryview) -> str | None:
    """FFmpeg decodes a single coded image of HEIC and AVIF: it ignores cropping, tiles and alpha.

    Raises:
        struct.error: The data ends inside the header of a box.
    """
    top = {kind: (start, end) for kind, start, end in parts.boxes(view)}
    if b"meta" not in top:
        return None
    start, end = top[b"meta"]
    meta = {kind: slice(start, end) for kind, start, end in parts.boxes(view, start + 4, end)}
    if b"iprp" not in meta or b"iinf" not in meta:
        return None
    name = "an AVIF" if is_avif(view) else "a HEIC"
    items, properties = bytes(view[meta[b"iinf"]]), bytes(view[meta[b"iprp"]])
    tracks = bytes(view[slice(*top.get(b"moov", (0, 0)))])
    is_sequence = bytes(view[8:12]) in (b"avis", b"msf1", b"hevc")
    found = (
        ("of tiles", any(kind in items for kind in (b"grid", b"iovl", b"iden", b"tili"))),
        ("that is cropped", b"clap" in properties),
        ("with alpha", b":auxiliary:alpha" in properties or b":auxid:1" in properties),
        ("with a track of alpha", b"auxv" in tracks),
        ("of a matrix that FFmpeg does not know", _STRANGE_MATRIX.search(properties)),
        ("of full range without a matrix", _FULL_RANGE.search(properties)),
        (BESIDE, tracks and not is_sequence),
    )
    return next((f"{name} {what}" for what, is_so in found if is_so), None)


def is_avif(view: memoryview) -> bool:
    """Whether an ISO base media file is AVIF, not HEIC, from its first bytes."""
    return bytes(view[8:12]) in (b"avif", b"avis") or b"av01" in bytes(view[:512])
