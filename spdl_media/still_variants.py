"""Tell the variants of image formats that FFmpeg decodes wrongly or not at all, and Pillow reads.

Each function returns the reason, or ``None`` if FFmpeg reads the file correctly.
"""

from __future__ import annotations

import re
import struct
from functools import partial

from spdl_media import parts, still_parts

__all__ = ()

BESIDE = "with a sequence beside its image"
"""End of the reason for such a file, whose video FFmpeg reads correctly."""

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
    tag = partial(still_parts.tiff_value, view)
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
    is_strange = view[24] < 8 and view[25] == 0 and b"tRNS" in kinds
    return "a PNG of less than 8 bits with a transparent gray" if is_strange else None


def gif_reason(view: memoryview) -> str | None:
    """FFmpeg takes images without a control block between them for one frame, and decodes the first."""
    has_control = True
    for kind in still_parts.gif_blocks(view):
        if kind == still_parts.GIF_IMAGE and not has_control:
            return "a GIF of images without delays"
        has_control &= kind != still_parts.GIF_IMAGE
        has_control |= kind == still_parts.GIF_CONTROL
    return None


def bmp_reason(view: memoryview) -> str | None:
    pixels, header, bits, compression = struct.unpack_from("<II10xHI", view, 10)
    if bits == 16:
        return "a BMP of 16 bits a pixel"
    if bits <= 8 and pixels <= 14 + header:
        return "a BMP that does not say where its palette ends"
    # Colour masks follow the first 40 bytes of the header; the fourth mask is alpha.
    has_alpha = header >= 56 and compression == 3 and any(view[66:70])
    return "a BMP with alpha" if has_alpha else None


# A comment behind the two or three numbers of the header of a plain-text PNM.
_PNM_COMMENT = re.compile(rb"P(?:1|[23](?:\s|#.*\n)+\d+)(?:(?:\s|#.*\n)+\d+){2}[^#]*#")


def pnm_reason(view: memoryview) -> str | None:
    """FFmpeg takes comments among the numbers for numbers."""
    return "a PNM with comments among its numbers" if _PNM_COMMENT.match(view) else None


_TARGA_GRAY = 3
_TARGA_UNREADABLE = 7  # mask of the image type, without the bit for run lengths


def targa_reason(view: memoryview) -> str | None:
    if len(view) < 18 or view[16] not in (15, 16):
        return None
    is_gray = view[2] & _TARGA_UNREADABLE == _TARGA_GRAY
    return "a TGA of gray and alpha" if is_gray else "a TGA of 16 bits a pixel"


def cursor_reason(view: memoryview) -> str | None:
    """A TGA can begin alike, but has zeros in the fields of the number of images and the first offset.

    Raises:
        struct.error: The data ends inside the header of the first image.
    """
    count, size, offset = struct.unpack_from("<H8xII", view, 4)
    return "a cursor" if count and not view[9] and size and offset >= 6 + 16 * count else None


_APP14, _NO_TRANSFORM, _YCCK = 0xEE, 0, 2


def jpeg_reason(view: memoryview) -> str | None:
    """FFmpeg takes RGB and CMYK for YUV if colours are subsampled, and CMYK that is not named.

    Raises:
        struct.error: The data ends inside the length of a segment.
        IndexError: The data ends inside Adobe's marker.
    """
    frame, transform = b"", None
    for marker, start, end in still_parts.jpeg_segments(view):
        if marker in still_parts.JPEG_FRAMES:
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
_JP2_BOXES = 12  # the first ones, among which FFmpeg looks for the code stream


def jp2_reason(view: memoryview) -> str | None:
    """FFmpeg ignores what channels mean, and finds no code stream after many boxes of metadata.

    Raises:
        struct.error: The data ends inside the header of a box, or the list of channels.
    """
    boxes = list(parts.boxes(view))
    if b"jp2c" in {kind for kind, _, _ in boxes} - {kind for kind, _, _ in boxes[:_JP2_BOXES]}:
        return "a JPEG 2000 with many boxes before its code stream"
    head = b"".join(bytes(view[start:end]) for kind, start, end in boxes if kind == b"jp2h")
    if _JP2_CMYK.search(head):
        return "a JPEG 2000 of CMYK"
    found = _JP2_CHANNELS.search(head)
    channels = found and struct.iter_unpack(">3H", head[found.end() :][: 6 * found[1][0]])
    # A colour that the file associates with the whole image, or with another number than its own.
    is_other = any(kind == 0 and color != channel + 1 for channel, kind, color in channels or ())
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
    is_sequence = bytes(view[8:12]) == b"avis"
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
