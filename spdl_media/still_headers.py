"""Read the headers of still images: size, orientation, and often pixel format and colour metadata.

Reading a header takes microseconds, decoding takes milliseconds. Colour metadata is FFmpeg's numbers of
range, matrix, primaries and transfer function, the same as from its decoders.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from spdl_media import parts, still_parts, stills
from spdl_media.parts import Bytes, Read

__all__ = ()

_Color: TypeAlias = tuple[int, int, int, int]

# Range, matrix, primaries and transfer; FFmpeg's "unspecified" is 0 for the range and 2 for the others.
_UNKNOWN: _Color = (0, 2, 2, 2)
_FULL, _LIMITED, _BT470BG, _RGB, _BT709, _SRGB = 2, 1, 5, 0, 1, 13


class StillHeader(NamedTuple):
    """Contents of a header.

    Attributes:
        width: Width of the stored image.
        height: Height of the stored image.
        pix_fmt: Pixel format of FFmpeg's decoder; ``None`` if the header does not tell.
        color: FFmpeg's numbers of range, matrix, primaries and transfer function.
    """

    width: int
    height: int
    pix_fmt: str | None = None
    color: _Color = _UNKNOWN


def still_header(data: Bytes, codec: str) -> StillHeader | None:
    """Read the header of a still.

    Args:
        data: The file, or its first 64 KiB; of a JPEG, everything before its coded data. Not copied.
        codec: FFmpeg's name: ``"mjpeg"``, ``"png"``, ``"webp"``, ``"bmp"`` or ``"gif"``.

    Returns:
        The header; ``None`` for other codecs, and if the header is incomplete or invalid.

    Raises:
        TypeError: ``data`` is not a contiguous buffer.
    """
    view = memoryview(data).cast("B")
    try:
        header = _HEADERS[codec](view) if codec in _HEADERS else None
    except (struct.error, IndexError):
        return None
    if header is None or header.width <= 0 or header.height <= 0:
        return None
    # The limit of FFmpeg's av_image_check_size().
    fits = (header.width + 128) * (header.height + 128) < (2**31 - 1) // 8
    return header if fits else None


def read_still(head: Bytes, read: Read, size: int) -> tuple[str, StillHeader, int] | None:
    """Read the header and the orientation of a complete still.

    Args:
        head: The first 64 KiB of the file.
        read: Called as ``read(position, size)``; returns other bytes of the file.
        size: Size of the file.

    Returns:
        FFmpeg's name of the codec, the header, and the orientation; ``None`` for other formats, animations,
        truncated files, and files that FFmpeg does not read correctly.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    codec = stills.still_codec(head) or stills.container_still(head)
    # Profiles and thumbnails may come before the size of a JPEG.
    if codec == "mjpeg" and len(head) < size and stills.read_jpeg_head(head) is None:
        head = read(0, 16 * stills.HEAD_SIZE)
    header = still_header(head, codec or "")
    # JPEGs that FFmpeg misreads are RGB or CMYK, and those have no pix_fmt in their header.
    if (
        codec is None
        or header is None
        or ((codec != "mjpeg" or not header.pix_fmt) and stills.pillow_reason(head))
    ):
        return None
    try:
        orientation = _orientation_of_whole(codec, head, read, size)
    except struct.error:
        return None
    return None if orientation is None else (codec, header, orientation)


def _jpeg(view: memoryview) -> StillHeader | None:
    head = stills.read_jpeg_head(view)
    if head is None:
        return None
    # FFmpeg states no range for gray and CMYK.
    color = (_FULL if head.is_ycc else 0, _BT470BG, 2, 2)
    return StillHeader(head.width, head.height, head.pix_fmt, color)


# By colour type: formats for up to 8 bits, and for 16 bits.
_PNG_FORMATS = {
    0: ("gray", "gray16be"),
    2: ("rgb24", "rgb48be"),
    3: ("pal8", None),
    4: ("ya8", "ya16be"),
    6: ("rgba", "rgba64be"),
}


def _png(view: memoryview) -> StillHeader | None:
    width, height, depth, color = struct.unpack_from(">IIBB", view, 16)
    kinds = still_parts.png_head(view)
    is_srgb = b"sRGB" in kinds
    # Only FFmpeg interprets cICP, gAMA and cHRM; sRGB takes precedence over the last two.
    strange = b"cICP" in kinds or (not is_srgb and not kinds.isdisjoint((b"gAMA", b"cHRM")))
    if strange or b"IDAT" not in kinds:
        return None
    # A tRNS chunk (transparent colour) adds an alpha channel.
    kind = color + 4 if b"tRNS" in kinds and color in (0, 2) else color
    formats = _PNG_FORMATS.get(kind, (None, None))
    pix_fmt = "monob" if (kind, depth) == (0, 1) else formats[depth == 16]
    primaries, transfer = (_BT709, _SRGB) if is_srgb else (2, 2)
    return StillHeader(width, height, pix_fmt, (_FULL, _RGB, primaries, transfer))


def _webp(view: memoryview) -> StillHeader | None:
    pix_fmt = "yuv420p"
    for kind, start, _ in parts.RIFF.of(view):
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
    """Return width and height from the extended header of a WebP; ``None`` for other data."""
    if bytes(head[8:16]) != b"WEBPVP8X" or len(head) < 30:
        return None
    width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
    return width, height


_BMP_FORMATS = {1: "pal8", 4: "pal8", 8: "pal8", 24: "bgr24", 32: "bgra"}


def _bmp(view: memoryview) -> StillHeader | None:
    _, width, height, depth, compression, _ = still_parts.bmp_header(view)
    # Not with colour masks, which may be anything.
    pix_fmt = _BMP_FORMATS.get(depth) if compression in (0, 1, 2) else None
    return StillHeader(width, abs(height), pix_fmt)


def _gif(view: memoryview) -> StillHeader:
    width, height = struct.unpack_from("<HH", view, 6)
    return StillHeader(width, height, "bgra")


_HEADERS: Mapping[str, Callable[[memoryview], StillHeader | None]] = {
    "mjpeg": _jpeg,
    "png": _png,
    "webp": _webp,
    "bmp": _bmp,
    "gif": _gif,
}

# The chunks of PNG and WebP that are read here; chunks with pixels are skipped.
_METADATA = frozenset(
    (b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"tEXt", b"zTXt", b"iTXt", b"IEND", b"EXIF", b"XMP ")
)


def _orientation_of_whole(codec: str, head: Bytes, read: Read, size: int) -> int | None:
    """Return the orientation of a complete file; ``None`` if it may be truncated or have several images."""
    if codec == "mjpeg":
        found = stills.read_jpeg_head(head)
        return found.orientation if found and bytes(read(size - 2, 2)) == b"\xff\xd9" else None
    if codec == "bmp":
        # A run-length coded file can be checked only as a whole.
        runs = still_parts.bmp_header(memoryview(head).cast("B"))[4] in (1, 2)
        return None if runs or still_parts.check_complete(codec, head, size) else 1
    if codec == "gif":
        view = memoryview(head if size <= len(head) else read(0, 4 * stills.HEAD_SIZE)).cast("B")
        blocks = list(still_parts.gif_blocks(view))
        is_one = blocks.count(still_parts.GIF_IMAGE) == 1
        return 1 if is_one and blocks[-1] == still_parts.GIF_TRAILER else None
    form = parts.PNG if codec == "png" else parts.RIFF
    kept = [head[: form.start]]
    # All chunks, because metadata may follow the pixels.
    for kind, start, end in form.read(read, size):
        if kind in _METADATA:
            kept.append(read(start - 8, end - start + 8 + -end % form.padding + form.trailer))
    shell = b"".join(kept)
    whole = still_parts.check_complete(codec, shell, size if codec == "webp" else None) is None
    return stills.first_orientation(_METADATA_READERS[codec](memoryview(shell))) if whole else None


def exif_orientation(data: Bytes) -> int:
    """Read the orientation from the metadata in an image file.

    It is read from JPEG (Exif in APP1), PNG (eXIf, also after the pixels, and ImageMagick's text), WebP (EXIF
    chunk) and TIFF (tag 274), or from the XMP of these files if Exif states none.

    Args:
        data: The file, or the part of it with the metadata. Not copied.

    Returns:
        1 to 8; 1 for other formats and animations, and if metadata is missing or damaged.

    See:
        Exif 2.32 (CIPA DC-008), section 4.6.4.

    Raises:
        TypeError: ``data`` is not a contiguous buffer.
    """
    codec = stills.still_codec(data)
    if codec not in _METADATA_READERS:
        return 1
    try:
        return stills.first_orientation(_METADATA_READERS[codec](memoryview(data).cast("B")))
    except struct.error:
        return 1  # truncated metadata is no reason to refuse the image


def without_exif(png: bytes | memoryview) -> bytes | memoryview:
    """Return a PNG without its Exif chunks; the same object if it has none.

    FFmpeg refuses a PNG whose Exif is damaged, begins as in a JPEG, or has a type of Exif 3.0.

    Raises:
        TypeError: ``png`` is not a contiguous buffer.
    """
    view = memoryview(png).cast("B")
    kept = [0]
    with suppress(struct.error):  # a truncated file; its decoder says what is missing
        for kind, start, end in parts.PNG.of(view):
            if kind == b"eXIf":
                kept += start - parts.PNG.header.size, end + parts.PNG.trailer
    if len(kept) == 1:
        return png
    return b"".join(view[a:b] for a, b in zip(kept[::2], [*kept[1::2], len(view)], strict=True))


# Metadata that may state the orientation: whether it is XMP (else Exif), and the block.
_Blocks: TypeAlias = "Iterator[tuple[bool, Bytes]]"


_XMP_TAG = 700


def _tiff_tags(view: memoryview) -> _Blocks:
    yield False, view
    if (entry := still_parts.tiff_entry(view, _XMP_TAG)) is not None:
        yield True, entry[2]


def _jpeg_segments(view: memoryview) -> _Blocks:
    for marker, start, end in still_parts.jpeg_segments(view):
        if marker in (still_parts.JPEG_SCAN, still_parts.JPEG_END):
            return
        if marker == still_parts.JPEG_APP1:
            yield from stills.jpeg_metadata(view[start:end])


def _png_chunks(view: memoryview) -> _Blocks:
    for kind, start, end in parts.PNG.of(view):
        if kind == b"eXIf":
            yield False, view[start:end]
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            key, _, content = bytes(view[start:end]).partition(b"\0")
            if key == b"XML:com.adobe.xmp":
                yield True, _text(kind, content)
            elif key == b"Raw profile type exif":
                # Written by ImageMagick before PNG had a chunk for Exif: hexadecimal digits after a line with
                # the name and one with the length.
                with suppress(ValueError):
                    digits = _text(kind, content).split(b"\n", 3)[-1]
                    yield False, bytes.fromhex(digits.decode("ascii"))


# Limit of decompressed text in bytes; metadata takes some kilobytes.
_MAX_TEXT = 1 << 20


def _text(kind: bytes, content: bytes) -> bytes:
    """Return the text after the key of a chunk; for uncompressed iTXt, including the fields before it."""
    if kind == b"zTXt":
        packed = content[1:]  # after the compression method
    elif kind == b"iTXt" and content[:1] == b"\1":
        packed = content.split(b"\0", 3)[-1]  # after two flags, the language and the translated key
    else:
        return content
    try:
        return zlib.decompressobj().decompress(packed, _MAX_TEXT)
    except zlib.error:
        return b""


def _webp_chunks(view: memoryview) -> _Blocks:
    for kind, start, end in parts.RIFF.of(view):
        if kind in (b"EXIF", b"XMP "):
            yield kind == b"XMP ", view[start:end]


_METADATA_READERS: Mapping[str | None, Callable[[memoryview], _Blocks]] = {
    "mjpeg": _jpeg_segments,
    "jpegls": _jpeg_segments,
    "png": _png_chunks,
    "webp": _webp_chunks,
    "tiff": _tiff_tags,
}
