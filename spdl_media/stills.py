"""Images that are one packet: FFmpeg's decoder that takes the whole file, and files that it must not read.

Formats that need a container (GIF, AVIF, HEIC), animations (WebP, APNG) and formats without a reliable
signature are left to FFmpeg's demuxers. What FFmpeg makes black, garbled or partial images of, mostly without
an error, Pillow reads.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from spdl_media.boxes import Bytes, boxes
from spdl_media.exif import JPEG_SCAN, exif_orientation, jpeg_segments, png_head, tiff_value

__all__ = (
    "BESIDE",
    "ERR_DETECT",
    "HEAD_SIZE",
    "STILL_FORMATS",
    "WITHOUT_SIGNATURE",
    "container_still",
    "is_avif",
    "pillow_reason",
    "still_codec",
    "still_orientation",
    "unread_kind",
)

HEAD_SIZE = 1 << 16
"""Bytes of a file that :func:`still_codec` may want.

It is an ``acTL`` chunk behind a large colour profile that takes so many; every other format is
known from the first 32."""

WITHOUT_SIGNATURE = frozenset(
    {"targa", "xbm", "pcx", "pictor", "photocd", "brender_pix", "sunrast"}
)
"""Decoders of images that can only be known by the name of their file."""

# Decoders that FFmpeg's demuxer of such files is named after: "png_pipe".
_NAMED_ALIKE = (
    "bmp dds dpx exr jpegls pam pbm pfm pgm pgmyuv phm png ppm qoi sgi sunrast tiff webp".split()
)

STILL_FORMATS: Mapping[str, str] = MappingProxyType(
    {name: name for name in _NAMED_ALIKE}
    | {f"{name}_pipe": name for name in _NAMED_ALIKE}
    | dict.fromkeys(("j2k", "j2k_pipe", "jp2", "jpeg2000"), "jpeg2000")
    | dict.fromkeys(("jpeg", "jpeg_pipe", "jpg"), "mjpeg")
    | dict.fromkeys(("targa", "tga"), "targa")
    | {"jls": "jpegls", "tif": "tiff"}
)
"""Names of formats to decoders: FFmpeg's own (``"png_pipe"``) and everyday ones (``"jpeg"``).

A name that the user gives overrules the signature. TGA has none and must be named."""

ERR_DETECT: Mapping[str, str] = MappingProxyType(
    {"apng": "explode", "jpegls": "explode", "mjpeg": "explode", "png": "explode"}
)
"""Decoder to the ``err_detect`` under which it notices most damage and refuses no whole file.

Absent decoders are best left at FFmpeg's default: WebP, BMP, GIF, JPEG 2000, QOI, TGA, PNM, EXR and
AV1 notice the same damage with any value, and TIFF with ``explode`` refuses whole files for tags it
does not know. ``crccheck`` adds nothing: PNG compares its checksums under ``explode`` too."""


def still_codec(head: Bytes) -> str | None:
    """Name the decoder of FFmpeg that takes a whole file of this kind as one packet.

    An animated WebP is told by the animation flag of its ``VP8X`` chunk, an animated PNG by an
    ``acTL`` chunk before its pixels.

    Args:
        head: The first :data:`HEAD_SIZE` bytes of the file, or all of it. Fewer will do for
            anything but PNG, 32 at least. Not copied.

    Returns:
        The decoder's name, such as ``"mjpeg"`` or ``"png"``; ``None`` where a container must be
        opened: GIF, AVIF, HEIC, Motion JPEG 2000, animations, and whatever is not known here.

    Raises:
        TypeError: ``head`` is no contiguous buffer.
    """
    view = memoryview(head).cast("B")
    for signature, decoder, _ in _SIGNATURES:
        if view[: len(signature)] == signature:
            return decoder(view) if callable(decoder) else decoder
    # Version 7 of XV's thumbnails also begins with P7, but with a space behind it.
    return _PNM_DECODERS[view[1]] if _PNM.match(view) else None


def still_orientation(data: Bytes) -> int:
    """Read the orientation of an image that is decoded as one packet.

    Args:
        data: The whole file. Not copied.

    Returns:
        1 to 8; 1 for animations, whatever is said of them.

    Raises:
        TypeError: ``data`` is no contiguous buffer.
    """
    return 1 if still_codec(data) is None else exif_orientation(data)


_AVIF_BRANDS = frozenset({b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1"})


def container_still(head: Bytes) -> str | None:
    """Tell images that FFmpeg reads from a container.

    Args:
        head: The first bytes of the file, 12 at least.

    Returns:
        ``"gif"``, or ``"avif"`` for AVIF and HEIC; ``None`` for all else.
    """
    if head[:4] == b"GIF8":
        return "gif"
    return "avif" if head[4:8] == b"ftyp" and bytes(head[8:12]) in _AVIF_BRANDS else None


def _jpeg_codec(view: memoryview) -> str:
    return "jpegls" if bytes(view[3:4]) == b"\xf7" else "mjpeg"


def _jp2_codec(view: memoryview) -> str | None:
    return None if bytes(view[20:24]) == b"mjp2" else "jpeg2000"


def _png_codec(view: memoryview) -> str | None:
    # An animation says so before its first pixels.
    return None if b"acTL" in png_head(view) else "png"


_WEBP_ANIMATION = 0x02


def _is_animated_webp(view: memoryview) -> bool:
    """Whether the extended header of a WebP announces an animation."""
    is_extended = bytes(view[8:16]) == b"WEBPVP8X" and len(view) > 20
    return is_extended and view[20] & _WEBP_ANIMATION != 0


def _webp_codec(view: memoryview) -> str | None:
    # WAV and AVI are RIFF files as well.
    return "webp" if bytes(view[8:12]) == b"WEBP" and not _is_animated_webp(view) else None


def _bmp_codec(view: memoryview) -> str | None:
    # Two letters are a weak signature; the size of the second header confirms it.
    return "bmp" if len(view) > 18 and 12 <= int.from_bytes(view[14:18], "little") <= 255 else None


def _sgi_codec(view: memoryview) -> str | None:
    # Storage 0 or 1, bytes per sample 1 or 2, 1 to 3 dimensions.
    plausible = len(view) > 12 and view[2] <= 1 and view[3] in (1, 2) and 1 <= view[5] <= 3
    return "sgi" if plausible else None


_PNM = re.compile(rb"P[1-6FHfh][\s#]|P7\r?\n")
# By the byte behind the P. Formats in text (1 to 3) have the decoders of those in binary (4 to 6).
_PNM_DECODERS = dict(
    zip(b"1234567FHfh", "pbm pgm ppm pbm pgm ppm pam pfm phm pfm phm".split(), strict=True)
)


BESIDE = "with a sequence beside its image"
"""Such a file has a video, which FFmpeg reads well."""


def pillow_reason(data: Bytes, decoder: str | None = None) -> str | None:
    """Say why FFmpeg must not read an image.

    Args:
        data: The whole file; of animated PNG and WebP the first 64 KiB will do. Not copied.
        decoder: FFmpeg's decoder for it, by which TGA is known: it has no signature.

    Returns:
        What is special about the file, such as ``"TIFF of tiles"``; ``None``: FFmpeg reads it well.

    Raises:
        TypeError: ``data`` is no contiguous buffer.
    """
    view = memoryview(data).cast("B")
    if decoder == "targa":
        return _targa_reason(view)
    for signature, _, reason in _SIGNATURES:
        if view[: len(signature)] == signature:
            try:
                return reason(view) if callable(reason) else reason
            except (struct.error, IndexError):  # cut short: FFmpeg's error says more
                return None
    return _iso_reason(view) if bytes(view[4:8]) == b"ftyp" else None


# What FFmpeg reads wrongly or not at all.
# A function gives the reason, or None where FFmpeg reads the file well.

_BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 258, 259, 262, 266
_PLANAR, _TILE_WIDTH, _EXTRA_SAMPLES = 284, 322, 338
_ASSOCIATED_ALPHA = 1
_TIFF_COMPRESSIONS = frozenset((1, 2, 3, 4, 5, 8, 32773, 32946))
"""None, CCITT's three, LZW, Deflate and PackBits."""
_TIFF_PHOTOMETRICS = {0: "gray", 1: "gray", 2: "RGB", 3: "a palette", 5: "CMYK"}


def _tiff_reason(view: memoryview) -> str | None:
    """Tiles, JPEG, planes and other colours come out black or garbled, and FFmpeg does not say so."""

    def tag(number: int, default: int) -> int:
        value = tiff_value(view, number)
        return default if value is None else value

    photometric, bits, extra = tag(_PHOTOMETRIC, 1), tag(_BITS, 1), tag(_EXTRA_SAMPLES, -1)
    compression = tag(_COMPRESSION, 1)
    found = (
        ("of tiles", tag(_TILE_WIDTH, -1) >= 0),
        ("with planes", tag(_PLANAR, 1) != 1),
        (f"with compression {compression}", compression not in _TIFF_COMPRESSIONS),
        (f"with colours of kind {photometric}", photometric not in _TIFF_PHOTOMETRICS),
        ("with a palette and alpha", photometric == 3 and extra >= 0),
        ("with colours multiplied by alpha", extra == _ASSOCIATED_ALPHA),
        (f"with {bits}-bit CMYK", photometric == 5 and bits != 8),
        ("with reversed bits", tag(_FILL_ORDER, 1) != 1 and 1 < bits < 8),
    )
    return next((f"a TIFF {what}" for what, is_so in found if is_so), None)


def _png_reason(view: memoryview) -> str | None:
    kinds = png_head(view)
    if b"acTL" in kinds:
        return "an animated PNG"
    is_bitmap = (view[24], view[25]) == (1, 0)
    is_strange = is_bitmap and b"tRNS" in kinds
    return "a PNG of one bit with a transparent colour" if is_strange else None


def _webp_reason(view: memoryview) -> str | None:
    return "an animated WebP" if _is_animated_webp(view) else None


def _bmp_reason(view: memoryview) -> str | None:
    pixels, header, bits, compression = struct.unpack_from("<II10xHI", view, 10)
    if bits == 16:
        return "a BMP of 16 bits a pixel"
    if bits <= 8 and pixels <= 14 + header:
        return "a BMP that does not say where its palette ends"
    # Masks follow the first 40 bytes of the header; the fourth is that of alpha.
    has_alpha = header >= 56 and compression == 3 and any(view[66:70])
    return "a BMP with alpha" if has_alpha else None


_TARGA_GRAY = 3
_TARGA_UNREADABLE = 7  # beside the bit of run lengths


def _targa_reason(view: memoryview) -> str | None:
    if len(view) < 18 or view[16] not in (15, 16):
        return None
    is_gray = view[2] & _TARGA_UNREADABLE == _TARGA_GRAY
    return "a TGA of gray and alpha" if is_gray else "a TGA of 16 bits a pixel"


_DDS_RGB = 0x40
_DDS_RGBA = range(27, 32)
"""DXGI's formats of red, green, blue and alpha of 8 bits each."""


def _dds_reason(view: memoryview) -> str | None:
    flags, kind, bits = struct.unpack_from("<I4sI", view, 80)
    if flags & _DDS_RGB and bits == 16:
        return "a DDS of 16 bits a pixel"
    (dxgi,) = struct.unpack_from("<I", view, 128)
    return "a DDS that begins with red" if kind == b"DX10" and dxgi in _DDS_RGBA else None


def _cursor_reason(view: memoryview) -> str | None:
    """A TGA begins alike, but has zeros where the number of images stands, and where the first one lies."""
    count, size, offset = struct.unpack_from("<H8xII", view, 4)
    return "a cursor" if count and not view[9] and size and offset >= 6 + 16 * count else None


_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def _jpeg_reason(view: memoryview) -> str | None:
    """Four components of different sizes are not in FFmpeg's decoder."""
    for marker, start, end in jpeg_segments(view):
        if marker in _SOF:
            samplings = set(bytes(view[start + 7 : end : 3]))
            many = view[start + 5] == 4 and len(samplings) > 1
            return "a CMYK JPEG with subsampled colours" if many else None
        if marker == JPEG_SCAN:
            break
    return None


_JP2_CMYK = b"colr\1\0\0\0\0\0\x0c"


def _jp2_reason(view: memoryview) -> str | None:
    return "a JPEG 2000 of CMYK" if _JP2_CMYK in bytes(view[:1024]) else None


# Behind the numbers of the primaries and of the transfer function: YCgCo and those beyond BT.2020.
_STRANGE_MATRIX = re.compile(rb"colrnclx.{4}\0[\x08\x0a-\x11]", re.DOTALL)


def _iso_reason(view: memoryview) -> str | None:
    """HEIC and AVIF whose image is cropped, made of tiles, or has alpha: FFmpeg gives one coded image."""
    top = {kind: (start, end) for kind, start, end in boxes(view)}
    if b"meta" not in top:
        return None
    start, end = top[b"meta"]
    meta = {kind: slice(start, end) for kind, start, end in boxes(view, start + 4, end)}
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
        (BESIDE, tracks and not is_sequence),
    )
    return next((f"{name} {what}" for what, is_so in found if is_so), None)


def is_avif(view: memoryview) -> bool:
    """Whether the start of an ISO base media file says AVIF, and not HEIC."""
    return bytes(view[8:12]) in (b"avif", b"avis") or b"av01" in bytes(view[:512])


_Found: TypeAlias = "str | Callable[[memoryview], str | None] | None"

# By the first bytes of a file: FFmpeg's decoder that takes all of it, and why FFmpeg must not read it.
_SIGNATURES: tuple[tuple[bytes, _Found, _Found], ...] = (
    (b"\xff\xd8\xff", _jpeg_codec, _jpeg_reason),
    (b"\x89PNG\r\n\x1a\n", _png_codec, _png_reason),
    (b"RIFF", _webp_codec, _webp_reason),
    (b"BM", _bmp_codec, _bmp_reason),
    (b"II*\0", "tiff", _tiff_reason),
    (b"MM\0*", "tiff", _tiff_reason),
    (b"II+\0", None, "a BigTIFF"),
    (b"MM\0+", None, "a BigTIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", _jp2_codec, _jp2_reason),
    (b"\xff\x4f\xff\x51", "jpeg2000", None),
    (b"qoif", "qoi", None),
    (b"DDS ", "dds", _dds_reason),
    (b"SDPX", "dpx", None),
    (b"XPDS", "dpx", None),
    (b"v/1\x01", "exr", None),
    (b"\x01\xda", _sgi_codec, None),
    (b"\x59\xa6\x6a\x95", "sunrast", None),
    (b"\0\0\1\0", None, "an icon"),
    (b"\0\0\2\0", None, _cursor_reason),
    (b"icns", None, "an icon"),
    (b"BLP1", None, "a BLP"),
    (b"BLP2", None, "a BLP"),
    (b"#define ", None, "an XBM"),
)


# What FFmpeg does not know, or cannot tell from audio.
_UNREAD = {
    b"GIF8": "a GIF",
    b"\xff\x0a": "a JPEG XL",
    b"\0\0\0\x0cJXL ": "a JPEG XL",
    b"FTEX": "an FTEX",
    b"%PDF": "a PDF",
    b"%!PS": "a PostScript",
}


def unread_kind(head: Bytes) -> str | None:
    """What the first bytes of a file say that FFmpeg has failed to open."""
    begin = bytes(head[:12])
    return next((name for start, name in _UNREAD.items() if begin.startswith(start)), None)
