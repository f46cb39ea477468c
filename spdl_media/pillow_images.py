"""Images that FFmpeg reads wrongly or not at all: how they are told, and Pillow's frames of them.

FFmpeg gives black, garbled or partial images for these files, mostly without an error. Pillow, with
pillow-heif for HEIC, reads them. Both are the optional extra ``stills``; without it such a file is refused.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np

from spdl_media._optional import require
from spdl_media.errors import DecodeError, MediaError
from spdl_media.exif import JPEG_SCAN, Bytes, boxes, byte_view, jpeg_segments, png_head, tiff_value
from spdl_media.stills import is_animated_webp

__all__ = ("PillowFrame", "is_unsupported", "pillow_reason", "read_with_pillow")

BESIDE = "with a sequence beside its image"
"""Such a file has a video, which FFmpeg reads well."""

TIME_BASE = Fraction(1, 1000)
"""Seconds in a unit of the frames' timestamps: animations state milliseconds."""


class PillowFrame(NamedTuple):
    """One image of a file.

    Attributes:
        frame: ``rgb24``, ``rgba``, ``gray``, ``gray16le`` or ``grayf32le``, full range, not turned upright.
        orientation: The EXIF number of the file's orientation.
    """

    frame: av.VideoFrame
    orientation: int


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
    view = byte_view(data)
    if decoder == "targa":
        return _targa_reason(view)
    for signature, find in _KINDS:
        if view[: len(signature)] == signature:
            try:
                return find if isinstance(find, str) else find(view)
            except (struct.error, IndexError):  # cut short: FFmpeg's error says more
                return None
    return _iso_reason(view) if bytes(view[4:8]) == b"ftyp" else None


def is_unsupported(error: MediaError) -> bool:
    """Whether FFmpeg says of an image that it does not know its kind, rather than that it is damaged."""
    return _UNSUPPORTED.search(error.message) is not None


# What FFmpeg's decoders and demuxers write before they return an error that says less.
_UNSUPPORTED = re.compile(
    r"not yet implemented|not supported|unsupported|unknown pixel format", re.IGNORECASE
)


def read_with_pillow(
    data: Bytes, source: str, *, purpose: str, is_video: bool = False
) -> Iterator[PillowFrame]:
    """Decode an image, or the frames of an animation one after the other.

    Args:
        data: The whole file.
        source: What it was read from, for messages.
        purpose: What needs Pillow, the subject of the message where it is missing.
        is_video: Give all frames of an animation.

    Yields:
        The frames in order, each composed as its animation says. Without ``is_video``, the one that programs
        show which know no animations; of an icon the largest image, of a HEIC the primary one.

    Raises:
        MissingDependencyError: Pillow is not installed, or pillow-heif for HEIC.
        DecodeError: The data is damaged, or Pillow does not know the format.
    """
    image_module: Any = require("pillow", purpose)
    if bytes(byte_view(data)[4:8]) == b"ftyp" and not _is_avif(byte_view(data)):
        require("pillow-heif", purpose).register_heif_opener()
    try:
        with image_module.open(io.BytesIO(data)) as image:
            count = getattr(image, "n_frames", 1)
            # The pages of a TIFF are images of their own.
            is_animation = count > 1 and image.format in ("PNG", "WEBP", "AVIF", "HEIF")
            # An animated PNG may have an image for programs that show no animations: it is not a frame.
            first = int(bool(image.info.get("default_image")))
            time = 0
            # The one at which the file was opened is the primary one.
            for index in range(first, count) if is_video and is_animation else [None]:
                if index is not None:
                    image.seek(index)
                frame = _as_frame(image)
                frame.pts, frame.time_base = time, TIME_BASE
                # Animations stand as they are, whatever their metadata says, as FFmpeg has them.
                turn = 1 if is_animation else image.getexif().get(0x0112, 1)
                # Files also have numbers that Exif does not know.
                yield PillowFrame(frame, turn if turn in range(1, 9) else 1)
                # Pillow has milliseconds, the unit of TIME_BASE.
                time += round(image.info.get("duration", 0))
    except MemoryError:
        raise
    # Pillow's plugins raise whatever their parsing meets: OSError, SyntaxError, struct.error, KeyError ...
    except Exception as error:
        reason = purpose.removeprefix(f"{source}: ")
        what = reason if reason.startswith(("a ", "an ")) else "the image"
        raise DecodeError(f"Pillow cannot decode {what}: {error}", source=source) from error


def _as_frame(image: Any) -> av.VideoFrame:
    """Pillow's pixels in the nearest of FFmpeg's formats."""
    mode = image.mode
    if mode.startswith("I;16"):
        return _new_frame(np.asarray(image).astype(np.uint16), "gray16le")
    if mode == "F":
        return _new_frame(np.asarray(image), "grayf32le")
    if mode == "I":
        raise ValueError("its pixels are 32-bit integers, for which FFmpeg has no format")
    if mode == "LAB":
        # Pillow's convert() has no way from Lab to RGB.
        cms: Any = require("pillow-cms", "a Lab image")
        profiles = cms.createProfile("LAB"), cms.createProfile("sRGB")
        image = cms.profileToProfile(image, *profiles, outputMode="RGB")
    if image.has_transparency_data:
        return _new_frame(np.asarray(image.convert("RGBA")), "rgba")
    if mode in ("1", "L"):
        return _new_frame(np.asarray(image.convert("L")), "gray")
    return _new_frame(np.asarray(image.convert("RGB")), "rgb24")


_FULL_RANGE, _RGB_MATRIX = 2, 0  # FFmpeg's numbers of the range and of the matrix of RGB


def _new_frame(pixels: np.ndarray[Any, Any], pix_fmt: str) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), pix_fmt)
    frame.color_range = _FULL_RANGE
    if pix_fmt.startswith("rgb"):
        frame.colorspace = _RGB_MATRIX
    return frame


# How each kind is told. A function gives the reason, or None where FFmpeg reads the file well.

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
    return "an animated WebP" if is_animated_webp(view) else None


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
_TARGA_KINDS = 7  # beside the bit of run lengths


def _targa_reason(view: memoryview) -> str | None:
    if len(view) < 18 or view[16] not in (15, 16):
        return None
    is_gray = view[2] & _TARGA_KINDS == _TARGA_GRAY
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
    name = "an AVIF" if _is_avif(view) else "a HEIC"
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


def _is_avif(view: memoryview) -> bool:
    return bytes(view[8:12]) in (b"avif", b"avis") or b"av01" in bytes(view[:512])


_KINDS: tuple[tuple[bytes, str | Callable[[memoryview], str | None]], ...] = (
    (b"\xff\xd8\xff", _jpeg_reason),
    (b"\x89PNG\r\n\x1a\n", _png_reason),
    (b"RIFF", _webp_reason),
    (b"BM", _bmp_reason),
    (b"II*\0", _tiff_reason),
    (b"MM\0*", _tiff_reason),
    (b"II+\0", "a BigTIFF"),
    (b"MM\0+", "a BigTIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", _jp2_reason),
    (b"\0\0\1\0", "an icon"),
    (b"\0\0\2\0", _cursor_reason),
    (b"icns", "an icon"),
    (b"BLP1", "a BLP"),
    (b"BLP2", "a BLP"),
    (b"DDS ", _dds_reason),
    (b"#define ", "an XBM"),
)
