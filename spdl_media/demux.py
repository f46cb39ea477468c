"""From a source to the packet of an image.

One image is the whole file, or the first key frame of a container.
Images that FFmpeg reads wrongly or not at all are one packet for Pillow, with pillow-heif for HEIC. Both are
the optional extra ``stills``; without it such a file is refused.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple

import av
import numpy as np

from spdl_media._container import Container
from spdl_media._optional import require
from spdl_media.boxes import Bytes
from spdl_media.codec import VideoCodec
from spdl_media.config import DemuxConfig, as_demux_config
from spdl_media.errors import DecodeError, DemuxError, MediaError
from spdl_media.inputs import Input, Source, open_input
from spdl_media.packets import ImagePackets, PacketMetadata, make_packet
from spdl_media.still_headers import read_jpeg_head
from spdl_media.stills import (
    HEAD_SIZE,
    STILL_FORMATS,
    container_still,
    is_avif,
    pillow_reason,
    still_codec,
    still_orientation,
)
from spdl_media.truncation import check_complete
from spdl_media.window import PILLOW_TIME_BASE, first_image, pillow_packets

__all__ = ("demux_image",)


def demux_image(
    src: Source, *, demux_config: DemuxConfig | None = None, name: str | None = None
) -> ImagePackets:
    """Read one image.

    JPEG, PNG, WebP, BMP, TIFF, PNM, JPEG 2000 and the like are one packet as they are, and no container
    is opened; the bytes are not copied. For GIF, AVIF and videos it is the packet of the first image.

    Args:
        src: A path, a URL for fsspec, bytes or another C-contiguous buffer, a 1-D uint8 array or CPU
            tensor, or a binary file-like object.
        demux_config: How to open it. ``format`` also takes the name of a still format, for those
            without a signature: ``demux_config(format="tga")``.
        name: What to call the source in messages.

    Returns:
        One packet. A still given as bytes, a buffer or an array is held as it is, so it must not be
        written to meanwhile.

    Raises:
        SourceError: It cannot be opened or read.
        MissingDependencyError: It is a URL, and fsspec is not installed.
        DemuxError: It is not an image.
        ValueError: ``demux_config`` has a format or an option that FFmpeg does not know.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    config = as_demux_config(demux_config)
    with open_input(src, config, name=name) as input:
        return read_image(input, config)


def read_image(input: Input, config: DemuxConfig) -> ImagePackets:
    """Read one image from an opened input; raises what :func:`demux_image` does.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: It is no media file, or has no image.
        ValueError: ``config`` has a format or an option that FFmpeg does not know.
    """
    decoder = still_decoder(input, config)
    if decoder is not None:
        return _whole_file(input, decoder)
    if config.format is None and (reason := pillow_reason(input.head(HEAD_SIZE))):
        return pillow_packets(ImagePackets, input.read_all(), input.name, reason)
    kind = container_still(input.head(HEAD_SIZE)) if config.format is None else None
    if kind is not None and not input.seekable:
        # It is read twice, by FFmpeg and for what FFmpeg does not tell.
        with open_input(input.read_all(), name=input.name) as whole:
            return read_image(whole, config)
    try:
        opened = Container(input, config)
    except DemuxError as error:
        if kind is None or not is_unsupported(error):
            raise
        reason = "an image that FFmpeg does not know"
        return pillow_packets(ImagePackets, input.read_all(), input.name, reason)
    with closing(opened) as container:
        # Known by its name alone (TGA, PCX ...), the file is one packet after all.
        decoder = container.named_still()
        if decoder is None:
            packets = first_image(container)
            if kind is None:
                return packets
            # FFmpeg makes a packet of these however short the file is.
            return packets.with_metadata(incomplete=check_complete(kind, container.content()))
    return _whole_file(input, decoder)


def still_decoder(input: Input, config: DemuxConfig) -> str | None:
    """The decoder that takes the whole file as one packet; ``None``: a container has to be opened.

    Raises:
        SourceError: The start of the source cannot be read.
    """
    if config.format is not None:
        return STILL_FORMATS.get(config.format)
    return still_codec(input.head(HEAD_SIZE))


def _whole_file(input: Input, decoder: str) -> ImagePackets:
    data = input.read_all()
    if not len(data):
        raise DemuxError("is empty (0 bytes)", source=input.name)
    codec = _still_stream(decoder)
    # One walk over the segments gives the orientation, and what a faster decoder asks before it
    # takes the image.
    head = read_jpeg_head(data) if decoder == "mjpeg" else None
    # All that is wrong with JPEGs is wrong with those of four components.
    if not (head and head.is_ycc) and (reason := pillow_reason(data, decoder)):
        return pillow_packets(ImagePackets, input.read_all(), input.name, reason)
    # Coded data never hold the marker of the end, so most JPEGs are settled by their last two bytes.
    is_whole = head is not None and data[-2:] == b"\xff\xd9"
    metadata = PacketMetadata(
        input.name,
        orientation=still_orientation(data) if head is None else head.orientation,
        incomplete=None if is_whole else check_complete(decoder, data),
        jpeg=head,
    )
    # The packet holds the caller's memory. Decoding copies it, for the padding that decoders want.
    return ImagePackets([make_packet(data, codec.time_base)], codec, metadata)


@cache
def _still_stream(decoder: str) -> VideoCodec:
    # A still has no stream to copy these from. YUV of JPEG 2000 is of full range (ISO 15444-1, annex M),
    # of which FFmpeg says nothing.
    color = (2, 2, 2, 2) if decoder == "jpeg2000" else (0, 2, 2, 2)
    return VideoCodec(av.Codec(decoder, "r").canonical_name, decoder, color=color)


class _PillowFrame(NamedTuple):
    """One image of a file.

    Attributes:
        frame: ``rgb24``, ``rgba``, ``gray``, ``gray16le`` or ``grayf32le``, full range, not turned upright.
        orientation: The EXIF number of the file's orientation.
    """

    frame: av.VideoFrame
    orientation: int


def is_unsupported(error: MediaError) -> bool:
    """Whether FFmpeg says of an image that it does not know its kind, rather than that it is damaged."""
    return _UNSUPPORTED.search(error.message) is not None


# What FFmpeg's decoders and demuxers write before they return an error that says less.
_UNSUPPORTED = re.compile(
    r"not yet implemented|not supported|unsupported|unknown pixel format", re.IGNORECASE
)


def read_with_pillow(
    data: Bytes, source: str, *, purpose: str, is_video: bool = False
) -> Iterator[_PillowFrame]:
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
    if bytes(memoryview(data).cast("B")[4:8]) == b"ftyp" and not is_avif(
        memoryview(data).cast("B")
    ):
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
                frame.pts, frame.time_base = time, PILLOW_TIME_BASE
                # Animations stand as they are, whatever their metadata says, as FFmpeg has them.
                turn = 1 if is_animation else image.getexif().get(0x0112, 1)
                # Files also have numbers that Exif does not know.
                yield _PillowFrame(frame, turn if turn in range(1, 9) else 1)
                # Pillow has milliseconds, the unit of PILLOW_TIME_BASE.
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
