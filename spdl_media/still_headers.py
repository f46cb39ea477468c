"""What the header of a still image states: its size, and often its pixel format and colour.

A header is read in microseconds, where decoding takes milliseconds. Colours are FFmpeg's numbers of range,
matrix, primaries and transfer, as its decoders give them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from spdl_media.boxes import PNG, RIFF, Bytes, Chunks, Read
from spdl_media.exif import (
    GIF_IMAGE,
    GIF_TRAILER,
    JPEG_APP1,
    JPEG_SCAN,
    bmp_header,
    exif_orientation,
    exif_value,
    gif_blocks,
    is_xmp,
    png_head,
    xmp_value,
)
from spdl_media.stills import HEAD_SIZE, container_still, pillow_reason, still_codec
from spdl_media.truncation import check_complete, wrong_checksum

__all__ = ("JpegHead", "StillHeader", "read_jpeg_head", "read_still", "still_header")

_Color: TypeAlias = tuple[int, int, int, int]
_Header: TypeAlias = "Callable[[memoryview], StillHeader | None]"

# Range, matrix, primaries and transfer; FFmpeg's "unspecified" is 0 for the range and 2 for the others.
_UNKNOWN: _Color = (0, 2, 2, 2)
_FULL, _LIMITED, _BT470BG, _RGB, _BT709, _SRGB = 2, 1, 5, 0, 1, 13


class StillHeader(NamedTuple):
    """What a header states.

    Attributes:
        width: Of the stored image.
        height: Of the stored image.
        pix_fmt: What FFmpeg's decoder gives; ``None``: the header does not tell.
        color: FFmpeg's numbers of range, matrix, primaries and transfer.
    """

    width: int
    height: int
    pix_fmt: str | None = None
    color: _Color = _UNKNOWN


def still_header(data: Bytes, codec: str) -> StillHeader | None:
    """Read the header of a still.

    Args:
        data: The file, or its first 64 KiB; of a JPEG what stands before its coded data. Not copied.
        codec: FFmpeg's name: ``"mjpeg"``, ``"png"``, ``"webp"``, ``"bmp"`` or ``"gif"``.

    Returns:
        ``None`` for other codecs, and where the header is not whole or says what cannot be.

    Raises:
        TypeError: ``data`` is no contiguous buffer.
    """
    view = memoryview(data).cast("B")
    try:
        header = _KINDS[codec][0](view) if codec in _KINDS else None
    except (struct.error, IndexError):
        return None
    if header is None or header.width <= 0 or header.height <= 0:
        return None
    # What FFmpeg takes for a size that cannot be: av_image_check_size().
    fits = (header.width + 128) * (header.height + 128) < (2**31 - 1) // 8
    return header if fits else None


def read_still(head: Bytes, read: Read, size: int) -> tuple[str, StillHeader, int] | None:
    """Read the header and the orientation of a still that has its end.

    Args:
        head: The first 64 KiB of the file.
        read: Gives other bytes of the file.
        size: Bytes of the file.

    Returns:
        FFmpeg's name of the codec, the header, and the orientation; ``None`` for other formats, animations,
        and what only decoding can tell: files cut short, and those that FFmpeg does not read well.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    codec = still_codec(head) or container_still(head)
    # Profiles and thumbnails may stand before the size of a JPEG.
    if codec == "mjpeg" and len(head) < size and read_jpeg_head(head) is None:
        head = read(0, 16 * HEAD_SIZE)
    header = still_header(head, codec or "")
    # All that is wrong with JPEGs is wrong with those of four components.
    if (
        codec is None
        or header is None
        or ((codec != "mjpeg" or not header.pix_fmt) and pillow_reason(head))
    ):
        return None
    try:
        orientation = _KINDS[codec][1](head, read, size)
    except struct.error:
        return None
    return None if orientation is None else (codec, header, orientation)


def _jpeg(view: memoryview) -> StillHeader | None:
    head = read_jpeg_head(view)
    if head is None:
        return None
    # FFmpeg states no range of gray and of CMYK.
    color = (_FULL if head.is_ycc else 0, _BT470BG, 2, 2)
    return StillHeader(head.width, head.height, head.pix_fmt, color)


# By the kind of colours; of 8 bits and less, and of 16.
_PNG_FORMATS = {
    0: ("gray", "gray16be"),
    2: ("rgb24", "rgb48be"),
    3: ("pal8", None),
    4: ("ya8", "ya16be"),
    6: ("rgba", "rgba64be"),
}


def _png(view: memoryview) -> StillHeader | None:
    width, height, depth, color = struct.unpack_from(">IIBB", view, 16)
    kinds = png_head(view)
    is_srgb = b"sRGB" in kinds
    # What they mean is FFmpeg's to say, unless it is sRGB, which overrules the last two.
    strange = b"cICP" in kinds or (not is_srgb and not kinds.isdisjoint((b"gAMA", b"cHRM")))
    if strange or b"IDAT" not in kinds:
        return None
    # A transparent colour becomes alpha.
    kind = color + 4 if b"tRNS" in kinds and color in (0, 2) else color
    formats = _PNG_FORMATS.get(kind, (None, None))
    pix_fmt = "monob" if (kind, depth) == (0, 1) else formats[depth == 16]
    primaries, transfer = (_BT709, _SRGB) if is_srgb else (2, 2)
    return StillHeader(width, height, pix_fmt, (_FULL, _RGB, primaries, transfer))


def _webp(view: memoryview) -> StillHeader | None:
    pix_fmt = "yuv420p"
    for kind, start, _ in RIFF.of(view):
        if kind == b"ALPH":
            pix_fmt = "yuva420p"
        elif kind == b"VP8 ":
            code, width, height = struct.unpack_from("<3x3sHH", view, start)
            color = (_LIMITED, _BT470BG, 2, 2)
            size = width & 0x3FFF, height & 0x3FFF
            return StillHeader(*size, pix_fmt, color) if code == b"\x9d\x01\x2a" else None
        elif kind == b"VP8L":
            code, bits = struct.unpack_from("<BI", view, start)
            size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
            return StillHeader(*size, "argb") if code == 0x2F else None
    return None


def webp_canvas(head: Bytes) -> tuple[int, int] | None:
    """Width and height by the extended header of a WebP, if that is what the head is."""
    if bytes(head[8:16]) != b"WEBPVP8X" or len(head) < 30:
        return None
    width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
    return width, height


_BMP_FORMATS = {1: "pal8", 4: "pal8", 8: "pal8", 24: "bgr24", 32: "bgra"}


def _bmp(view: memoryview) -> StillHeader | None:
    _, width, height, depth, compression, _ = bmp_header(view)
    # Masks may say anything.
    pix_fmt = _BMP_FORMATS.get(depth) if compression in (0, 1, 2) else None
    return StillHeader(width, abs(height), pix_fmt)


def _gif(view: memoryview) -> StillHeader:
    width, height = struct.unpack_from("<HH", view, 6)
    return StillHeader(width, height, "bgra")


# The orientation of a file that has its end; None: it may be cut short, or more than one image.


def _jpeg_end(head: Bytes, read: Read, size: int) -> int | None:
    found = read_jpeg_head(head)
    whole = bytes(read(size - 2, 2)) == b"\xff\xd9"
    return found.orientation if found and whole else None


def _png_end(head: Bytes, read: Read, size: int) -> int | None:
    is_whole = bytes(read(size - 12, 8)) == b"\0\0\0\0IEND" and not wrong_checksum(
        memoryview(head).cast("B")
    )
    # Metadata may also follow the pixels.
    return _chunk_orientation(PNG, {b"eXIf", b"iTXt"}, head, read, size) if is_whole else None


def _webp_end(head: Bytes, read: Read, size: int) -> int | None:
    if check_complete("webp", head, size):
        return None
    return _chunk_orientation(RIFF, {b"EXIF", b"XMP "}, head, read, size)


def _chunk_orientation(form: Chunks, kinds: set[bytes], head: Bytes, read: Read, size: int) -> int:
    """The orientation by the chunks of metadata; of the others nothing but the headers is read."""
    found = [head[: form.start]]
    for kind, start, end in form.read(read, size):
        if kind in kinds:
            found.append(read(start - 8, end - start + 8 + -end % form.padding + form.trailer))
    return exif_orientation(b"".join(found))


def _bmp_end(head: Bytes, _: Read, size: int) -> int | None:
    runs = bmp_header(memoryview(head).cast("B"))[4] in (1, 2)
    return None if runs or check_complete("bmp", head, size) else 1


def _gif_end(head: Bytes, read: Read, size: int) -> int | None:
    view = memoryview(head if size <= len(head) else read(0, 4 * HEAD_SIZE)).cast("B")
    images = 0
    for kind in gif_blocks(view):
        images += kind == GIF_IMAGE
        if kind == GIF_TRAILER:
            return 1 if images == 1 else None
        if images > 1:
            return None
    return None


_KINDS: Mapping[str, tuple[_Header, Callable[[Bytes, Read, int], int | None]]] = {
    "mjpeg": (_jpeg, _jpeg_end),
    "png": (_png, _png_end),
    "webp": (_webp, _webp_end),
    "bmp": (_bmp, _bmp_end),
    "gif": (_gif, _gif_end),
}


# The segments of a JPEG.

_SOF0, _SOF1, _SOF2, _DHT, _DQT, _DRI = 0xC0, 0xC1, 0xC2, 0xC4, 0xDB, 0xDD
_APP0, _APP14, _COM = 0xE0, 0xEE, 0xFE

# Segments of applications in which FFmpeg's decoder finds nothing that it heeds or remembers. Others can
# change how it reads this image and the next (AVI1, LJIF, colr, xfrm, mjpg, _JPS).
_KNOWN = {
    0xE0: (b"JFIF\0", b"JFXX\0"),
    0xE1: (b"Exif\0", b"http:/"),
    0xE2: (b"ICC_PROFILE\0", b"MPF\0"),
    0xEC: (b"Ducky",),
    0xED: (b"Photoshop ",),
    0xEE: (b"Adobe",),
}
# Comments by which FFmpeg takes the image for upside down, of limited range, or one of several.
_TELLING = (b"AVID", b"CS=", b"Intel(R) JPEG", b"Metasoft", b"MULTISCOPE")

_YCC = 1  # Adobe's number for YCbCr
_YCC_IDS = (b"\1\2\3", b"\0\1\2")
# By samples across and down of luma and of both chroma; the last two are as FFmpeg's encoder writes them.
_SAMPLINGS = {
    bytes.fromhex(numbers): f"yuvj{name}p"
    for numbers, name in (
        *(("111111", 444), ("211111", 422), ("121111", 440), ("221111", 420), ("411111", 411)),
        *(("121212", 444), ("221212", 422)),
    )
}


class JpegHead(NamedTuple):
    """Content of the segments before the coded data.

    Attributes:
        orientation: The number of Exif, 1 to 8.
        width: Of the coded image.
        height: Of the coded image.
        pix_fmt: What FFmpeg's decoder gives; ``None``: it is neither gray nor as ``is_ycc`` says.
        is_ycc: It is an 8-bit YCbCr image, baseline or progressive, with no segment that one decoder
            heeds and another does not: all give the same image.
        stands_alone: Besides, it is one baseline scan and brings every table that it names: a decoder that
            has read others before gives what a fresh one gives, and is left as it was.
    """

    orientation: int
    width: int
    height: int
    pix_fmt: str | None
    is_ycc: bool
    stands_alone: bool


def read_jpeg_head(data: Bytes) -> JpegHead | None:
    """Read the segments of a JPEG up to its first scan. Nothing is copied but tables.

    Returns:
        ``None`` where the data is no JPEG whose segments follow each other without a gap, up to a scan.

    Raises:
        TypeError: ``data`` is no contiguous buffer.
    """
    try:
        # Python reads single bytes of a bytes object quicker than of a view.
        return _read_jpeg_head(data if isinstance(data, bytes) else memoryview(data).cast("B"))
    except IndexError:
        return None


def _read_jpeg_head(data: bytes | memoryview) -> JpegHead | None:
    if data[:2] != b"\xff\xd8":
        return None
    position, tables, ordinary, orientation, xmp = 2, 0, True, None, b""
    frame, frame_marker = b"", 0
    while True:
        marker, start = data[position + 1], position + 4
        end = position + 2 + (data[position + 2] << 8 | data[position + 3])
        if data[position] != 0xFF or end < start or end > len(data):
            return None
        position = end
        if marker in (_DHT, _DQT):
            tables |= _defined(marker, bytes(data[start:end]))
        elif marker == JPEG_SCAN:
            break
        elif marker in (_SOF0, _SOF1, _SOF2):
            frame, frame_marker = bytes(data[start:end]), marker
        elif (
            marker == JPEG_APP1
            and orientation is None
            and (data[start : start + 6] == b"Exif\0\0" or is_xmp(data[start : start + 29]))
        ):
            if data[start] == ord("E"):
                orientation = exif_value(memoryview(data)[start:end])
            else:
                xmp = bytes(data[start:end])
        elif marker >= _APP0:
            ordinary = ordinary and _is_ordinary(marker, bytes(data[start : min(end, start + 16)]))
        # Arithmetic coding, lossless frames and the like are left to FFmpeg.
        elif marker != _DRI:
            return None
    if len(frame) < 6:
        return None
    height, width = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4]
    depth_and_parts = frame[:1] + frame[5:]
    pix_fmt = _format_of(depth_and_parts) if ordinary and width > 0 and height > 0 else None
    is_ycc = pix_fmt not in (None, "gray")
    stands_alone = (
        is_ycc
        and frame_marker == _SOF0
        and _brings(tables, depth_and_parts, bytes(data[start:end]))
    )
    # XMP counts where Exif does not speak of it.
    orientation = orientation or (xmp_value(xmp) if xmp else 1)
    return JpegHead(orientation, width, height, pix_fmt, is_ycc, stands_alone)


def _is_ordinary(marker: int, begin: bytes) -> bool:
    """Whether a segment of an application, or a comment, that begins so leaves FFmpeg's decoder alone."""
    if marker == _COM:
        return not begin.startswith(_TELLING)
    if not begin.startswith(_KNOWN.get(marker, ())):
        return False
    return marker != _APP14 or (len(begin) >= 12 and begin[11] == _YCC)


# Most cameras and programs write the same parts of a header again and again.
_remembered = lru_cache(maxsize=256)


@_remembered
def _format_of(frame: bytes) -> str | None:
    """Pixel format by a frame header without its size, of 8-bit gray, or of YCbCr in a usual sampling."""
    if frame[:2] == b"\x08\x01":
        return "gray"
    is_ycc = len(frame) == 11 and frame[:2] == b"\x08\x03" and frame[2::3] in _YCC_IDS
    return _SAMPLINGS.get(frame[3::3]) if is_ycc else None


# Tables as bits of a number: those of Huffman codes by their class and number, 0x00 to 0x1F, and above them
# those of quantisation.
_QUANTISATION = 32


@_remembered
def _defined(marker: int, body: bytes) -> int:
    """The tables that a segment defines; none if they do not fill it."""
    position = tables = 0
    while position < len(body):
        kind = body[position]
        if marker == _DQT:
            tables |= 1 << _QUANTISATION + (kind & 15)
            # A number, then 64 values of two bytes or one.
            position += 129 if kind >> 4 else 65
        else:
            tables |= 1 << (kind & 31)
            # A number, sixteen counts of codes by length, and a value for each code.
            position += 17 + sum(body[position + 1 : position + 17])
    return tables if position == len(body) else 0


@_remembered
def _brings(tables: int, frame: bytes, scan: bytes) -> bool:
    """Whether the scan has all three components, in one go, and their tables were defined."""
    # All 64 coefficients at full precision: a progressive scan has other numbers at its end.
    if len(scan) != 10 or scan[0] != 3 or scan[7:] != b"\0\x3f\0":
        return False
    named = 0
    for number in frame[4::3]:
        named |= 1 << _QUANTISATION + (number & 15)
    for number in scan[2:7:2]:
        # Tables of AC coefficients are of class 1, which is bit 4.
        named |= 1 << (number >> 4) | 1 << (16 | number & 15)
    return named & ~tables == 0 and scan[1:6:2] == frame[2::3]
