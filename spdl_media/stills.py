"""Identify image files by signature: FFmpeg's decoder for the whole file, and files that Pillow has to read.

Formats that need a container (GIF, AVIF, HEIC), animations (WebP, APNG) and formats without a reliable
signature are opened by FFmpeg's demuxers. Pillow reads files that FFmpeg decodes to black, garbled or partial
images, mostly without an error.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from spdl_media import still_variants
from spdl_media.parts import Bytes
from spdl_media.still_parts import JPEG_APP1, JPEG_SCAN, is_animated_webp, png_head, tiff_value

__all__ = ()

HEAD_SIZE = 1 << 16
"""Bytes of a file that :func:`still_codec` may need.

Only an ``acTL`` chunk after a large colour profile needs so many; all other formats are known from
the first 32."""

WITHOUT_SIGNATURE = frozenset({"targa", "xbm", "pcx", "pictor", "photocd", "brender_pix"})
"""Decoders of images that only the name of their file identifies; of TGA, only those with odd headers."""

# Decoders with the same name as FFmpeg's demuxer of such files, which appends "_pipe".
_NAMED_ALIKE = "bmp dpx exr jpegls pam pbm pfm pgm pgmyuv phm png ppm qoi sgi tiff webp".split()

STILL_FORMATS: Mapping[str, str] = MappingProxyType(
    {name: name for name in _NAMED_ALIKE}
    | {f"{name}_pipe": name for name in _NAMED_ALIKE}
    | dict.fromkeys(("j2k", "j2k_pipe", "jp2", "jpeg2000"), "jpeg2000")
    | dict.fromkeys(("jpeg", "jpeg_pipe", "jpg"), "mjpeg")
    | dict.fromkeys(("targa", "tga"), "targa")
    | {"jls": "jpegls", "tif": "tiff"}
)
"""Decoders by name of format: FFmpeg's names (``"png_pipe"``) and common ones (``"jpeg"``).

A format given by the user takes precedence over the signature."""

ERR_DETECT: Mapping[str, str] = MappingProxyType(
    {"apng": "explode", "jpegls": "explode", "mjpeg": "explode", "png": "explode"}
)
"""By decoder: the ``err_detect`` that detects most damage without refusing undamaged files.

For other decoders, FFmpeg's default is best: WebP, BMP, GIF, JPEG 2000, QOI, TGA, PNM, EXR and AV1
detect the same damage with any value, and TIFF with ``explode`` refuses undamaged files with unknown
tags. ``crccheck`` adds nothing: PNG compares its checksums with ``explode``, too."""


def still_codec(head: Bytes) -> str | None:
    """Return FFmpeg's decoder that takes the whole file as one packet.

    An animated WebP is recognised by the animation flag of its ``VP8X`` chunk, an animated PNG by
    an ``acTL`` chunk before its pixels.

    Args:
        head: The first :data:`HEAD_SIZE` bytes of the file, or all of it. Except for PNG, the first
            32 bytes suffice. Not copied.

    Returns:
        The decoder's name, such as ``"mjpeg"`` or ``"png"``; ``None`` if a container must be opened:
        GIF, AVIF, HEIC, Motion JPEG 2000, animations, and unknown formats.

    Raises:
        TypeError: ``head`` is not a contiguous buffer.
    """
    view = memoryview(head).cast("B")
    if _TARGA.match(view):
        return "targa"
    decoder, _ = _found(view)
    return decoder(view) if callable(decoder) else decoder


AVIF_BRANDS = frozenset({b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1"})
"""Types of ISO files that begin as AVIF or HEIC."""


def container_still(head: Bytes) -> str | None:
    """Return the kind of an image that FFmpeg reads from a container.

    Args:
        head: The first bytes of the file, at least 12.

    Returns:
        ``"gif"``, or ``"avif"`` for AVIF and HEIC; ``None`` for other files.
    """
    if head[:4] == b"GIF8":
        return "gif"
    return "avif" if head[4:8] == b"ftyp" and bytes(head[8:12]) in AVIF_BRANDS else None


def _png_codec(view: memoryview) -> str | None:
    # An animation has an acTL chunk before its first pixels.
    return None if b"acTL" in png_head(view) else "png"


def _webp_codec(view: memoryview) -> str | None:
    return None if is_animated_webp(view) else "webp"


# A TGA has no signature, but few headers are possible: a kind of image, a palette only for that kind, a
# size of at least 1x1, the bits of a pixel, and two reserved bits.
_PIXELS = rb".{4}(?!\x00\x00)..(?!\x00\x00)..%b[\x00-\x3f]"
_TARGA = re.compile(
    rb".(?:\x00[\x02\x0a]\x00{4}[\x00\x0f\x10\x18\x20]%b|\x00[\x03\x0b]\x00{5}%b"
    rb"|\x01[\x01\x09].{4}[\x0f\x10\x18\x20]%b)"
    % (_PIXELS % rb"[\x0f\x10\x18\x20]", _PIXELS % rb"[\x08\x10]", _PIXELS % rb"\x08"),
    re.DOTALL,
)


def pillow_reason(data: Bytes, decoder: str | None = None) -> str | None:
    """Return why FFmpeg must not read an image.

    Args:
        data: The whole file; for animated PNG and WebP the first 64 KiB suffice. Not copied.
        decoder: FFmpeg's decoder for it. Needed for TGA, whose kinds of headers are not among the signatures.

    Returns:
        What is special about the file, such as ``"a TIFF of tiles"``; ``None``: FFmpeg reads it correctly.

    Raises:
        TypeError: ``data`` is not a contiguous buffer.
    """
    view = memoryview(data).cast("B")
    if decoder == "targa":
        return still_variants.targa_reason(view)
    _, reason = _found(view)
    if bytes(view[4:8]) == b"ftyp":
        reason = still_variants.iso_reason
    try:
        return reason(view) if callable(reason) else reason
    except (struct.error, IndexError):  # truncated: FFmpeg's error is more precise
        return None


def only_pillow_reads(head: Bytes) -> bool:
    """Whether a file begins as an image of a format that only Pillow reads."""
    decoder, reason = _found(head)
    return decoder is None and reason is not None and pillow_reason(head) is not None


def pillow_video_reason(head: Bytes) -> str | None:
    """Return why FFmpeg must not read a file as a video; ``None``: it may.

    Raises:
        TypeError: ``head`` is not a contiguous buffer.
    """
    is_gif = container_still(head) == "gif"
    reason = still_variants.gif_reason(memoryview(head)) if is_gif else pillow_reason(head)
    return reason if reason is not None and not reason.endswith(still_variants.BESIDE) else None


_Entry: TypeAlias = "str | Callable[[memoryview], str | None] | None"

# The start of a file; FFmpeg's decoder for the whole file; and the reason why FFmpeg must not read it.
_FORMATS: tuple[tuple[bytes, _Entry, _Entry], ...] = (
    (rb"\xff\xd8\xff\xf7", "jpegls", still_variants.jpeg_reason),
    (rb"\xff\xd8\xff", "mjpeg", still_variants.jpeg_reason),
    (rb"\x89PNG\r\n\x1a\n", _png_codec, still_variants.png_reason),
    # WAV and AVI are RIFF files, too.
    (rb"RIFF.{4}WEBP", _webp_codec, lambda v: "an animated WebP" if is_animated_webp(v) else None),
    # Two letters are a weak signature, so the size of the second header is checked, too.
    (rb"BM.{12}[\x0c-\xff]\0\0\0.", "bmp", still_variants.bmp_reason),
    (rb"II\*\0|MM\0\*", "tiff", still_variants.tiff_reason),
    (rb"II\+\0|MM\0\+", None, "a BigTIFF"),
    (rb"\0\0\0\x0cjP  \r\n\x87\n.{8}(?!mjp2)", "jpeg2000", still_variants.jp2_reason),
    (rb"\xff\x4f\xff\x51", "jpeg2000", None),
    (rb"qoif", "qoi", None),
    (rb"DDS ", None, "a DDS"),
    (rb"SDPX|XPDS", "dpx", None),
    (rb"v/1\x01", "exr", None),
    # Storage 0 or 1, bytes per sample 1 or 2, 1 to 3 dimensions.
    (rb"\x01\xda[\0\x01][\x01\x02].\x01", "sgi", "an SGI of one row"),
    (rb"\x01\xda[\0\x01][\x01\x02].[\x02\x03]", "sgi", None),
    (rb"\x59\xa6\x6a\x95", None, "a Sun raster"),
    (rb"\0\0\x01\0(?!\0\0)", None, "an icon"),  # MPEG-4 has zeros there
    (rb"\0\0\x02\0", None, still_variants.cursor_reason),
    (rb"icns", None, "an icon"),
    (rb"#\?RGBE\n", "hdr", None),
    (rb"BLP[12]", None, "a BLP"),
    (rb"#define ", None, "an XBM"),
    # Text formats (1 to 3) have the decoders of the binary ones (4 to 6).
    (rb"P[14][\s#]", "pbm", still_variants.pnm_reason),
    (rb"P[25][\s#]", "pgm", still_variants.pnm_reason),
    (rb"P[36][\s#]", "ppm", still_variants.pnm_reason),
    (rb"P[Ff][\s#]", "pfm", None),
    (rb"P[Hh][\s#]", "phm", None),
    # Version 7 of XV's thumbnails also begins with P7, but followed by a space.
    (rb"P7\r?\n", "pam", None),
)
_START = re.compile(b"|".join(b"(%b)" % start for start, _, _ in _FORMATS), re.DOTALL)


def _found(head: Bytes) -> tuple[_Entry, _Entry]:
    """Return decoder and reason of the format as which a file begins."""
    match = _START.match(head)
    return _FORMATS[match.lastindex - 1][1:] if match and match.lastindex else (None, None)


# Formats that FFmpeg does not know, or confuses with audio.
_UNREAD = {
    b"GIF8": "a GIF",
    b"\xff\x0a": "a JPEG XL",
    b"\0\0\0\x0cJXL ": "a JPEG XL",
    b"\0\0\0\x10ftypmif3": "a minimized HEIF or AVIF",
}


def unread_kind(head: Bytes) -> str | None:
    """Return the kind of a file that FFmpeg has failed to open, from its first bytes."""
    return next((name for start, name in _UNREAD.items() if bytes(head).startswith(start)), None)


_ORIENTATION_TAG = 274
_XMP_SIGNATURE = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb"""tiff:Orientation\s*(?:=\s*["']|>)\s*([1-8])""")


def first_orientation(blocks: Iterable[tuple[bool, Bytes]]) -> int:
    """Return the orientation in the metadata of a file, 1 to 8; 1 if there is none, or it is damaged.

    Args:
        blocks: Blocks in the order of the file, each with whether it is XMP, else Exif. XMP is used only if
            no Exif block states an orientation.

    Raises:
        struct.error: Raised by ``blocks``, when the file ends inside a header.
    """
    xmp: Bytes = b""
    for is_xmp, block in blocks:
        if is_xmp:
            xmp = block
        elif (value := _exif_orientation(memoryview(block))) is not None:
            return value
    match = _XMP_ORIENTATION.search(xmp)
    return 1 if match is None else int(match[1])


def _exif_orientation(block: memoryview) -> int | None:
    """Return the orientation in an Exif block, which is a TIFF file; ``None`` if it states none."""
    # JPEG has six bytes before the TIFF header, and so do some PNG and WebP files.
    view = block[6:] if bytes(block[:6]) == b"Exif\0\0" else block
    try:
        found = tiff_value(view, _ORIENTATION_TAG, None)
    except struct.error:
        return 1
    # Some writers use 0 for an unknown orientation.
    return found if found is None or 1 <= found <= 8 else 1


def jpeg_metadata(segment: memoryview) -> list[tuple[bool, Bytes]]:
    """Return the Exif or XMP block of an APP1 segment, if any, for :func:`first_orientation`."""
    begin = bytes(segment[: len(_XMP_SIGNATURE)])
    is_known = begin == _XMP_SIGNATURE or begin.startswith(b"Exif\0\0")
    return [(begin == _XMP_SIGNATURE, segment)] if is_known else []


# The segments of a JPEG.

_SOF0, _SOF1, _SOF2, _DHT, _DQT, _DRI = 0xC0, 0xC1, 0xC2, 0xC4, 0xDB, 0xDD
_APP0, _APP14, _COM = 0xE0, 0xEE, 0xFE

# Application segments that FFmpeg's decoder ignores. Others can change how it decodes this image and the next
# (AVI1, LJIF, colr, xfrm, mjpg, _JPS).
_KNOWN = {
    0xE0: (b"JFIF\0", b"JFXX\0"),
    0xE1: (b"Exif\0", b"http:/"),
    0xE2: (b"ICC_PROFILE\0", b"MPF\0"),
    0xEC: (b"Ducky",),
    0xED: (b"Photoshop ",),
    0xEE: (b"Adobe",),
}
# Comments that make FFmpeg treat the image as upside down, limited range, or one of several.
_HEEDED_COMMENTS = (b"AVID", b"CS=", b"Intel(R) JPEG", b"Metasoft", b"MULTISCOPE")

_YCC = 1  # Adobe's number for YCbCr
_YCC_IDS = (b"\1\2\3", b"\0\1\2")
# Pixel formats by sampling factors of luma and both chroma; the last two are written by FFmpeg's encoder.
_SAMPLINGS = {
    bytes.fromhex(numbers): f"yuvj{name}p"
    for numbers, name in (
        *(("111111", 444), ("211111", 422), ("121111", 440), ("221111", 420), ("411111", 411)),
        *(("121212", 444), ("221212", 422)),
    )
}


class JpegHead(NamedTuple):
    """Contents of the segments before the coded data.

    Attributes:
        orientation: Exif orientation, 1 to 8.
        width: Width of the coded image.
        height: Height of the coded image.
        pix_fmt: Pixel format of FFmpeg's decoder; ``None`` if it is neither gray nor ``is_ycc``.
        has_all: The first scan has all components.
        is_ycc: The image is 8-bit YCbCr, baseline or progressive, without segments that decoders interpret
            differently, so that all decoders give the same image.
        stands_alone: In addition, it is a single baseline scan with all tables that it uses, so that the
            state of a decoder neither affects the image nor is changed by it.
    """

    orientation: int
    width: int
    height: int
    pix_fmt: str | None
    has_all: bool
    is_ycc: bool
    stands_alone: bool


def read_jpeg_head(data: Bytes) -> JpegHead | None:
    """Read the segments of a JPEG up to its first scan. Only tables are copied.

    Returns:
        The contents; ``None`` if the data is not a JPEG with contiguous segments up to a scan.

    Raises:
        TypeError: ``data`` is not a contiguous buffer.
    """
    try:
        # Indexing a bytes object is faster than indexing a view.
        return _read_jpeg_head(data if isinstance(data, bytes) else memoryview(data).cast("B"))
    except IndexError:
        return None


def _read_jpeg_head(data: bytes | memoryview) -> JpegHead | None:
    if data[:2] != b"\xff\xd8":
        return None
    position, tables, ordinary = 2, 0, True
    frame, frame_marker = b"", 0
    metadata: list[tuple[bool, Bytes]] = []
    while True:
        marker, start = data[position + 1], position + 4
        end = position + 2 + (data[position + 2] << 8 | data[position + 3])
        if data[position] != 0xFF or end < start or end > len(data):
            return None
        position = end
        if marker in (_DHT, _DQT):
            tables |= _tables_in(marker, bytes(data[start:end]))
        elif marker == JPEG_SCAN:
            break
        elif marker in (_SOF0, _SOF1, _SOF2):
            frame, frame_marker = bytes(data[start:end]), marker
        elif marker >= _APP0:
            ordinary = ordinary and _is_ignored(marker, bytes(data[start : min(end, start + 16)]))
            if marker == JPEG_APP1:
                metadata += jpeg_metadata(memoryview(data)[start:end])
        # Arithmetic coding, lossless frames and the like: FFmpeg decides.
        elif marker != _DRI:
            return None
    if len(frame) < 6:
        return None
    height, width = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4]
    depth_and_parts = frame[:1] + frame[5:]
    pix_fmt = _format_of(depth_and_parts) if ordinary and width > 0 and height > 0 else None
    is_ycc = pix_fmt not in (None, "gray")
    is_plain = is_ycc and frame_marker == _SOF0
    stands_alone = is_plain and _has_all_tables(tables, depth_and_parts, bytes(data[start:end]))
    orientation = first_orientation(metadata) if metadata else 1
    has_all = data[start] == frame[5]
    return JpegHead(orientation, width, height, pix_fmt, has_all, is_ycc, stands_alone)


def _is_ignored(marker: int, begin: bytes) -> bool:
    """Whether FFmpeg's decoder ignores an application segment or a comment that begins so."""
    if marker == _COM:
        return not begin.startswith(_HEEDED_COMMENTS)
    if not begin.startswith(_KNOWN.get(marker, ())):
        return False
    return marker != _APP14 or (len(begin) >= 12 and begin[11] == _YCC)


# A cache, because cameras and programs write the same parts of a header again and again.
_cached = lru_cache(maxsize=256)


@_cached
def _format_of(frame: bytes) -> str | None:
    """Return the pixel format of a frame header without size: 8-bit gray, or YCbCr with usual sampling."""
    if frame[:2] == b"\x08\x01":
        return "gray"
    is_ycc = len(frame) == 11 and frame[:2] == b"\x08\x03" and frame[2::3] in _YCC_IDS
    return _SAMPLINGS.get(frame[3::3]) if is_ycc else None


# Sets of tables are bit masks: bits 0 to 31 are Huffman tables by class and number, the bits above them are
# quantisation tables.
_QUANTISATION = 32


@_cached
def _tables_in(marker: int, body: bytes) -> int:
    """Return the tables that a segment defines; none if they do not fill it exactly."""
    position = tables = 0
    while position < len(body):
        kind = body[position]
        if marker == _DQT:
            tables |= 1 << _QUANTISATION + (kind & 15)
            # The number of the table, then 64 values of one or two bytes.
            position += 129 if kind >> 4 else 65
        else:
            tables |= 1 << (kind & 31)
            # The number of the table, sixteen counts of codes by length, and a value for each code.
            position += 17 + sum(body[position + 1 : position + 17])
    return tables if position == len(body) else 0


@_cached
def _has_all_tables(tables: int, frame: bytes, scan: bytes) -> bool:
    """Whether the scan has all three components completely, and their tables were defined."""
    # The end of the scan header: all 64 coefficients at full precision, unlike a progressive scan.
    if len(scan) != 10 or scan[0] != 3 or scan[7:] != b"\0\x3f\0":
        return False
    named = 0
    for number in frame[4::3]:
        named |= 1 << _QUANTISATION + (number & 15)
    for number in scan[2:7:2]:
        # AC tables have class 1, which is bit 4.
        named |= 1 << (number >> 4) | 1 << (16 | number & 15)
    return named & ~tables == 0 and scan[1:6:2] == frame[2::3]
