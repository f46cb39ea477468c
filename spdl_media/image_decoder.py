"""One image from its packets, by a decoder of FFmpeg's or by Pillow."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any, Final, NamedTuple

import av
import numpy as np
import numpy.typing as npt

from spdl_media._ffmpeg import LogState
from spdl_media._optional import require
from spdl_media._picture_decoder import FrameList, PicturePath
from spdl_media.codec import VideoCodec, make_decoder
from spdl_media.config import DEFAULT_DECODE_CONFIG, DecodeConfig
from spdl_media.demux import is_unsupported
from spdl_media.errors import DecodeError, FilterError
from spdl_media.fast_images import (
    FULL_RANGE,
    GBR,
    FastChain,
    fast_chain,
    has_limited_gray,
    without_graph,
)
from spdl_media.filters import PictureFilter
from spdl_media.geometry import Box, Placement, fits, stored_box, stored_flips, swaps_sides
from spdl_media.image_frames import ImageFrames
from spdl_media.operations import PictureOps, picture_ops
from spdl_media.packets import (
    FrameMetadata,
    ImagePackets,
    PacketMetadata,
    VideoPackets,
    av_packets,
    coded_image,
    cut_short_error,
    metadata_of,
    padded_image,
)
from spdl_media.parts import Bytes
from spdl_media.still_faults import is_avif
from spdl_media.window import PILLOW_TIME_BASE

PILLOW: Final = "pillow"
"""The name of a decoder of ``decode_config`` that is none of FFmpeg's."""


class DecodedImage(NamedTuple):
    """A frame of FFmpeg's, and what it does not say of itself.

    Attributes:
        frame: The image, which belongs to nobody else.
        orientation: EXIF number of its orientation, 1 once it is upright.
        is_corrupt: The data is damaged, or cut short.
    """

    frame: av.VideoFrame
    orientation: int
    is_corrupt: bool = False

    def of(self, packets: ImagePackets) -> ImageFrames:
        """The image as users get it, with the metadata of its packets."""
        metadata = FrameMetadata.of(
            metadata_of(packets), orientation=self.orientation, is_corrupt=self.is_corrupt
        )
        return ImageFrames((self.frame,), metadata)


def decode_image(
    packets: ImagePackets, filter_desc: str | PictureOps | None, config: DecodeConfig
) -> DecodedImage:
    """Decode an image, turn it upright, and filter it.

    Args:
        packets: The image.
        filter_desc: The filters, or what they are to do; ``None``: it stays as it is decoded.
        config: How to decode.

    Raises:
        DecodeError: The data is damaged, or nothing decodes it.
        FilterError: The filters do not take it; a PictureSizeError: not in this size.
        MissingDependencyError: Pillow or simplejpeg is needed, and not installed.
        ValueError: A decoder or option of ``config`` does not exist.
    """
    # Without it, glibc returns the memory of each small image to the system, and takes it anew.
    keep_freed_memory()
    try:
        if config.downscale is not None:
            small = _decode_downscaled(packets, filter_desc, config)
            if small is not None:
                return DecodedImage(small, 1 if config.orient else metadata_of(packets).orientation)
        return filtered(_decode_whole(packets, config), packets, filter_desc, config)
    except FilterError as error:
        error.source = error.source or packets.source
        raise


def _decode_whole(packets: ImagePackets, config: DecodeConfig) -> DecodedImage:
    """Decode an image as it is stored."""
    metadata = metadata_of(packets)
    # Most JPEGs need no decoder of their own: one that is open gives what a fresh one gives.
    if (frame := _decode_plain_jpeg(packets, metadata, config)) is not None:
        return DecodedImage(frame, metadata.orientation)
    # A decoder that the caller names comes before the one that suits the file.
    if config.decoder == PILLOW or (metadata.pillow is not None and config.decoder is None):
        return _decode_by_pillow(packets)
    try:
        return _decode_by_ffmpeg(packets, config)
    except DecodeError as error:
        if config.decoder is not None or not is_unsupported(error):
            raise
        reason = f"{packets.codec.name} data that FFmpeg does not know"
        with suppress(DecodeError):
            return _decode_by_pillow(packets.with_metadata(pillow=reason))
        raise


def _decode_by_ffmpeg(packets: ImagePackets, config: DecodeConfig) -> DecodedImage:
    # There is one image, or an error: what is dropped or kept without a frame would lose its reason.
    strict = config if config.on_corrupt == "raise" else replace(config, on_corrupt="raise")
    missing = cut_short_error(packets, strict)
    if config.on_corrupt != "keep":
        if missing is not None:
            raise missing
        return _picture(packets, strict)
    try:
        image = _picture(packets, strict)
    except DecodeError as error:
        try:
            # Without its check for damage, FFmpeg gives what it has.
            options = {"err_detect": "0", **config.decoder_options}
            image = _picture(packets, replace(config, decoder_options=options))
        except DecodeError:  # there is nothing to keep
            raise error from error.__cause__
        return image._replace(is_corrupt=True)
    return image._replace(is_corrupt=missing is not None)


def _decode_by_pillow(packets: ImagePackets) -> DecodedImage:
    data, purpose = av_packets(packets)[0], pillow_purpose(packets)
    return DecodedImage(*next(read_with_pillow(memoryview(data), packets.source, purpose=purpose)))


def pillow_purpose(packets: VideoPackets) -> str:
    """Say what needs Pillow, for the message where it is missing."""
    reason = metadata_of(packets).pillow or "decode_config(decoder='pillow')"
    return f"{packets.source}: {reason}"


def filtered(
    image: DecodedImage,
    packets: ImagePackets,
    filter_desc: str | PictureOps | None,
    config: DecodeConfig,
) -> DecodedImage:
    """Turn a decoded image upright, and filter it.

    Raises:
        FilterError: The filters do not take it.
        DecodeError: They give nothing.
    """
    if filter_desc is None:
        return image
    frame, orientation, is_corrupt = image
    ops = picture_ops(filter_desc)
    is_turned = config.orient and orientation != 1
    if not (ops is None or is_turned or has_limited_gray(frame)):
        # The scaler alone, where it gives what a graph does.
        small = without_graph(frame, ops)
        if small is not None:
            return DecodedImage(small, 1 if config.orient else orientation, is_corrupt)
    filter = PictureFilter(packets.codec, filter_desc, config)
    # Some filters hold a lone frame back until the end.
    frames = [*filter.push(frame, orientation)] or [*filter.flush()]
    if not frames:
        raise _no_picture(packets)
    return DecodedImage(frames[0], filter.orientation, is_corrupt)


def _picture(packets: ImagePackets, config: DecodeConfig) -> DecodedImage:
    path = PicturePath(packets.codec, metadata_of(packets), None, config)
    sink = FrameList(1)
    path.run(av_packets(packets), sink)
    if not sink.frames:
        raise _no_picture(packets)
    return DecodedImage(sink.frames[0], path.take_metadata().orientation)


def _no_picture(packets: ImagePackets) -> DecodeError:
    return DecodeError(
        f"the {packets.codec.name} data holds no image that can be decoded", source=packets.source
    )


_STILL_JPEG = VideoCodec("mjpeg", "mjpeg")
# An open decoder keeps the memory of its last image. For larger ones opening is nothing.
_MAX_PIXELS = 4_000_000
_NOT_STATED = Fraction(0, 1)


class _AtRest(threading.local):
    """The open decoder that a thread has at rest, if any."""

    # Opening one takes 60 microseconds, a tenth of the time in which it decodes 500x375 pixels: half goes
    # into its tables, half into memory that the system has to clear for it anew.
    context: Any = None


_at_rest = _AtRest()


def _decode_plain_jpeg(
    packets: ImagePackets, metadata: PacketMetadata, config: DecodeConfig
) -> av.VideoFrame | None:
    """Decode a JPEG for which any open decoder is as good as a fresh one.

    Returns:
        The frame that a fresh decoder gives; ``None``: it is no such file, options were set, or decoding
        failed. A fresh decoder then says what.
    """
    if metadata.jpeg is None or not metadata.jpeg.stands_alone or metadata.incomplete is not None:
        return None
    if config.decoder is not None or config.decoder_options or LogState.forwarded:
        return None
    if (packet := padded_image(packets)) is None:
        return None
    # Taken while in use, so that a signal handler that decodes, too, does not find it.
    context, _at_rest.context = _at_rest.context, None
    if context is None:
        context = make_decoder(_STILL_JPEG, DEFAULT_DECODE_CONFIG, "JPEG")
    with av.logging.Capture():
        try:
            frames: list[av.VideoFrame] = context.decode(packet)
        # The decoder is not put back: after an error its state is not that of a fresh one.
        except av.FFmpegError:
            return None
    # Nor is one that has given anything unusual.
    if len(frames) != 1 or frames[0].is_corrupt:
        return None
    frame = frames[0]
    if frame.width * frame.height <= _MAX_PIXELS:
        context.sample_aspect_ratio = _NOT_STATED  # not every JPEG states its own
        _at_rest.context = context
    frame.time_base = _STILL_JPEG.time_base
    return frame


_BLOCK = 4 << 20
_NUM_BLOCKS = 8


@cache
def keep_freed_memory() -> None:
    """Let glibc's allocator keep some megabytes that were freed, once in a process.

    It gives the end of its heap back to the system when that is larger than a limit, at first 128 KiB, which
    the frames of one small image exceed, and takes it anew for the next: 24 to 33 page faults an image,
    and 6% of the time in which JPEGs of 500x375 are loaded into a pool. When a block is freed that was larger
    than the limit, glibc raises it to twice its size. So blocks are freed here, whose pages nobody touches.
    Other allocators take no notice.

    See:
        mallopt(3), ``M_MMAP_THRESHOLD`` and its dynamic adjustment
    """
    # Only a block that has a mapping of its own raises the limit. The first ones may fill holes of the heap.
    blocks = [np.empty(_BLOCK, np.uint8) for _ in range(_NUM_BLOCKS)]
    del blocks


def read_with_pillow(
    data: Bytes, source: str, *, purpose: str, is_video: bool = False
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Decode an image, or the frames of an animation one after the other, by Pillow.

    Args:
        data: The whole file.
        source: What it was read from, for messages.
        purpose: What needs Pillow, the subject of the message where it is missing.
        is_video: Give all frames of an animation.

    Yields:
        The frames in order, each composed as its animation says, and the EXIF number of their orientation.
        They are ``rgb24``, ``rgba``, ``gray``, ``gray16le`` or ``grayf32le`` of full range. Without
        ``is_video``, the one that programs show which know no animations; of an icon the largest image, of a
        HEIC the primary one.

    Raises:
        MissingDependencyError: Pillow is not installed, or pillow-heif for HEIC.
        DecodeError: The data is damaged, or Pillow does not know the format.
    """
    image_module: Any = require("pillow", purpose)
    view = memoryview(data).cast("B")
    if bytes(view[4:8]) == b"ftyp" and not is_avif(view):
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
                yield frame, turn if turn in range(1, 9) else 1
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


def _new_frame(pixels: np.ndarray[Any, Any], pix_fmt: str) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), pix_fmt)
    frame.color_range = FULL_RANGE
    if pix_fmt.startswith("rgb"):
        frame.colorspace = GBR
    return frame


# JPEGs that are shrunk while they are decoded, by libjpeg.

# Eighths of a side, the smallest first. The others take longer than the next larger one here.
_EIGHTHS = (1, 2, 4)
# What is left is so many times as large as the result at least: the higher frequencies of those are wanted.
_MARGIN = 1.2
# Edges fall on whole pixels of the smaller image. They may move by so much of a pixel of the result.
_MAX_SHIFT = 0.125


class _Part(NamedTuple):
    """A box of the shrunk image, as it is stored, and how much it was shrunk."""

    eighths: int
    columns: slice
    rows: slice


def _decode_downscaled(
    packets: ImagePackets, filter: str | PictureOps | None, config: DecodeConfig
) -> av.VideoFrame | None:
    """Decode a JPEG at less than its size, turn it upright, and filter it.

    Returns:
        The frame; ``None``, if it has to be decoded whole: no YCbCr JPEG, cut short or damaged, too small,
        a filter that does not scale first, or a crop whose edges would move.

    Raises:
        MissingDependencyError: simplejpeg is not installed.
    """
    simplejpeg = require("simplejpeg", "decode_config(downscale='dct')")
    metadata, ops = metadata_of(packets), picture_ops(filter)
    head = metadata.jpeg
    if head is None or not head.is_ycc or metadata.incomplete is not None or len(packets) != 1:
        return None
    if ops is None or config.decoder is not None or config.decoder_options:
        return None
    chain = fast_chain(ops.uncut)
    if chain is None or not chain.scales_first:
        return None
    orientation = metadata.orientation if config.orient else 1
    plan = _plan(head.width, head.height, orientation, chain, ops.box)
    if plan is None:
        return None
    part, placement = plan
    small = _shrunk(head.width, part), _shrunk(head.height, part)
    pixels = _decode_small(simplejpeg, packets, *small)
    if pixels is None:
        return None
    upright = _upright(pixels, part, orientation)
    frame = av.VideoFrame.from_numpy_buffer(upright, "rgb24")
    # PyAV leaves both unset for an array.
    frame.colorspace, frame.color_range = GBR, FULL_RANGE
    frame.time_base = packets.codec.time_base
    # The result is mirrored, for it is the smaller one.
    return chain.from_rgb().run(frame, placement, mirror=ops.mirror)


def _plan(
    width: int, height: int, orientation: int, chain: FastChain, box: Box | None
) -> tuple[_Part, Placement] | None:
    """The part of a stored image to decode, and how that is scaled and placed."""
    swaps = swaps_sides(orientation)
    upright = (height, width) if swaps else (width, height)
    box = box or (0, 0, *upright)
    placement = chain.plan(box[2:]) if fits(box, *upright) else None
    if placement is None:
        return None
    # Everything from here on is in the image as it is stored.
    target = placement.scaled[::-1] if swaps else placement.scaled
    part = _smallest_part(stored_box(box, orientation, width, height), *target)
    return None if part is None else (part, placement)


def _smallest_part(box: Box, width: int, height: int) -> _Part | None:
    """The part of the smallest image that is as good for a result of this size as the whole one."""
    x, y, w, h = box
    for eighths in _EIGHTHS:
        columns, rows = _shrunk_span(x, w, eighths, width), _shrunk_span(y, h, eighths, height)
        if columns is not None and rows is not None:
            return _Part(eighths, columns, rows)
    return None


def _shrunk_span(start: int, length: int, eighths: int, target: int) -> slice | None:
    """Where pixels of one side stand in the shrunk image; ``None``: they are too few, or their edges move."""
    exact = [edge * eighths / 8 for edge in (start, start + length)]
    first, last = map(round, exact)
    if last - first < _MARGIN * target:
        return None
    shift = max(abs(exact[0] - first), abs(exact[1] - last)) * target / (last - first)
    return slice(first, last) if shift <= _MAX_SHIFT else None


def _shrunk(side: int, part: _Part) -> int:
    # libjpeg rounds the shrunk size up.
    return -(-side * part.eighths // 8)


def _decode_small(
    simplejpeg: Any, packets: ImagePackets, width: int, height: int
) -> npt.NDArray[np.uint8] | None:
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            coded_image(packets), colorspace="RGB", min_width=width, min_height=height
        )
    except ValueError:  # anything the matter, even if it could be helped: FFmpeg is to say what
        return None
    # libjpeg picks the factor by the least size, so another one shows in the shape.
    return pixels if pixels.shape == (height, width, 3) else None


def _upright(pixels: npt.NDArray[np.uint8], part: _Part, orientation: int) -> npt.NDArray[np.uint8]:
    view = pixels[part.rows, part.columns]
    backwards, upwards = stored_flips(orientation)
    view = view[:: -1 if upwards else 1, :: -1 if backwards else 1]
    if swaps_sides(orientation):
        view = view.swapaxes(0, 1)
    # A copy where rows run upwards, or pixels of a row do not follow each other.
    return view if orientation == 1 else np.ascontiguousarray(view)
