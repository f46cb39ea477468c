"""Pictures that are one packet: which decoder of FFmpeg takes the whole file, and how.

Formats that need a container (GIF, AVIF, HEIC), animations (WebP, APNG) and formats without a
reliable signature are left to FFmpeg's demuxers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType

from spdl_media._stills.parts import Bytes, byte_view, png_chunks
from spdl_media.orientation import exif_orientation

__all__ = (
    "ERR_DETECT",
    "HEAD_SIZE",
    "STILL_FORMATS",
    "container_still",
    "still_codec",
    "still_orientation",
)

HEAD_SIZE = 1 << 16
"""Bytes of a file that :func:`still_codec` may want.

It is an ``acTL`` chunk behind a large colour profile that takes so many; every other format is
known from the first 32."""

_DECODERS_AND_NAMES: Mapping[str, tuple[str, ...]] = {
    "bmp": ("bmp", "bmp_pipe"),
    "dds": ("dds", "dds_pipe"),
    "dpx": ("dpx", "dpx_pipe"),
    "exr": ("exr", "exr_pipe"),
    "jpeg2000": ("j2k", "j2k_pipe", "jp2", "jpeg2000"),
    "jpegls": ("jls", "jpegls", "jpegls_pipe"),
    "mjpeg": ("jpeg", "jpeg_pipe", "jpg"),
    "pam": ("pam", "pam_pipe"),
    "pbm": ("pbm", "pbm_pipe"),
    "pfm": ("pfm", "pfm_pipe"),
    "pgm": ("pgm", "pgm_pipe"),
    "pgmyuv": ("pgmyuv", "pgmyuv_pipe"),
    "phm": ("phm", "phm_pipe"),
    "png": ("png", "png_pipe"),
    "ppm": ("ppm", "ppm_pipe"),
    "qoi": ("qoi", "qoi_pipe"),
    "sgi": ("sgi", "sgi_pipe"),
    "sunrast": ("sunrast", "sunrast_pipe"),
    "targa": ("targa", "tga"),
    "tiff": ("tif", "tiff", "tiff_pipe"),
    "webp": ("webp", "webp_pipe"),
}

STILL_FORMATS: Mapping[str, str] = MappingProxyType(
    {name: decoder for decoder, names in _DECODERS_AND_NAMES.items() for name in names}
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

_PNM_DECODERS = {
    b"P1": "pbm",
    b"P2": "pgm",
    b"P3": "ppm",
    b"P4": "pbm",
    b"P5": "pgm",
    b"P6": "ppm",
    b"P7": "pam",
    b"PF": "pfm",
    b"PH": "phm",
    b"Pf": "pfm",
    b"Ph": "phm",
}

# Version 7 of XV's thumbnails also begins with P7, but with a space behind it.
_PNM = re.compile(rb"P[1-6FHfh][\s#]|P7\r?\n")

_WEBP_ANIMATION = 0x02


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
    """
    view = byte_view(head)
    for signature, find in _SIGNATURES:
        if view[: len(signature)] == signature:
            return find(view)
    return _pnm_codec(view)


def still_orientation(data: Bytes) -> int:
    """Say how a picture lies whose file is one packet, whichever way the file was opened.

    Args:
        data: The whole file. Not copied.

    Returns:
        1 to 8; 1 for animations, whatever is said of them.
    """
    return 1 if still_codec(data) is None else exif_orientation(data)


_AVIF_BRANDS = frozenset({b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1"})


def container_still(head: bytes) -> str | None:
    """Tell pictures that FFmpeg reads from a container.

    Args:
        head: The first bytes of the file, 12 at least.

    Returns:
        ``"gif"``, or ``"avif"`` for AVIF and HEIC; ``None`` for all else.
    """
    if head[:4] == b"GIF8":
        return "gif"
    return "avif" if head[4:8] == b"ftyp" and head[8:12] in _AVIF_BRANDS else None


def _jpeg_codec(view: memoryview) -> str:
    return "jpegls" if bytes(view[2:4]) == b"\xff\xf7" else "mjpeg"


def _png_codec(view: memoryview) -> str | None:
    try:
        for kind, _, _ in png_chunks(view):
            if kind == b"acTL":
                return None
            if kind == b"IDAT":
                break
    except struct.error:
        pass  # The head ends inside a chunk's header.
    return "png"


def _webp_codec(view: memoryview) -> str | None:
    if bytes(view[8:12]) != b"WEBP":
        return None  # WAV and AVI are RIFF files as well.
    animated = bytes(view[12:16]) == b"VP8X" and len(view) > 20 and view[20] & _WEBP_ANIMATION
    return None if animated else "webp"


def _bmp_codec(view: memoryview) -> str | None:
    # Two letters are a weak signature; the size of the second header confirms it.
    return "bmp" if len(view) > 18 and 12 <= int.from_bytes(view[14:18], "little") <= 255 else None


def _sgi_codec(view: memoryview) -> str | None:
    # Storage 0 or 1, bytes per sample 1 or 2, 1 to 3 dimensions.
    plausible = len(view) > 12 and view[2] <= 1 and view[3] in (1, 2) and 1 <= view[5] <= 3
    return "sgi" if plausible else None


def _jpeg2000_codec(view: memoryview) -> str | None:
    return None if bytes(view[20:24]) == b"mjp2" else "jpeg2000"


def _pnm_codec(view: memoryview) -> str | None:
    return _PNM_DECODERS[bytes(view[:2])] if _PNM.match(view) else None


_SIGNATURES: tuple[tuple[bytes, Callable[[memoryview], str | None]], ...] = (
    (b"\xff\xd8\xff", _jpeg_codec),
    (b"\x89PNG\r\n\x1a\n", _png_codec),
    (b"RIFF", _webp_codec),
    (b"BM", _bmp_codec),
    (b"II*\0", lambda _: "tiff"),
    (b"MM\0*", lambda _: "tiff"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", _jpeg2000_codec),
    (b"\xff\x4f\xff\x51", lambda _: "jpeg2000"),
    (b"qoif", lambda _: "qoi"),
    (b"DDS ", lambda _: "dds"),
    (b"SDPX", lambda _: "dpx"),
    (b"XPDS", lambda _: "dpx"),
    (b"v/1\x01", lambda _: "exr"),
    (b"\x01\xda", _sgi_codec),
    (b"\x59\xa6\x6a\x95", lambda _: "sunrast"),
)
