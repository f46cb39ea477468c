"""Encode arrays as image files: PNG, JPEG, WebP, AVIF, and all other formats that FFmpeg encodes."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from fractions import Fraction
from pathlib import PurePath
from typing import Any, Literal

import av
from av.codec.context import CodecContext

from spdl_media._checks import check_int
from spdl_media._ffmpeg import TranslatedErrors
from spdl_media.array_frames import frames_from_array
from spdl_media.destination import Target, check_target, write_whole
from spdl_media.encode import VideoEncodeConfig, VideoEncoder, best_pix_fmt, find_encoder
from spdl_media.errors import EncodeError
from spdl_media.formats import is_yuv
from spdl_media.image_frames import ImageFrames
from spdl_media.mux import Muxer

__all__ = ("encode_image", "save_image")

_QUALITY = 90


# For each format: FFmpeg's encoder, the muxer if a packet alone is not a file, and the default pixel format;
# None is the one that keeps most of the image.
_FORMATS: dict[str, tuple[str, str | None, str | None]] = {
    "jpeg": ("mjpeg", None, "yuvj420p"),
    "webp": ("libwebp", None, "bgra"),
    "avif": ("libsvtav1", "avif", "yuv420p"),
    "apng": ("apng", "apng", None),
    "gif": ("gif", "gif", None),
}
_SUFFIXES = {
    **dict.fromkeys(("jpg", "jpe", "jfif"), "jpeg"),
    "tif": "tiff",
    "jp2": "jpeg2000",
    "tga": "targa",
    "jls": "jpegls",
}


def encode_image(
    image: Any,
    format: str = "jpeg",
    *,
    quality: int | None = None,
    pix_fmt: str | None = None,
    layout: Literal["NCHW", "NHWC"] | None = None,
    encoder_options: Mapping[str, object] | None = None,
) -> bytes:
    """Encode one image.

    PNG, APNG, TIFF and PPM are lossless for uint8 and uint16. BMP, QOI, TGA (``"targa"``) and JPEG-LS are
    lossless for uint8 and keep 8 bits of uint16; a gray BMP may be one level off. JPEG and AVIF are written
    in full-range BT.601.

    FFmpeg's JPEG encoder supports no progressive scans, no EXIF and no ICC profile. Use Pillow if you need
    them, or gray JPEG.

    Args:
        image: Array or CPU tensor, as for :func:`~spdl_media.frames_from_array`: ``(H, W, 3)`` or
            ``(H, W, 4)`` RGB, ``(H, W)`` gray, uint8 or uint16. Or ``ImageFrames`` in any pixel format.
        format: ``"jpeg"``, ``"png"``, ``"webp"``, ``"avif"``, ``"gif"``, ``"apng"``, or the name of FFmpeg's
            encoder for another format, such as ``"tiff"``, ``"bmp"``, ``"qoi"`` or ``"jpeg2000"``.
        quality: 1 to 100 (best) for JPEG, WebP and AVIF; the default is 90. For JPEG it matches that of
            libjpeg approximately, in 31 steps.
        pix_fmt: Pixel format of the file, such as ``"yuvj444p"`` for JPEG with full chroma. The default is
            ``yuvj420p`` for JPEG, ``yuv420p`` for AVIF, and the one that keeps most of the image for others.
        layout: ``"NCHW"`` for an array ``(C, H, W)`` of RGB or gray.
        encoder_options: Options of the encoder, such as ``{"compression_level": 1}`` for PNG, or
            ``{"lossless": 1}`` for WebP, where colours of pixels with alpha 0 become 0.

    Returns:
        The content of the file.

    Raises:
        ValueError: FFmpeg has no such encoder, or the encoder no such option or pixel format; the array does
            not have the shape of an image, or an option does not apply to the format.
        TypeError: The dtype is not supported.
        EncodeError: The encoder fails, or the format has no alpha channel or no colours.

    Thread safety: safe.

    Example:
        >>> data = sm.encode_image(np.zeros((48, 64, 3), np.uint8), "png")
    """
    frames = image if isinstance(image, ImageFrames) else frames_from_array(image, layout=layout)
    if not isinstance(frames, ImageFrames):
        raise ValueError(
            f"encode_image takes one image, not {len(frames)}; pass images[0], or each in turn"
        )
    name, container, usual = _FORMATS.get(format, (format, None, None))
    encoder = find_encoder(name, "video")
    wanted = pix_fmt or usual or best_pix_fmt(encoder, frames.pix_fmt, exact=True)
    if pix_fmt is None and _has_colors(frames.pix_fmt) and not _has_colors(wanted):
        raise EncodeError(
            f"the image has colours, which {format} in {wanted} does not keep. Take another format, or give "
            "pix_fmt='gray'"
        )
    if _has_alpha(frames.pix_fmt) and not _has_alpha(wanted):
        raise EncodeError(
            f"the image has an alpha channel, which {format} in {wanted} does not keep. Leave it out: "
            "array[..., :3]"
        )
    options = _quality_options(format, quality)
    config = VideoEncodeConfig(
        width=frames.width,
        height=frames.height,
        encoder=encoder.name,
        pix_fmt=wanted,
        encoder_options={**options, **(encoder_options or {})},
        color_range="pc" if is_yuv(wanted) and name != "libwebp" else None,
    )
    if container is not None:
        file = io.BytesIO()
        # bitexact omits version numbers and dates, so that equal images give equal bytes.
        with Muxer(file, format=container, format_options={"fflags": "+bitexact"}) as muxer:
            muxer.write(muxer.add_encode_stream(config), frames)
        return file.getvalue()
    context: Any = CodecContext.create(encoder, "w")
    # Starting threads takes longer than encoding one image.
    context.thread_count = 1
    context.sample_aspect_ratio = Fraction(1)  # without it FFmpeg writes no JFIF header
    coder = VideoEncoder(context, config)
    size = f"{frames.width}x{frames.height}"
    with TranslatedErrors(lambda text, _: EncodeError(f"{name} cannot encode {size}: {text}")):
        return b"".join(map(bytes, (*coder.encode(frames), *coder.flush())))


def save_image(dst: Target, image: Any, *, format: str | None = None, **options: Any) -> None:
    """Encode one image and write it to a file.

    The file appears at its path only once it is complete.

    Args:
        dst: A path, or a binary file object with ``write``.
        image: Array, CPU tensor or ``ImageFrames``, as for :func:`encode_image`.
        format: Image format, as for :func:`encode_image`. The default follows from the suffix of the path.
        **options: ``quality``, ``pix_fmt``, ``layout`` and ``encoder_options`` of :func:`encode_image`.

    Raises:
        ValueError: The path has no suffix and ``format`` is not given, or :func:`encode_image` raises it.
        TypeError: The dtype is not supported.
        EncodeError: The encoder fails, or the format has no alpha channel or no colours.
        WriteError: The file cannot be written.

    Thread safety: safe.
    """
    check_target(dst)
    if format is None:
        name = dst if isinstance(dst, str | os.PathLike) else str(getattr(dst, "name", ""))
        suffix = PurePath(os.fsdecode(name)).suffix.lower().lstrip(".")
        if suffix not in {*_FORMATS, *_SUFFIXES, *av.format.ContainerFormat("image2").extensions}:
            raise ValueError(f"{dst!r} has no suffix of an image format; give format='png'")
        format = _SUFFIXES.get(suffix, suffix)
    write_whole(dst, encode_image(image, format, **options))


def _has_colors(pix_fmt: str) -> bool:
    form = av.VideoFormat(pix_fmt, 16, 16)
    return form.is_rgb or form.has_palette or any(part.is_chroma for part in form.components)


def _has_alpha(pix_fmt: str) -> bool:
    return any(part.is_alpha for part in av.VideoFormat(pix_fmt, 16, 16).components)


def _quality_options(format: str, quality: int | None) -> dict[str, str]:
    if quality is not None and format not in ("jpeg", "webp", "avif"):
        raise ValueError(f"quality= is for lossy 'jpeg', 'webp' and 'avif', not {format!r}")
    value = _QUALITY if quality is None else check_int("quality", quality)
    if value > 100:
        raise ValueError(f"quality must be 1 to 100, not {value}")
    if format == "jpeg":
        # libjpeg scales its tables by this percentage. On photographs of 500x375, FFmpeg's quantiser gives
        # the same size and quality at 0.04 to 0.1 of it.
        percent = 5000 / value if value < 50 else 200 - 2 * value
        scale = str(round(min(max(percent * 0.08, 1), 31)))
        return {"qmin": scale, "qmax": scale, "flags": "+bitexact"}
    if format == "webp":
        return {"quality": str(value)}
    return {"crf": str(round(63 * (100 - value) / 100))} if format == "avif" else {}
